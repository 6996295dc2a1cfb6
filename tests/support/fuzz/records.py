"""Compressed records of a tier, written by anybody: the object as it was, or an error that says "damaged"."""

import ctypes
import mmap

import numpy as np

from fuzz.choices import Choices, Target
from lmcache_server.options.tiers.compressed_body import METHODS, compress
from lmcache_server.options.tiers.record_format import DamagedRecordError, Label, Record

PAYLOAD_BYTES = 40_000
GUARD_BYTES = 4096
HEADER_BYTES = 96
"""The headers of the body and of its segment, and where its blocks and streams are."""


class RecordsTarget(Target):
    """An input changes bytes of a record, in its headers or anywhere, or cuts it."""

    def __init__(self) -> None:
        super().__init__()
        self._map = mmap.mmap(-1, (PAYLOAD_BYTES // 4096 + 1) * 4096 + GUARD_BYTES)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        floats = np.random.default_rng(1).standard_normal(PAYLOAD_BYTES // 4).astype(np.float32)
        self._content = floats.tobytes()
        self._label = Label(bytes(32), bytes(32), 0, 1, PAYLOAD_BYTES)
        self._records = [self._sealed(method, element) for method in METHODS for element in (2, 4)]
        self.seeds = [bytes([number, how, 1, 3, 9, 5]) for number in range(4) for how in range(4)] + [b"\3"]

    def _sealed(self, method: str, element: int) -> bytes:
        record = self._record(self._content)
        record.seal(compress(record.payload, method, element))
        return b"".join(record.pieces)

    def _record(self, content: bytes) -> Record:
        self._map[:] = content + bytes([0x5A]) * (len(self._map) - len(content))
        return Record(self._label, [(self._address, PAYLOAD_BYTES)])

    def run(self, data: bytes) -> None:
        self.inputs += 1
        choices = Choices(data)
        written = bytearray(self._records[choices.below(len(self._records))])
        while choices.left:
            how, at = choices.below(4), choices.below(256) << 8 | choices.below(256)
            if how == 3 and not choices.below(4):
                del written[max(at % len(written) // 4096, 1) * 4096 :]
            else:
                written[at % (len(written) if how == 2 else HEADER_BYTES)] = choices.below(256)
        record, rest = self._record(bytes(PAYLOAD_BYTES)), bytes(written)
        for piece in record.pieces:
            piece[: len(rest)] = rest[: len(piece)]
            rest = rest[len(piece) :]
        try:
            record.open(len(written))
        except DamagedRecordError:
            self.outcomes["damaged"] += 1
        else:
            assert self._map[:PAYLOAD_BYTES] == self._content
            self.outcomes["whole"] += 1
        assert self._map[-GUARD_BYTES:] == bytes([0x5A]) * GUARD_BYTES, "nothing else is written to"
