"""What a tier keeps of an object: the payload, then an end block that says what it is.

The payload's whole 4 KiB pages are read and written where they are in L1. The end block has the payload's
rest and the trailer: magic, namespace, key, number of the object, of its blocks and of its bytes, a nonce
(zero), and the payload's digest (transfer/digest.py).

A compressed record is shorter: it has the body that compressed_body.py describes, and at its end the
trailer.

With a secret key, all but the trailer is encrypted (AES-256-GCM), and GCM's tag takes the place of the
digest. Nobody can forge that without the key.
"""

import ctypes
import hashlib
import mmap
import os
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lmcache_client.contract import key_file
from lmcache_server.options.tiers.compressed_body import expand
from lmcache_server.options.tiers.pieces import PAGE_BYTES, first, gather, size, spread
from lmcache_server.options.tiers.record_name import record_name
from lmcache_server.transfer.digest import digest

PLAIN, ENCRYPTED = b"LMCMP-R2", b"LMCMP-E1"
_COMPRESSED = {PLAIN: b"LMCMP-C2", ENCRYPTED: b"LMCMP-X1"}
_HEAD = struct.Struct("<8s32s32sIIQ")
_NONCE_BYTES, _DIGEST_BYTES = 12, 16
_SEAL_BYTES = _NONCE_BYTES + _DIGEST_BYTES
_TRAILER_BYTES = _HEAD.size + _SEAL_BYTES
MAX_SPARE_BYTES = 16 << 20
_spare = threading.local()
"""Has memory of a former record of this thread: the pages of a new map cost more than to fill them."""


class DamagedRecordError(Exception):
    """A record is not what its name says, or an object that is to be written not what its digest says."""


