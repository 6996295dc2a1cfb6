"""L1's file, written by anybody: the next server restores a whole cache, or starts empty, or refuses."""

import json
import os
import tempfile
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

from fuzz.choices import Choices, bend
from lmcache_client.contract import codec
from lmcache_client.contract.geometry import GroupSpec, Region
from lmcache_server.core.cache import Cache, Layout, Reservation
from lmcache_server.core.pool import FRAME_BYTES
from lmcache_server.errors import StartError
from lmcache_server.l1 import file as l1_file
from lmcache_server.l1 import restart
from lmcache_server.l1.file import HEADER_BYTES, L1File

FRAMES = 12
SIZE_BYTES = FRAMES * FRAME_BYTES
HEAD_BYTES = l1_file._FIELDS.size + 32
_GROUPS = (GroupSpec("full", 16, 0, "tag", (Region(0, 0, 64, 64),)), GroupSpec("recurrent", 16, 0, "", ()))
LAYOUTS = tuple(Layout(bytes([name]) * 32, 16, _GROUPS, ((0, 1), (0,))) for name in (1, 2))


def _filled() -> Cache:
    cache = Cache(FRAME_BYTES, FRAMES)
    for number in range(3):
        layout = LAYOUTS[number % 2]
        for group, shard in ((0, 0), (0, 1), (1, 0)):
            size_bytes = FRAME_BYTES * (1 + (number == 2 and not group)) - 5
            made = cache.reserve(layout, bytes([number]) * 32, group, shard, 1, size_bytes)
            assert isinstance(made, Reservation)
            cache.commit(made)
    for name, numbers in (("one", (0,)), ("both", (0, 1))):
        for number in numbers:
            cache.pin(name, LAYOUTS[number].namespace, [bytes([number]) * 32])
    return cache


class FilesTarget:
    """Each run bends the header or the index of a good file, or cuts it, and opens it as a server does. Most
    runs put the digests right again, so that what lies behind them is reached."""

    def __init__(self) -> None:
        self.inputs = 0
        self.outcomes: Counter[str] = Counter()
        self._directory = tempfile.TemporaryDirectory(prefix="lmcache-fuzz-")
        self.path = Path(self._directory.name, "l1")
        known: restart.Known = {layout.namespace: {"model": "m", "groups": []} for layout in LAYOUTS}
        self._index = restart.encode(_filled().snapshot(1.0), known, 1.0)
        file = L1File(str(self.path), SIZE_BYTES)
        file.finish(self._index)
        file.close()
        self._head = self.path.read_bytes()[:HEAD_BYTES]
        self._descriptor = os.open(self.path, os.O_RDWR)

    def close(self) -> None:
        os.close(self._descriptor)
        self._directory.cleanup()

    def detail(self) -> str:
        return str(dict(self.outcomes.most_common()))

    def run(self, data: bytes) -> None:
        self.inputs += 1
        self._write(Choices(data))
        try:
            file = L1File(str(self.path), SIZE_BYTES)
        except StartError as error:
            refusal = str(error)
        else:
            with closing(file):
                self._restore(file)
            return
        assert "\n" not in refusal, refusal
        self.outcomes["refused"] += 1

    def _restore(self, file: L1File) -> None:
        cache, known = Cache(FRAME_BYTES), restart.Known()
        restart.restore(file, cache, known)
        cache.check_integrity()
        assert cache.total_frames <= FRAMES
        assert file.index is None
        self.outcomes["restored" if cache.num_chunks else "empty"] += 1
        # As the status does with every namespace that it lists.
        json.dumps([{**summary, "chunks": 0} for summary in known.values()]).encode()
        # The cache works: what was restored can be looked up, evicted and saved again.
        cache.grow(FRAMES - cache.total_frames)
        for layout in LAYOUTS:
            for number in range(3):
                hit = cache.lookup(layout, [bytes([number]) * 32], 0, 16, 1, 50.0)
                cache.check_integrity()
                del hit
        cache.drop_owner(1)
        index = restart.encode(cache.snapshot(60.0), known, 1.0)
        snapshot, _ = restart.decode(index, FRAMES, 60.0)
        again = Cache(FRAME_BYTES)
        again.restore(snapshot, 0.0)
        again.check_integrity()
        assert again.num_chunks == cache.num_chunks
        assert {*again.named_pins.names} == {*cache.named_pins.names}

    def _write(self, choices: Choices) -> None:
        how = choices.below(8)
        index = self._bent_index(choices) if how < 5 else self._index
        head = self._bent_head(index, choices) if how in (4, 5) else self._made_head(index)
        if how == 6:
            head = bytearray(head)
            head[choices.below(HEAD_BYTES)] ^= 1 + choices.below(255)
            head = bytes(head)
        end = HEADER_BYTES + SIZE_BYTES
        os.ftruncate(self._descriptor, end)
        os.pwrite(self._descriptor, head, 0)
        os.pwrite(self._descriptor, index, end)
        if how == 7:
            whole = HEAD_BYTES if choices.below(2) else end + len(index)
            size = choices.below(256) * 4096 + choices.below(256)
            os.ftruncate(self._descriptor, (whole + choices.below(8) - size) % (whole + 8))

    def _made_head(self, index: bytes) -> bytes:
        fields = (*l1_file._VERSION, FRAMES, l1_file.CLEAN, len(index), l1_file._sha256(index))
        packed = l1_file._FIELDS.pack(*fields)
        return packed + l1_file._sha256(packed)

    def _bent_head(self, index: bytes, choices: Choices) -> bytes:
        packed = bytearray(self._made_head(index)[:-32])
        for _ in range(1 + choices.below(3)):
            packed[choices.below(len(packed))] = choices.below(256)
        return bytes(packed) + l1_file._sha256(bytes(packed))

    def _bent_index(self, choices: Choices) -> bytes:
        if not choices.below(4):
            index = bytearray(self._index)
            for _ in range(1 + choices.below(4)):
                at = (choices.below(256) << 8 | choices.below(256)) % len(index)
                index[at : at + choices.below(3)] = choices.take(choices.below(4))
            return bytes(index)
        fields: Any = codec.unpack(self._index)
        for _ in range(1 + choices.below(4)):
            bend(fields, choices)
        try:
            return codec.pack(fields)
        except (OverflowError, ValueError, TypeError):
            return self._index


def file_seeds() -> list[bytes]:
    return [bytes([how, 1, 2, 3, 1, 2, 0, 5, 7, 1, 9, 200, 4]) for how in range(8)]
