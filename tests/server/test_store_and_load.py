"""Bytes in, bytes out: a real server, the real channel, memory of this process."""

import random

import pytest
from harness.rawclient import RawEngine, chain, group
from harness.server import LMCacheServer

from lmcache_client.channel import RefusedError
from lmcache_client.contract import messages
from lmcache_client.contract.geometry import GroupSpec
from lmcache_client.contract.keys import ROOT_KEY
from lmcache_client.contract.messages import Found, Load, StoreObject

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


def address(server: LMCacheServer) -> str:
    return f"ipc://{server.runtime_dir}/{server.port}.sock"


@pytest.fixture(scope="module", params=[True, False], ids=["verified", "as users run it"])
def server(request):
    """Without --checksums the pieces of all objects are computed at once, with it one by one."""
    with LMCacheServer(l1_size_gb=0.2, checksums=request.param) as running:
        yield running


def tables(groups: list[GroupSpec], tokens: int, num_blocks: int, seed: int) -> list[list[int]]:
    """Block tables as vLLM makes them: a block belongs to one group at a time."""
    free = list(range(1, num_blocks))
    random.Random(seed).shuffle(free)
    return [[free.pop() for _ in range(-(-tokens // each.block_size))] for each in groups]


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("pad", [0, 1000])
def test_a_prompt_comes_back_as_it_was(server: LMCacheServer, name: str, pad: int) -> None:
    groups = HYBRIDS[name]
    engine = RawEngine(address(server), groups, 256, f"{name}{pad}", f"{name}{pad}", pad).start()
    try:
        size = engine.chunk_size
        keys = chain(range(4 * size + 3), size)
        stored = tables(groups, len(keys) * size, 256, 1)
        written = {}
        for index, table in enumerate(stored):
            for block in table:
                written[index, block] = engine.fill(index, block, block)
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
                needed = each.needed_blocks(found.resume_tokens, computed)
                for position in range(len(loaded[index])):
                    pages = engine.pages(index, loaded[index][position])
                    if position in needed:
                        assert (pages == written[index, stored[index][position]]).all()
            engine.end(found, keys)
    finally:
        engine.close()


def test_pages_that_no_resume_needs_are_not_touched(server: LMCacheServer) -> None:
    groups = [group("sliding_window", window=17), group()]
    engine = RawEngine(address(server), groups, 64, "untouched", "untouched").start()
    try:
        keys = chain(range(3 * engine.chunk_size), engine.chunk_size)
        table = tables(groups, len(keys) * engine.chunk_size, 256, 1)
        table = [[b % 63 + 1 for b in each] for each in table]
        engine.store_prompt(keys, table)
        found = engine.lookup(keys)
        engine.memory[:] = 7
        free = list(range(1, 64))
        wanted = [[free.pop() for _ in each.needed_blocks(found.resume_tokens)] for each in engine.groups]
        message = Load("r", found.lease_id, keys[-1], found.resume_tokens, 0, tuple(map(tuple, wanted)))
        engine.worker.call(message, 10)
        used = {block for ids in wanted for block in ids}
        for index in range(2):
            for block in set(range(64)) - used:
                assert (engine.pages(index, block) == 7).all()
    finally:
        engine.close()


def test_two_engines_of_one_model_share_and_another_model_does_not(server: LMCacheServer) -> None:
    groups = [group()]
    first = RawEngine(address(server), groups, 64, "first", "shared").start()
    second = RawEngine(address(server), groups, 32, "second", "shared").start()
    other = RawEngine(address(server), groups, 64, "other", "of its own").start()
    try:
        keys = chain(range(first.chunk_size), first.chunk_size)
        table = [list(range(1, 1 + first.chunk_size // 16))]
        pages = [first.fill(0, block, block) for block in table[0]]
        first.store_prompt(keys, table)
        found = second.lookup(keys)
        assert found.resume_tokens == first.chunk_size
        second.load(found, keys, table)
        assert all((second.pages(0, b) == p).all() for b, p in zip(table[0], pages, strict=True))
        assert other.lookup(keys).resume_tokens == 0
    finally:
        for each in (first, second, other):
            each.close()


@pytest.fixture
def engine(server: LMCacheServer):
    running = RawEngine(address(server), [group()], 64, "checked", "checked").start()
    yield running
    running.close()


def test_block_ids_outside_the_geometry_are_refused(engine: RawEngine) -> None:
    keys = chain(range(engine.chunk_size), engine.chunk_size)
    count = engine.chunk_size // 16
    for bad in ([0] * count, [64] * count, [1] * (count - 1), [1 << 40] * count):
        with pytest.raises(RefusedError, match="block ids") as refused:
            engine.store([StoreObject(keys[0], ROOT_KEY, 0, 0, tuple(bad))])
        assert refused.value.code == messages.BAD_REQUEST
    with pytest.raises(RefusedError, match="no object of group 1"):
        engine.store([StoreObject(keys[0], ROOT_KEY, 0, 1, (1,))])


def test_a_lease_that_was_released_or_never_was_loads_nothing(engine: RawEngine) -> None:
    keys = chain(range(100, 100 + engine.chunk_size), engine.chunk_size)
    table = [list(range(1, 1 + engine.chunk_size // 16))]
    engine.store_prompt(keys, table)
    found = engine.lookup(keys)
    assert found.resume_tokens
    engine.end(found)
    invented = Found(engine.chunk_size, 4711, 1, ())
    for each in (found, invented):
        with pytest.raises(RefusedError) as refused:
            engine.load(each, keys, table)
        assert refused.value.code == messages.EXPIRED


def test_what_is_there_is_not_copied_again(engine: RawEngine, server: LMCacheServer) -> None:
    keys = chain(range(200, 200 + engine.chunk_size), engine.chunk_size)
    table = [list(range(1, 1 + engine.chunk_size // 16))]
    assert engine.store_prompt(keys, table).stored == 1
    before = server.metrics()['lmcache_transfer_bytes_total{direction="store"}']
    assert engine.store_prompt(keys, table).present == 1
    assert server.metrics()['lmcache_transfer_bytes_total{direction="store"}'] == before


def test_tokens_add_up(engine: RawEngine, server: LMCacheServer) -> None:
    keys = chain(range(5000, 5000 + 3 * engine.chunk_size), engine.chunk_size)
    engine.store_prompt(keys[:2], [list(range(1, 1 + 2 * engine.chunk_size // 16))])
    engine.end(engine.lookup(keys))
    engine.end(engine.lookup(keys, computed=engine.chunk_size))
    metrics = server.metrics()
    outcomes = [
        metrics[f'lmcache_tokens_total{{outcome="{o}"}}'] for o in ("computed", "hit", "miss", "tail")
    ]
    assert sum(outcomes) == metrics["lmcache_tokens_requested_total"]
    assert all(each > 0 for each in outcomes)


def test_status_and_clear(engine: RawEngine, server: LMCacheServer) -> None:
    keys = chain(range(7000, 7000 + engine.chunk_size), engine.chunk_size)
    engine.store_prompt(keys, [list(range(1, 1 + engine.chunk_size // 16))])
    status = server.status()
    mine = next(each for each in status["namespaces"] if each["model"] == "checked")
    assert mine["chunk_size"] == engine.chunk_size
    assert mine["groups"][0]["kind"] == "full"
    assert mine["engines"] == ["checked"]
    assert {each["role"] for each in status["sessions"]} == {"worker", "scheduler"}
    text = server.cli("status").stdout
    assert "checked" in text
    server.clear()
    assert engine.lookup(keys).resume_tokens == 0
    l1 = server.status()["l1"]
    assert l1["free_bytes"] == l1["total_bytes"]
    assert l1["leases"] == 0


def test_a_burst_beyond_l1_loses_no_store_that_fits() -> None:
    # 16 MiB of L1, chunks of 2 MiB: sixteen times what fits, in messages that each fit.
    with LMCacheServer(l1_size_gb=16 / 1024) as server:
        spec = group(block_size=16, layers=2, page_bytes=64 << 10)
        engine = RawEngine(address(server), [spec], 64, "burst", "burst").start()
        try:
            dropped = 0
            for prompt in range(128):
                start = prompt * 10_000
                keys = chain(range(start, start + engine.chunk_size), engine.chunk_size)
                dropped += engine.store_prompt(keys, [list(range(1, 17))]).dropped
            assert dropped == 0
            assert engine.lookup(keys).resume_tokens == engine.chunk_size
            server.wait_for_metric("lmcache_evicted_chunks_total", 120)
        finally:
            engine.close()


def test_a_prompt_larger_than_l1_loses_its_tail_and_keeps_its_head() -> None:
    with LMCacheServer(l1_size_gb=16 / 1024) as server:
        spec = group(block_size=16, layers=2, page_bytes=64 << 10)
        engine = RawEngine(address(server), [spec], 64, "long", "long").start()
        try:
            keys = chain(range(32 * engine.chunk_size), engine.chunk_size)
            for chunk, key in enumerate(keys):
                parent = keys[chunk - 1] if chunk else ROOT_KEY
                engine.store([StoreObject(key, parent, chunk, 0, tuple(range(1, 17)))])
            assert engine.lookup(keys).resume_tokens == 8 * engine.chunk_size
            status = server.status()["l1"]
            assert status["ready_bytes"] == status["total_bytes"]
        finally:
            engine.close()


def test_a_chunk_size_that_does_not_divide_is_refused_with_the_fix() -> None:
    with LMCacheServer(chunk_size=256) as server:
        engine = RawEngine(address(server), [group(block_size=160)], 64).start()
        try:
            refusal = engine.worker.refusal
            assert refusal is not None
            assert refusal.code == messages.CONFIGURATION
            assert str(refusal) == (
                "chunk size 256 is not a multiple of this model's unified block size 160: start the server "
                "with --chunk-size 320 (or 160), or with --chunk-size auto"
            )
        finally:
            engine.close()