@dataclass(frozen=True)
class Label:
    """Which object a record keeps: number `bit` of the chunk `key`, with `num_blocks` blocks, `num_bytes` of
    payload. `digest` is empty if nobody has taken it yet."""

    namespace: bytes
    key: bytes
    bit: int
    num_blocks: int
    num_bytes: int
    digest: bytes = b""

    @property
    def name(self) -> str:
        return record_name(self.namespace, self.key, self.bit)

    @property
    def end_bytes(self) -> int:
        """The size of the end block, whole pages."""
        return -(-(self.num_bytes % PAGE_BYTES + _TRAILER_BYTES) // PAGE_BYTES) * PAGE_BYTES

    @property
    def record_bytes(self) -> int:
        """The size of a record that is not compressed. Every other is smaller."""
        return self.num_bytes // PAGE_BYTES * PAGE_BYTES + self.end_bytes

    def head(self, magic: bytes, compressed: bool) -> bytes:
        """The trailer up to the nonce."""
        magic = _COMPRESSED[magic] if compressed else magic
        return _HEAD.pack(magic, self.namespace, self.key, self.bit, self.num_blocks, self.num_bytes)


class RecordCipher(NamedTuple):
    """An AESGCM, and what tells its key from others."""

    aead: Any
    key_id: str


class Record:
    """A record in memory. `payload` lists (address, bytes) of the object's frames in L1, cut to its size. The
    addresses are multiples of 4 KiB, and so is every size but the last."""

    def __init__(self, label: Label, payload: Sequence[tuple[int, int]]) -> None:
        self.label, self._addresses, self._told = label, payload, f"record {label.key.hex()[:16]}"
        self.payload = [_view(start, length) for start, length in payload]
        end = _spare.__dict__.pop("end", None) or mmap.mmap(-1, 2 * PAGE_BYTES)
        self._end = memoryview(end)[: label.end_bytes]
        self._body = memoryview(b"")
        *runs, last = self.payload
        whole = last.nbytes - label.num_bytes % PAGE_BYTES
        self._rest = last[whole:]
        self.pieces = [*filter(len, [*runs, last[:whole]]), self._end]

    def seal(self, body: Sequence[memoryview] = ()) -> None:
        """Make the pieces the record of the payload, or of its compressed `body`."""
        end = self._end
        if body:
            end = self._own(compressed_bytes(body))
            gather(body, end)
            end[size(body) :] = bytes(end.nbytes - size(body))
            self.pieces = [end]
        else:
            end[:] = bytes(self._rest).ljust(len(end), b"\0")
        end[-_TRAILER_BYTES:-_SEAL_BYTES] = self.label.head(PLAIN, bool(body))
        end[-_DIGEST_BYTES:] = self.label.digest or digest(self._addresses)

    def open(self, num_bytes: int) -> bytes:
        """Completes the payload from the first `num_bytes` of the pieces, and returns its digest. Raises
        DamagedRecordError, TierError."""
        end, compressed = self._end, num_bytes < self.label.record_bytes
        if compressed:
            end = self._own(num_bytes)
            gather(first(self.pieces, num_bytes), end)
        if end[-_TRAILER_BYTES:-_SEAL_BYTES] != self.label.head(PLAIN, compressed):
            raise DamagedRecordError(f"{self._told} says that it is another object's")
        zeros = bytes(end[-_SEAL_BYTES:-_DIGEST_BYTES])
        if compressed:
            _expand(self.label, end[:-_TRAILER_BYTES], self.payload)
        else:
            self._rest[:] = end[: len(self._rest)]
            zeros += bytes(end[len(self._rest) : -_TRAILER_BYTES])
        if end[-_DIGEST_BYTES:] != (found := digest(self._addresses)) or zeros != bytes(len(zeros)):
            raise DamagedRecordError(f"{self._told} is damaged")
        return found

    def release(self) -> None:
        """Neither the record nor its pieces are used any more."""
        _spare.end = self._end.obj
        if len(_spare.__dict__.get("body", b"")) < self._body.nbytes <= MAX_SPARE_BYTES:
            _spare.body = self._body.obj

    def _own(self, num_bytes: int) -> memoryview:
        """Memory for the record outside of L1. O_DIRECT needs whole pages."""
        is_enough = len(_spare.__dict__.get("body", b"")) >= num_bytes
        self._body = memoryview(_spare.__dict__.pop("body") if is_enough else mmap.mmap(-1, num_bytes))
        return self._body[:num_bytes]


class EncryptedRecord(Record):
    """As Record, encrypted with `cipher`. It is read and written in one piece of its own."""

    def __init__(self, label: Label, payload: Sequence[tuple[int, int]], cipher: RecordCipher) -> None:
        super().__init__(label, payload)
        self._cipher = cipher
        self.pieces = [self._own(label.record_bytes)]

    def seal(self, body: Sequence[memoryview] = ()) -> None:
        if body:
            self.pieces = [self.pieces[0][: compressed_bytes(body)]]
        (memory,), content = self.pieces, body or self.payload
        head, nonce = self.label.head(ENCRYPTED, bool(body)), os.urandom(_NONCE_BYTES)
        padding = bytes(len(memory) - _TRAILER_BYTES - size(content))
        secret = self._cipher.aead.encrypt(nonce, b"".join([*content, padding]), head)
        memory[:] = b"".join((secret[:-_DIGEST_BYTES], head, nonce, secret[-_DIGEST_BYTES:]))

    def open(self, num_bytes: int) -> bytes:
        """Decrypts the payload. Raises DamagedRecordError, TierError."""
        from cryptography.exceptions import InvalidTag

        memory, compressed = self.pieces[0][:num_bytes], num_bytes < self.label.record_bytes
        trailer = bytes(memory[-_TRAILER_BYTES:])
        head, nonce = self.label.head(ENCRYPTED, compressed), trailer[-_SEAL_BYTES:-_DIGEST_BYTES]
        secret = b"".join((memory[:-_TRAILER_BYTES], trailer[-_DIGEST_BYTES:]))
        try:
            plain = memoryview(self._cipher.aead.decrypt(nonce, secret, head))
        except (InvalidTag, ValueError):  # too short for a nonce
            raise DamagedRecordError(f"{self._told} is damaged, or of another key_file") from None
        if compressed:
            _expand(self.label, plain, self.payload)
        else:
            spread(plain, self.payload)
        return digest(self._addresses)


def read_key(path: str) -> RecordCipher:
    """The cipher for the key in a file. Raises ValueError that says what to do."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        raise ValueError("key_file needs the package cryptography: pip install '.[encrypted]'") from None
    content = key_file.read_key(path)
    return RecordCipher(AESGCM(content), hashlib.sha256(b"lmcache-mp key" + content).hexdigest()[:8])


def compressed_bytes(body: Sequence[memoryview]) -> int:
    """The size of the record that has this body."""
    return -(-(size(body) + _TRAILER_BYTES) // PAGE_BYTES) * PAGE_BYTES


def _expand(label: Label, body: memoryview, payload: Sequence[memoryview]) -> None:
    try:
        expand(body, payload)
    except ValueError as error:
        raise DamagedRecordError(f"record {label.key.hex()[:16]} cannot be expanded: {error}") from error


def _view(address: int, num_bytes: int) -> memoryview:
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")
