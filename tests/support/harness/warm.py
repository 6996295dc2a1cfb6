"""Prompts whose pages are computed once, stored, and compared byte by byte, also after a warm restart."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from harness.rawclient import RawEngine, chain, group
from harness.server import LMCacheServer
from harness.waiting import wait_until

GROUPS = (group(), group("sliding_window", 16, 40, layers=1))
CHUNKS = 4
CHUNK_FRAMES = 3
"""Of both groups together."""
NUM_BLOCKS = 1 + 3 * 2 * CHUNKS * 16


@pytest.fixture
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    on_disk = getattr(request, "param", "memory") == "disk"
    file = (tmp_path if on_disk else Path("/dev/shm")) / f"lmcache-test-{os.getpid()}.l1"
    yield file
    file.unlink(missing_ok=True)


def new_engine(server: LMCacheServer) -> RawEngine:
    return RawEngine(server.address, GROUPS, NUM_BLOCKS).start()


def reconnect(engine: RawEngine, server: LMCacheServer) -> None:
    boot_id, channels = server.status()["boot_id"], (engine.worker, engine.scheduler)
    wait_until(
        lambda: all(each.ready and each.boot_id and each.boot_id.hex() == boot_id for each in channels),
        what="the engine has registered with this server",
    )


class Prompt:
    """One of three prompts of an engine, and the pages that were computed for it."""

    def __init__(self, engine: RawEngine, number: int = 0) -> None:
        self.engine = engine
        size = engine.chunk_size
        self.keys = chain([number] * (CHUNKS * size), size)
        blocks = CHUNKS * size // 16
        starts = (1 + 2 * number * blocks, 1 + (2 * number + 1) * blocks)
        self.tables = [list(range(start, start + blocks)) for start in starts]
        self.pages: list[list[NDArray[np.uint8]]] = []

    def fill(self) -> None:
        self.pages = [
            [self.engine.fill(of, block, 1000 * of + block) for block in table]
            for of, table in enumerate(self.tables)
        ]

    def store(self) -> None:
        self.fill()
        assert self.engine.store_prompt(self.keys, self.tables).dropped == 0

    def held_chunks(self) -> int:
        """As a lookup that uses nothing."""
        held = self.engine.lookup(self.keys, limit=0).held
        return min(int.from_bytes(bitmap, "little").bit_count() for bitmap in held)

    def load(self, chunks: int = CHUNKS) -> None:
        """So much of it, byte by byte."""
        self.engine.memory[:] = 0
        found = self.engine.lookup(self.keys)
        assert found.resume_tokens == chunks * self.engine.chunk_size
        self.engine.load(found, self.keys, self.tables)
        self.engine.end(found)
        for of, each in enumerate(self.engine.groups):
            for position in each.needed_blocks(found.resume_tokens):
                page = self.engine.pages(of, self.tables[of][position])
                assert (page == self.pages[of][position]).all()


def restart_warm(server: LMCacheServer, engine: RawEngine) -> None:
    assert server.terminate() == 0
    server.start()
    reconnect(engine, server)
