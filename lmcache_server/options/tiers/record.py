"""What a tier keeps of an object: the payload, then an end block that says what it is.

The payload's whole 4 KiB pages are read and written where they are in L1. The end block has the payload's
rest and the trailer: magic, namespace, key, number of the object, of its blocks and of its bytes, a nonce
(zero), and the XXH3-128 of all that comes before. XXH3 finds damage, not forgery.

With a secret key, all but the trailer is encrypted (AES-256-GCM), and the digest is GCM's tag. Nobody can
forge that without the key.
"""

import ctypes
import hashlib
import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import xxhash

from lmcache_client.contract import key_file

PAGE_BYTES = 4096
PLAIN, ENCRYPTED = b"LMCMP-R1", b"LMCMP-E1"
_HEAD = struct.Struct("<8s32s32sIIQ")
_NONCE_BYTES, _DIGEST_BYTES = 12, 16
_SEAL_BYTES = _NONCE_BYTES + _DIGEST_BYTES
_TRAILER_BYTES = _HEAD.size + _SEAL_BYTES


class DamagedRecordError(Exception):
    """A record is not what its name says."""


@dataclass(frozen=True)
class Label:
    """Which object a record keeps: number `bit` of the chunk `key`, with `num_blocks` blocks, `num_bytes` of
    payload."""

    namespace: bytes
    key: bytes
    bit: int
    num_blocks: int
    num_bytes: int

    @property
    def name(self) -> str:
        return f"{self.namespace.hex()}/{self.key.hex()}.{self.bit}"

    @property
    def end_bytes(self) -> int:
        """The size of the end block, whole pages."""
        return -(-(self.num_bytes % PAGE_BYTES + _TRAILER_BYTES) // PAGE_BYTES) * PAGE_BYTES

    def head(self, magic: bytes) -> bytes:
        """The trailer up to the nonce."""
        return _HEAD.pack(magic, self.namespace, self.key, self.bit, self.num_blocks, self.num_bytes)


class RecordCipher(NamedTuple):
    """An AESGCM, and what tells its key from others."""

    aead: Any
    key_id: str


class Record:
    """A record in memory. `payload` lists (address, bytes) of the object's frames in L1, cut to its size. The
    addresses are multiples of 4 KiB, and so is every size but the last."""

    def __init__(self, label: Label, payload: Sequence[tuple[int, int]]) -> None:
        self.label = label
        self._end = memoryview(mmap.mmap(-1, label.end_bytes))  # O_DIRECT needs whole pages
        rest = label.num_bytes % PAGE_BYTES
        *runs, (address, size) = payload
        self._rest = _view(address + size - rest, rest)
        whole = [*runs, (address, size - rest)]
        self.pieces = [*(_view(start, length) for start, length in whole if length), self._end]

    def seal(self) -> None:
        """Fill the end block."""
        self._end[: len(self._rest)] = self._rest
        self._end[-_TRAILER_BYTES:-_SEAL_BYTES] = self.label.head(PLAIN)
        self._end[-_DIGEST_BYTES:] = self._digest()

    def open(self) -> None:
        """Complete the payload from the end block. Raises DamagedRecordError."""
        if self._end[-_TRAILER_BYTES:-_SEAL_BYTES] != self.label.head(PLAIN):
            raise DamagedRecordError(f"record {self.label.name} says that it is another object's")
        if self._end[-_DIGEST_BYTES:] != self._digest():
            raise DamagedRecordError(f"record {self.label.name} is damaged")
        self._rest[:] = self._end[: len(self._rest)]

    def _digest(self) -> bytes:
        digest = xxhash.xxh3_128()
        for piece in self.pieces[:-1]:
            digest.update(piece)
        digest.update(self._end[:-_DIGEST_BYTES])
        return bytes(digest.digest())


class EncryptedRecord:
    """As Record, encrypted with `cipher`. It is read and written in one piece of its own."""

    def __init__(self, label: Label, payload: Sequence[tuple[int, int]], cipher: RecordCipher) -> None:
        self.label = label
        self._cipher = cipher
        self._payload = [_view(start, length) for start, length in payload]
        whole = label.num_bytes // PAGE_BYTES * PAGE_BYTES
        self._memory = memoryview(mmap.mmap(-1, whole + label.end_bytes))
        self.pieces = [self._memory]

    def seal(self) -> None:
        head, nonce = self.label.head(ENCRYPTED), os.urandom(_NONCE_BYTES)
        padding = bytes(len(self._memory) - _TRAILER_BYTES - self.label.num_bytes)
        secret = self._cipher.aead.encrypt(nonce, b"".join([*self._payload, padding]), head)
        parts = (secret[:-_DIGEST_BYTES], head, nonce, secret[-_DIGEST_BYTES:])
        self._memory[:] = b"".join(parts)

    def open(self) -> None:
        """Decrypts the payload. Raises DamagedRecordError."""
        from cryptography.exceptions import InvalidTag

        trailer = bytes(self._memory[-_TRAILER_BYTES:])
        head, nonce = self.label.head(ENCRYPTED), trailer[-_SEAL_BYTES:-_DIGEST_BYTES]
        secret = b"".join((self._memory[:-_TRAILER_BYTES], trailer[-_DIGEST_BYTES:]))
        try:
            plain = memoryview(self._cipher.aead.decrypt(nonce, secret, head))
        except InvalidTag:
            raise DamagedRecordError(f"record {self.label.name} is damaged, or of another key_file") from None
        for view in self._payload:
            view[:] = plain[: len(view)]
            plain = plain[len(view) :]


def read_key(path: str) -> RecordCipher:
    """The cipher for the key in a file. Raises ValueError that says what to do."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        raise ValueError("key_file needs the package cryptography: pip install '.[encrypted]'") from None
    content = key_file.read_key(path)
    return RecordCipher(AESGCM(content), hashlib.sha256(b"lmcache-mp key" + content).hexdigest()[:8])


def _view(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")
