"""L1's file, written by anybody: the next server restores a whole cache, or starts empty, or refuses.

Inputs bend the index or the header and put the digests right again, so that what lies behind them is reached.
That a wrong digest or length is noticed, options/warm_restart/test_l1_file.py shows.
"""

import hashlib
import json
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import msgpack

from fuzz.choices import Choices, Target, bend, frame_of
from lmcache_client.contract import codec
from lmcache_client.contract.geometry import GroupSpec, Region
from lmcache_server.core.cache import Cache, Layout, Reservation
from lmcache_server.core.pool import FRAME_BYTES
from lmcache_server.errors import StartError
from lmcache_server.options.warm_restart import l1_file, server
from lmcache_server.options.warm_restart.snapshot import Known, decode, rebuild, take

FRAMES = 12
_GROUPS = (GroupSpec("full", 16, 0, "tag", (Region(0, 0, 64, 64),)), GroupSpec("recurrent", 16, 0, "", ()))
LAYOUTS = tuple(Layout(bytes([name]) * 32, 16, _GROUPS, ((0, 1), (0,))) for name in (1, 2))
KEYS = tuple(bytes([number]) * 32 for number in range(3))


def _filled() -> Cache:
    cache = Cache(FRAME_BYTES, FRAMES)
    for number, key in enumerate(KEYS):
        for group, shard in ((0, 0), (0, 1), (1, 0)):
            size_bytes = FRAME_BYTES * (1 + (number == 2 and not group)) - 5
            made = cache.reserve(LAYOUTS[number % 2], key, group, shard, 1, size_bytes)
            assert isinstance(made, Reservation)
            cache.commit(made)
    cache.protect([chunk for chunk in cache.order if chunk.key in KEYS[:2]])
    return cache


class FilesTarget(Target):
    def __init__(self) -> None:
        super().__init__()
        self._directory = tempfile.TemporaryDirectory(prefix="lmcache-fuzz-", dir="/dev/shm")
        self._path = Path(self._directory.name, "l1")
        known: Known = {layout.namespace: {"model": "m", "groups": []} for layout in LAYOUTS}
        self._index = codec.pack(take(_filled(), known, {"an option": b"its own"}, 1.0, 1.0))
        # The last one changes the bits of a chunk.
        bits = bytes.fromhex("03487611fce7ac0e")
        self.seeds = [b"", *(bytes([how, 1, 2, 3, 1, 2, 0, 5, 7, 1, 9, 200, 4]) for how in range(5)), bits]

    def close(self) -> None:
        self._directory.cleanup()

    def _open(self) -> l1_file.L1File:
        return l1_file.L1File(str(self._path), FRAMES * FRAME_BYTES)

    def run(self, data: bytes) -> None:
        self.inputs += 1
        choices = Choices(data)
        how = choices.below(5)
        index = self._index if how in (0, 4) else self._bent_index(choices, as_bytes=how == 1)
        self._path.unlink(missing_ok=True)
        with closing(self._open()) as file:
            file.finish(index)
        if how == 4:
            self._bend_header(choices)
        try:
            file = self._open()
        except StartError as error:
            self._note_refusal(str(error))
            return
        with closing(file):
            self._restore(file)

    def _note_refusal(self, sentence: str) -> None:
        assert "\n" not in sentence, sentence
        self.outcomes["refused"] += 1

    def _restore(self, file: l1_file.L1File) -> None:
        cache, known = Cache(FRAME_BYTES), Known()
        server.restore(file, cache, known)
        cache.check_integrity()
        assert cache.total_frames <= FRAMES
        assert file.index is None
        self.outcomes["restored" if cache.num_chunks else "empty"] += 1
        # As the status does with every namespace that it lists.
        json.dumps([{**summary, "chunks": 0} for summary in known.values()]).encode()
        # The cache works: what was restored can be looked up, evicted and saved again.
        cache.grow(FRAMES - cache.total_frames)
        for layout in LAYOUTS:
            for key in KEYS:
                cache.lookup(layout, [key], 0, 16, 1, 50.0)
                cache.check_integrity()
        cache.drop_owner(1)
        index = codec.pack(take(cache, known, {}, 60.0, 1.0))
        again = Cache(FRAME_BYTES)
        rebuild(decode(index, FRAMES), again, 0.0, 60.0)
        again.check_integrity()
        assert again.num_chunks == cache.num_chunks

    def _bent_index(self, choices: Choices, *, as_bytes: bool) -> bytes:
        index, fields, times = bytearray(self._index), msgpack.unpackb(self._index), 1 + choices.below(4)
        if not as_bytes:
            bend(fields, choices, times)
            return frame_of(fields, choices)
        for _ in range(times):
            at = (choices.below(256) << 8 | choices.below(256)) % len(index)
            index[at : at + choices.below(3)] = choices.take(choices.below(4))
        return bytes(index)

    def _bend_header(self, choices: Choices) -> None:
        with self._path.open("r+b") as file:
            fields: Any = bytearray(file.read(l1_file._FIELDS.size))
            for _ in range(1 + choices.below(3)):
                fields[choices.below(len(fields))] = choices.below(256)
            file.seek(0)
            file.write(fields + hashlib.sha256(fields).digest())
