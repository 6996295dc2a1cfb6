"""Engines of several workers: a real server, the real channel, memory of this process."""

import ctypes
import itertools
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from harness.rawclient import RawEngine, chain, group, start_ranks
from harness.server import LMCacheServer
from harness.waiting import wait_until
from msgspec import structs

from lmcache_client.contract import messages
from lmcache_client.contract.geometry import GroupSpec
from lmcache_client.contract.messages import Stored
from lmcache_client.server_channel import RefusedError

MLA = group(layers=3, page_bytes=1000, replicated=True)
FULL = group()
STATE = group("recurrent", 32, page_bytes=70_000)
WINDOW = group("sliding_window", window=40)


def bare(spec: GroupSpec) -> GroupSpec:
    """The group on a pipeline stage that has none of its layers."""
    return structs.replace(spec, regions=())


class Ranks:
    """The ranks of an engine that has computed a prompt of so many chunks, its keys, and the block tables
    that all ranks have, as vLLM's scheduler makes them."""

    def __init__(
        self,
        server: LMCacheServer,
        groups: Sequence[Sequence[GroupSpec]],
        tensor_ranks: int,
        chunks: int = 1,
        name: str = "e",
    ) -> None:
        self.engines = start_ranks(server.address, groups, tensor_ranks, 64, name)
        self.tensor_ranks, self.size = tensor_ranks, self.engines[0].chunk_size
        self.keys = chain(range(chunks * self.size), self.size)
        blocks = itertools.count(1)
        self.tables = [
            list(itertools.islice(blocks, chunks * self.size // each.block_size)) for each in groups[0]
        ]
        self.fill()

    def fill(self) -> None:
        for engine in self.engines:
            for index, table in enumerate(self.tables):
                for block in table:
                    engine.fill(index, block, self._seed(engine, index, block))

    def _seed(self, engine: RawEngine, index: int, block: int) -> int:
        """Replicated groups have the same bytes on all ranks of a stage, others have their own."""
        replicated = engine.groups[index].replicated
        holder = engine.rank - engine.rank % self.tensor_ranks if replicated else engine.rank
        return 1_000_000 * (holder + 1) + 1000 * index + block

    def store(self, rank: int, chunks: int | None = None) -> Stored:
        return self.engines[rank].store_prompt(self.keys[:chunks], self.tables)

    def are_served(self, chunks: int | None = None) -> None:
        """Every rank gets its own pages of the first chunks back, at other places."""
        keys = self.keys[:chunks]
        loaded = [[63 - block for block in table] for table in self.tables]
        found = self.engines[0].lookup(keys)
        assert found.resume_tokens == len(keys) * self.size
        for engine in self.engines:
            engine.memory[:] = 0
            engine.load(found, keys, loaded)
            restored = {
                (index, self.tables[index][position]): engine.pages(index, loaded[index][position])
                for index, each in enumerate(engine.groups)
                for position in each.needed_blocks(found.resume_tokens)
            }
            for (index, block), pages in restored.items():
                assert (pages == engine.fill(index, block, self._seed(engine, index, block))).all()
        self.engines[0].end(found, keys)


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
    ranks = Ranks(server, groups, tensor_ranks)
    results = [ranks.store(rank) for rank in range(len(groups))]
    assert all(each.dropped == 0 for each in results)
    assert sum(each.stored for each in results) == objects
    holders = [
        each.block_bytes * len(each.stored_blocks(0, ranks.size))
        for engine in ranks.engines
        for each in engine.groups
        if each.regions and not (each.replicated and engine.rank % tensor_ranks)
    ]
    assert len(holders) == objects
    assert server.status()["l1"]["stored_bytes"] == sum(holders)
    ranks.are_served()


def test_whichever_rank_stores_first_serves_all_ranks(server: LMCacheServer) -> None:
    """A replicated group survives that the stores of some ranks were dropped, chunk by chunk."""
    ranks = Ranks(server, [[MLA]] * 2, 2, 2)
    assert ranks.store(1, 1).stored == 1
    assert ranks.store(0) == Stored(1, 1, 0)
    ranks.are_served()


def test_ranks_whose_replicated_pages_differ_are_refused(server: LMCacheServer) -> None:
    other = group(layers=3, page_bytes=999, replicated=True)
    refusal = start_ranks(server.address, [[MLA], [other]], 2)[1].worker.refusal
    assert refusal is not None
    assert refusal.code == messages.BAD_REQUEST, "vLLM starts: no option would change this"
    assert "different pages as replicated" in str(refusal)


def test_replicated_or_not_is_part_of_the_namespace(server: LMCacheServer) -> None:
    own = structs.replace(MLA, replicated=False)
    once = Ranks(server, [[MLA]] * 2, 2, name="once")
    each = Ranks(server, [[own]] * 2, 2, name="each")
    assert [once.store(rank).stored for rank in range(2)] == [1, 0]
    assert each.engines[0].lookup(each.keys).resume_tokens == 0
    assert [each.store(rank).stored for rank in range(2)] == [1, 1]


def test_ranks_that_disagree_shorten_the_hit_and_are_warned_of_once(server: LMCacheServer) -> None:
    ranks = Ranks(server, [[FULL, STATE]] * 2, 2, 3)
    ranks.store(0)
    ranks.store(1, 1)

    def warnings() -> float:
        found = ranks.engines[0].lookup(ranks.keys)
        assert found.resume_tokens == ranks.size
        ranks.engines[0].end(found)
        return server.metrics()["lmcache_partial_chunks_total"]

    wait_until(warnings, what="it is taken for a fault, because it lasts")
    assert warnings()
    server.wait_for_log("some workers of an engine have stored a chunk")
    ranks.are_served(1)
    # Whoever computes the chunks anew makes them whole.
    ranks.fill()
    assert ranks.store(1).dropped == 0
    ranks.are_served()


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
    ranks = Ranks(server, [[FULL]] * 2, 2)
    (first, second), keys, stored = ranks.engines, ranks.keys, ranks.tables
    for rank in range(2):
        ranks.store(rank)
    found = first.lookup(keys)
    first.load(found, keys, stored)
    with closed(second), pytest.raises(RefusedError) as refused:
        second.load(found, keys, stored)
    assert refused.value.code == messages.COPY_FAILED
    first.end(found, keys)
    assert server.status()["l1"]["leases"] == 0
    ranks.are_served()
    assert server.metrics()["lmcache_partial_chunks_total"] == 0
