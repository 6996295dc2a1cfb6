"""Engines of several workers: a real server, the real channel, memory of this process."""

import ctypes
import mmap
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest
from harness.rawclient import RawEngine, chain, group, start_ranks
from harness.server import LMCacheServer
from msgspec import structs

from lmcache_client.channel import RefusedError
from lmcache_client.contract import messages
from lmcache_client.contract.admission import Admission, Prompt, checkpoint_interval, known_chunks
from lmcache_client.contract.geometry import GroupSpec
from lmcache_client.contract.messages import Found, Stored, StoreObject
from lmcache_client.engine import chunk_object
from lmcache_server.telemetry.partial import PATIENCE_S

MLA = group(layers=3, page_bytes=1000, replicated=True)
FULL = group()
STATE = group("recurrent", 32, page_bytes=70_000)
WINDOW = group("sliding_window", window=40)


def bare(spec: GroupSpec) -> GroupSpec:
    """The group on a pipeline stage that has none of its layers."""
    return structs.replace(spec, regions=())


def address(server: LMCacheServer) -> str:
    return f"ipc://{server.runtime_dir}/{server.port}.sock"


@contextmanager
def ranks(
    server: LMCacheServer, groups: Sequence[Sequence[GroupSpec]], tensor_parallel_size: int, name: str = "e"
) -> Iterator[list[RawEngine]]:
    with ExitStack() as stack:
        started = start_ranks(address(server), groups, tensor_parallel_size, 64, name)
        for each in started:
            stack.callback(each.close)
        yield started


def tables(groups: Sequence[GroupSpec], tokens: int, first_block: int) -> list[list[int]]:
    """Block tables of ascending ids: the same on every rank, as vLLM's scheduler makes them."""
    tables, block = [], first_block
    for each in groups:
        count = tokens // each.block_size
        tables.append(list(range(block, block + count)))
        block += count
    return tables


def seed_of(engine: RawEngine, index: int, block: int) -> int:
    """Replicated groups have the same bytes on all ranks of a stage, others have their own."""
    spec = engine.groups[index]
    size = engine.model.tensor_parallel_size
    holder = engine.rank - engine.rank % size if spec.replicated else engine.rank
    return 1_000_000 * (holder + 1) + 1000 * index + block


def fill(engines: Sequence[RawEngine], stored: Sequence[Sequence[int]]) -> None:
    for engine in engines:
        for index, table in enumerate(stored):
            for block in table:
                engine.fill(index, block, seed_of(engine, index, block))


def check_restored(
    engine: RawEngine, found: Found, stored: Sequence[Sequence[int]], loaded: Sequence[Sequence[int]]
) -> None:
    """The pages at `loaded` are those that were at `stored`."""
    restored = {
        (index, stored[index][position]): engine.pages(index, loaded[index][position])
        for index, each in enumerate(engine.groups)
        for position in each.needed_blocks(found.resume_tokens)
    }
    for (index, block), pages in restored.items():
        assert (pages == engine.fill(index, block, seed_of(engine, index, block))).all()


def served_to_all(
    engines: Sequence[RawEngine], keys: Sequence[bytes], stored: Sequence[Sequence[int]]
) -> None:
    """Every rank gets its own pages of these chunks back, at other places."""
    size = engines[0].chunk_size
    loaded = [[63 - block for block in table] for table in stored]
    found = engines[0].lookup(keys)
    assert found.resume_tokens == len(keys) * size
    for engine in engines:
        engine.memory[:] = 0
        engine.load(found, keys, loaded)
        check_restored(engine, found, stored, loaded)
    engines[0].end(found, keys)


