"""Pages of a GPU come back as they were: every layout, every size, and nothing beside them is touched."""

import os
import random

import numpy as np
import pytest
from gpu_engine import LAYOUTS, GpuEngine, fused
from harness.rawclient import chain

CHUNK_SIZE = 32
KIB = 1 << 10
PAGES = (KIB, 8 * KIB, 28 * KIB, 64 * KIB, 1 << 20, 4 << 20)
LARGEST_PAGE = int(os.environ.get("LARGEST_PAGE", str(4 << 20)))


def tables(engine: GpuEngine, chunks: int, free: list[int]) -> list[list[int]]:
    """Blocks for a prompt of `chunks` chunks, per group and position: no two groups share one."""
    return [[free.pop() for _ in range(chunks * CHUNK_SIZE // 16)] for _ in engine.groups]


def stored_prompt(engine: GpuEngine, chunks: int, free: list[int], seed: int):
    """A prompt whose pages have been stored: (keys, pages by group and position)."""
    keys = chain(range(seed, seed + chunks * CHUNK_SIZE), CHUNK_SIZE)
    source = tables(engine, chunks, free)
    pages = {
        (index, position): engine.fill(index, block, seed + 1000 * index + position)
        for index, table in enumerate(source)
        for position, block in enumerate(table)
    }
    stored = engine.store_prompt(keys, source)
    assert stored.stored == chunks * len(engine.groups)
    assert stored.dropped == 0
    for index, table in enumerate(source):
        for block in table:
            engine.clear(index, block)
    return keys, pages


def restored(engine: GpuEngine, keys, pages, destination) -> int:
    """Load a prompt; how many of its pages were checked, all of which are right."""
    found = engine.lookup(keys)
    assert found.resume_tokens == len(keys) * CHUNK_SIZE, "served from the cache"
    engine.load(found, keys, destination)
    engine.end(found)
    checked = 0
    for index, group in enumerate(engine.groups):
        for position in group.needed_blocks(found.resume_tokens):
            assert np.array_equal(engine.pages(index, destination[index][position]), pages[index, position])
            checked += 1
    return checked


@pytest.mark.parametrize("page_bytes", [each for each in PAGES if each <= LARGEST_PAGE])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_and_size_comes_back_exactly(start_server, start_engine, layout, page_bytes):
    chunks = 3 if page_bytes < 1 << 20 else 1
    groups = len(layout(page_bytes, 2).groups)
    num_blocks = 2 * groups * chunks * CHUNK_SIZE // 16 + 6
    server = start_server(chunk_size=CHUNK_SIZE)
    engine = start_engine(server, layout(page_bytes, num_blocks), num_blocks)
    free = list(range(1, num_blocks))
    random.Random(page_bytes).shuffle(free)
    keys, pages = stored_prompt(engine, chunks, free, 7)
    destination = tables(engine, chunks, free)
    beside = {block: [engine.fill(index, block, 5) for index in (0,)] for block in free}
    assert restored(engine, keys, pages, destination) >= groups
    for block, [content] in beside.items():
        assert np.array_equal(engine.pages(0, block), content), "a block that nobody named"


def test_loads_of_many_small_pages_use_the_kernel_where_there_is_one(start_server, start_engine, counters):
    """The same bytes by either path."""
    server = start_server(chunk_size=CHUNK_SIZE, gpu_kernel=True)
    engine = start_engine(server, fused(2 * KIB, 256, layers=16), 256)
    free = list(range(1, 256))
    random.Random(1).shuffle(free)
    keys, pages = stored_prompt(engine, 20, free, 7)
    assert restored(engine, keys, pages, tables(engine, 20, free)) == 40
    if (counted := counters(server)) is not None:
        assert counted.launches == 1, "stores are left to the copy engine"


def test_the_server_pins_what_it_copies_and_the_rest_behind_it(start_server, start_engine):
    """Ready at once; more than one unit, so that copies reach over the end of one."""
    server = start_server(chunk_size=CHUNK_SIZE, l1_size_gb=0.7)
    # No divisor of a unit: some pages lie over the end of one.
    engine = start_engine(server, fused((1 << 20) + (64 << 10), 24, layers=2), 24)
    for seed in range(40):
        keys, pages = stored_prompt(engine, 2, list(range(1, 13)), 10_000 * (seed + 1))
        assert restored(engine, keys, pages, tables(engine, 2, list(range(13, 24)))) == 4
    server.wait_until(lambda l1: l1["pinned_bytes"] == l1["total_bytes"])
    assert server.metrics()["lmcache_l1_pinned_bytes"] == server.status()["l1"]["total_bytes"]


def test_two_workers_share_what_either_stored(start_server, start_engine):
    server = start_server(chunk_size=CHUNK_SIZE)
    layout = fused(16 * KIB, 32)
    first, second = (start_engine(server, layout, 32, f"engine-{number}") for number in range(2))
    keys, pages = stored_prompt(first, 3, list(range(1, 32)), 3)
    assert restored(second, keys, pages, tables(second, 3, list(range(1, 32)))) == 6


def test_without_the_option_the_kernel_is_not_used(start_server, start_engine, counters, monkeypatch):
    """And a registration on a GPU may take longer than one on a CPU: there may be a context to create."""
    monkeypatch.setattr("lmcache_client.engine.REGISTER_S", 0.0)
    server = start_server(chunk_size=CHUNK_SIZE, checksums=False)
    engine = start_engine(server, fused(2 * KIB, 64, layers=16), 64)
    keys, pages = stored_prompt(engine, 3, list(range(1, 64)), 7)
    assert restored(engine, keys, pages, tables(engine, 3, list(range(7, 64)))) == 6
    if (counted := counters(server)) is not None:
        assert counted.launches == 0
