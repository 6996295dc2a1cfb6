"""Bytes in, bytes out: a real server, the real channel, memory of this process."""

import random
from collections.abc import Iterator

import pytest
from harness.rawclient import RawEngine, chain, group
from harness.server import LMCacheServer

from lmcache_client.contract.geometry import GroupSpec
from lmcache_client.engine import chunk_object

HYBRIDS = {
    "full": [group()],
    "window smaller than the chunk": [group(), group("sliding_window", window=40)],
    "window larger than the chunk": [group(), group("sliding_window", window=300)],
    "chunked-local": [group(), group("chunked_local", window=96)],
    "recurrent": [group(), group("recurrent", block_size=64, page_bytes=70_000)],
    "unequal block sizes": [group(block_size=48), group("sliding_window", block_size=32, window=64)],
    "four": [
        group(layers=3, page_bytes=33),
        group("sliding_window", window=17),
        group("chunked_local", window=64),
        group("recurrent", block_size=32, page_bytes=131_073),
    ],
}


@pytest.fixture(scope="module", params=["verified, Unix socket", "as users run it, TCP"])
def server(request: pytest.FixtureRequest) -> Iterator[LMCacheServer]:
    verified = request.param.startswith("verified")
    flags = {} if verified else {"host": "127.0.0.1"}
    with LMCacheServer(l1_size_gb=0.2, checksums=verified, **flags) as running:
        yield running


def tables(groups: list[GroupSpec], tokens: int, num_blocks: int, seed: int) -> list[list[int]]:
    """Block tables as vLLM makes them: a block belongs to one group at a time."""
    free = list(range(1, num_blocks))
    random.Random(seed).shuffle(free)
    return [[free.pop() for _ in range(-(-tokens // each.block_size))] for each in groups]


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_prompt_comes_back_as_it_was(server: LMCacheServer, name: str) -> None:
    groups = HYBRIDS[name]
    for pad in (0, 1000):
        engine = RawEngine(server.address, groups, 256, f"{name}{pad}", f"{name}{pad}", pad).start()
        size = engine.chunk_size
        keys = chain(range(4 * size + 3), size)
        stored = tables(groups, len(keys) * size, 256, 1)
        written = {
            (index, block): engine.fill(index, block, block)
            for index, table in enumerate(stored)
            for block in table
        }
        result = engine.store_prompt(keys, stored)
        assert result.stored > 0
        assert result.dropped == 0
        for computed in (0, size):
            found = engine.lookup(keys, computed)
            assert found.resume_tokens == 4 * size
            engine.memory[:] = 0
            loaded = tables(groups, len(keys) * size, 256, 2)
            engine.load(found, keys, loaded, computed)
            for index, each in enumerate(groups):
                for position in each.needed_blocks(found.resume_tokens, computed):
                    pages = engine.pages(index, loaded[index][position])
                    assert (pages == written[index, stored[index][position]]).all()
                    engine.erase(index, loaded[index][position])
            assert not engine.memory.any(), "nothing else is touched, not even between the pages"
            engine.end(found, keys)


def test_a_prompt_larger_than_l1_loses_its_tail_and_keeps_its_head() -> None:
    with LMCacheServer(l1_size_gb=16 / 1024) as server:  # chunks of 2 MiB
        engine = RawEngine(server.address, [group(layers=2, page_bytes=64 << 10)]).start()
        keys = chain(range(32 * engine.chunk_size), engine.chunk_size)
        for chunk in range(len(keys)):
            engine.store([chunk_object(keys, chunk, 0, tuple(range(1, 17)))])
        assert engine.lookup(keys).resume_tokens == 8 * engine.chunk_size
        l1 = server.status()["l1"]
        assert l1["ready_bytes"] == l1["total_bytes"]