LAYOUTS = {
    "mla on four ranks": ([[MLA]] * 4, 4, 1),
    "mla on two stages of two ranks": ([[MLA, bare(FULL)]] * 2 + [[bare(MLA), FULL]] * 2, 2, 3),
    "mla beside heads of each rank": ([[MLA, FULL]] * 2, 2, 3),
    "a replicated window": ([[structs.replace(WINDOW, replicated=True), MLA]] * 2, 2, 2),
    "stages that lack a group each": ([[FULL, bare(WINDOW)], [bare(FULL), WINDOW]], 1, 2),
    "two stages of two ranks": ([[FULL, bare(STATE)]] * 2 + [[FULL, STATE]] * 2, 2, 6),
}
"""Groups of each rank, tensor-parallel ranks, objects of one chunk."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_gets_its_pages_back_and_replicated_ones_are_stored_once(
    server: LMCacheServer, name: str
) -> None:
    groups, tensor_ranks, objects = LAYOUTS[name]
    with ranks(server, groups, tensor_ranks) as engines:
        size = engines[0].chunk_size
        keys = chain(range(size), size)
        stored = tables(engines[0].groups, size, 1)
        fill(engines, stored)
        results = [engine.store_prompt(keys, stored) for engine in engines]
        assert all(each.dropped == 0 for each in results)
        assert sum(each.stored for each in results) == objects
        holders = [
            (engine, index)
            for engine in engines
            for index, each in enumerate(engine.groups)
            if each.regions and not (each.replicated and engine.rank % tensor_ranks)
        ]
        payload = sum(
            engine.groups[index].block_bytes * len(engine.groups[index].stored_blocks(0, size))
            for engine, index in holders
        )
        assert server.status()["l1"]["stored_bytes"] == payload
        assert len(holders) == objects
        served_to_all(engines, keys, stored)


def test_whichever_rank_stores_first_serves_all_ranks(server: LMCacheServer) -> None:
    """A replicated group survives that the stores of some ranks were dropped, chunk by chunk."""
    with ranks(server, [[MLA]] * 2, 2) as engines:
        size = engines[0].chunk_size
        keys = chain(range(2 * size), size)
        stored = tables(engines[0].groups, 2 * size, 1)
        fill(engines, stored)
        assert engines[1].store_prompt(keys[:1], stored).stored == 1
        assert engines[0].store_prompt(keys, stored) == Stored(1, 1, 0)
        served_to_all(engines, keys, stored)


def test_ranks_whose_replicated_pages_differ_are_refused(server: LMCacheServer) -> None:
    other = group(layers=3, page_bytes=999, replicated=True)
    with ranks(server, [[MLA], [other]], 2) as engines:
        refusal = engines[1].worker.refusal
        assert refusal is not None
        assert refusal.code == messages.BAD_REQUEST, "vLLM starts: no option would change this"
        assert "different pages as replicated" in str(refusal)


def test_replicated_or_not_is_part_of_the_namespace(server: LMCacheServer) -> None:
    own = structs.replace(MLA, replicated=False)
    with ranks(server, [[MLA]] * 2, 2, "once") as once, ranks(server, [[own]] * 2, 2, "each") as each:
        size = once[0].chunk_size
        keys = chain(range(size), size)
        stored = tables(once[0].groups, size, 1)
        assert [engine.store_prompt(keys, stored).stored for engine in once] == [1, 0]
        assert each[0].lookup(keys).resume_tokens == 0
        assert [engine.store_prompt(keys, stored).stored for engine in each] == [1, 1]


def test_ranks_that_disagree_shorten_the_hit_and_are_warned_of_once(server: LMCacheServer) -> None:
    groups = [FULL, STATE]
    with ranks(server, [groups] * 2, 2) as engines:
        size = engines[0].chunk_size
        keys = chain(range(3 * size), size)
        stored = tables(groups, 3 * size, 1)
        fill(engines, stored)
        engines[0].store_prompt(keys, stored)
        engines[1].store_prompt(keys[:1], stored)
        for _ in range(3):
            found = engines[0].lookup(keys)
            assert found.resume_tokens == size
            engines[0].end(found)
        assert "some workers" not in server.log.read_text(), "they may be at it"
        time.sleep(PATIENCE_S + 0.1)
        for _ in range(3):
            engines[0].end(engines[0].lookup(keys))
        assert server.metrics()["lmcache_partial_chunks_total"] == 1
        assert server.log.read_text().count("some workers of an engine have stored a chunk") == 1
        served_to_all(engines, keys[:1], stored)
        # Whoever computes the chunks anew makes them whole.
        fill(engines, stored)
        assert engines[1].store_prompt(keys, stored).dropped == 0
        served_to_all(engines, keys, stored)


def offered(
    engine: RawEngine, keys: Sequence[bytes], found: Found, tables: Sequence[Sequence[int]]
) -> list[StoreObject]:
    """What the connector offers of a prompt after this answer. Its scheduler decides for all ranks."""
    groups, size = engine.groups, engine.chunk_size
    interval = checkpoint_interval(groups, [each.block_bytes for each in groups], size)
    rule, prompt = Admission(groups, size, interval), Prompt(len(keys), known_chunks(groups, found.held))
    return [
        chunk_object(keys, chunk, index, tuple(tables[index][i] for i in each.stored_blocks(chunk, size)))
        for chunk in range(found.resume_tokens // size, len(keys))
        for index, each in enumerate(groups)
        if not found.held[index][chunk // 8] >> chunk % 8 & 1 and rule.admits(index, chunk, prompt)
    ]


def test_what_one_rank_dropped_is_offered_again_and_admitted_where_the_known_part_ends(
    server: LMCacheServer,
) -> None:
    with ranks(server, [[FULL, STATE]] * 2, 2) as engines:
        size = engines[0].chunk_size
        keys = chain(range(6 * size), size)
        parting = (*keys[:3], *chain(range(9000, 9000 + size), size))
        stored = tables(engines[0].groups, 6 * size, 1)
        fill(engines, stored)
        objects = offered(engines[0], keys, engines[0].lookup(keys), stored)
        assert [each.chunk_index for each in objects if each.group == 1] == [5], "the state at the end alone"
        assert engines[0].store(objects) == Stored(7, 0, 0)
        assert engines[1].store([each for each in objects if each.chunk_index < 3]) == Stored(3, 0, 0)
        for each in (keys, parting):
            assert engines[0].lookup(each).resume_tokens == 0

        # The same prompt again: to the server it parts from what it has after three chunks.
        again = offered(engines[0], keys, engines[0].lookup(keys), stored)
        assert [(each.chunk_index, each.group) for each in again] == [(2, 1), (3, 0), (4, 0), (5, 0), (5, 1)]
        assert engines[0].store(again) == Stored(1, 4, 0)
        assert engines[1].store(again) == Stored(5, 0, 0)
        found = engines[0].lookup(keys)
        assert offered(engines[0], keys, found, stored) == []
        engines[0].end(found)
        served_to_all(engines, keys, stored)
        fill(engines, stored)
        served_to_all(engines, keys[:3], stored)
        found = engines[0].lookup(parting)
        assert found.resume_tokens == 3 * size
        engines[0].end(found)


@contextmanager
def closed(engine: RawEngine) -> Iterator[None]:
    """Nobody can write to the engine's memory."""
    page = mmap.PAGESIZE
    start = -(-engine.memory.ctypes.data // page) * page
    size = (engine.memory.ctypes.data + engine.memory.nbytes - start) // page * page
    protect = ctypes.CDLL(None).mprotect
    assert protect(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.PROT_READ) == 0
    yield
    assert protect(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.PROT_READ | mmap.PROT_WRITE) == 0


def test_a_load_that_fails_on_one_rank_is_that_ranks_failure_alone(server: LMCacheServer) -> None:
    """The engine recomputes; the other rank, the promise and later loads are as before."""
    with ranks(server, [[FULL]] * 2, 2) as engines:
        size = engines[0].chunk_size
        keys = chain(range(size), size)
        stored = tables([FULL], size, 1)
        fill(engines, stored)
        for engine in engines:
            engine.store_prompt(keys, stored)
        found = engines[0].lookup(keys)
        engines[0].load(found, keys, stored)
        with closed(engines[1]), pytest.raises(RefusedError) as refused:
            engines[1].load(found, keys, stored)
        assert refused.value.code == messages.COPY_FAILED
        engines[0].end(found, keys)
        assert server.status()["l1"]["leases"] == 0
        served_to_all(engines, keys, stored)
        assert server.metrics()["lmcache_partial_chunks_total"] == 0
