"""A client without vLLM: real memory of this process, the real channel, a real server.

`RawEngine` registers numpy buffers as one engine with one worker and gives the calls of the connector,
so that tests can say exactly which bytes are stored and restored; `start_ranks` makes one engine of
several.
"""

import contextlib
import gc
import os
import time
from collections.abc import Collection, Iterator, Sequence

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from harness.raw_scheduler import RawScheduler
from harness.waiting import PATIENCE_S
from lmcache_client.contract.geometry import Geometry, GroupSpec, Region
from lmcache_client.contract.keys import ModelTag, chunk_keys
from lmcache_client.contract.messages import (
    Done,
    Found,
    Lookup,
    Memory,
    Message,
    Store,
    Stored,
    StoreObject,
)
from lmcache_client.engine import Export, Worker, chunk_object, expect, load_message
from lmcache_client.memory.host import HostExport
from lmcache_client.server_channel import Channel

TIMEOUT_S = PATIENCE_S
_open: list["RawEngine"] = []


@contextlib.contextmanager
def closes_engines() -> Iterator[None]:
    """Closes every engine of this process that was made meanwhile and is still open: each has descriptors and
    its memory, and a test run makes hundreds."""
    first, before = len(_open), RawEngine.made
    try:
        yield
    finally:
        for engine in _open[first:]:
            engine.close(goodbye_s=0.0)
        if RawEngine.made > before:
            gc.collect()  # they are in cycles, and each has its memory


def group(
    kind: str = "full",
    block_size: int = 16,
    window: int = 0,
    layers: int = 2,
    page_bytes: int = 4096,
    replicated: bool = False,
) -> GroupSpec:
    """A group whose regions `RawEngine` lays out."""
    regions = tuple(Region(0, 0, page_bytes, page_bytes) for _ in range(layers))
    return GroupSpec(kind, block_size, window, "test", regions, replicated)


def chain(tokens: Sequence[int], chunk_size: int, lookahead: int = 0) -> tuple[bytes, ...]:
    """The keys of the whole chunks of a prompt, of which each covers `lookahead` tokens more."""
    length = chunk_size + lookahead
    starts = range(0, len(tokens) - length + 1, chunk_size)
    return tuple(chunk_keys((tokens[start : start + length], None) for start in starts))


class RawEngine:
    """One engine with one worker and one buffer, in which each region of each group has its own pages,
    `pad` bytes apart; or one rank of several (see `start_ranks`), of which any can ask as scheduler."""

    made = 0

    def __init__(
        self,
        address: str,
        groups: Sequence[GroupSpec],
        num_blocks: int = 64,
        engine_id: str = "engine",
        model: str = "model",
        pad: int = 0,
        rank: int = 0,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        export: Export | None = None,
    ) -> None:
        self.engine_id = engine_id
        self.num_blocks = num_blocks
        self.groups = tuple(groups)
        if export is None:
            self.groups, size = _laid_out(groups, num_blocks, pad)
            self.memory: NDArray[np.uint8] = np.zeros(size, dtype=np.uint8)
            export = HostExport(((self.memory.ctypes.data, self.memory.nbytes),))
        self.export = export
        self.geometry = Geometry(self.groups, num_blocks)
        self.rank = rank
        self.model = ModelTag(model, (("weights", model),), tensor_parallel_size, pipeline_parallel_size)
        self.chunk_size = 0
        self.request_id = "request"
        self.tenant = b""
        self.states: list[tuple[int, str]] = []
        self.worker = Channel(address, self._register, lambda *state: self.states.append(state))
        self.scheduler = Channel(address, lambda _: self._scheduler.join(TIMEOUT_S))
        self.client = Worker(self.worker, engine_id, rank, self.model, self.geometry, export)
        self._scheduler = RawScheduler(self.scheduler, engine_id)
        _open.append(self)
        RawEngine.made += 1

    def start(self, wait_s: float = PATIENCE_S) -> "RawEngine":
        start_all([self.worker, self.scheduler], wait_s)
        return self

    def own_memory(self) -> Memory:
        return self.export.memory(os.getpid())

    def _register(self, _channel: Channel) -> None:
        self.chunk_size = self.client.register().chunk_size

    def pages(self, group_index: int, block: int) -> NDArray[np.uint8]:
        """The bytes of a block over all regions of a group, as one array (a copy)."""
        pages = [self._page(region, block) for region in self.groups[group_index].regions]
        return np.concatenate([*pages, np.zeros(0, dtype=np.uint8)])

    def fill(self, group_index: int, block: int, seed: int) -> NDArray[np.uint8]:
        """Write pages that `seed` determines into a block; returns them."""
        generator = np.random.default_rng(seed)
        for region in self.groups[group_index].regions:
            self._page(region, block)[:] = generator.integers(0, 256, region.page_bytes, dtype=np.uint8)
        return self.pages(group_index, block)

    def erase(self, group_index: int, block: int) -> None:
        for region in self.groups[group_index].regions:
            self._page(region, block)[:] = 0

    def _page(self, region: Region, block: int) -> NDArray[np.uint8]:
        start = region.offset + block * region.stride_bytes
        return self.memory[start : start + region.page_bytes]

    def store(self, objects: Sequence[StoreObject]) -> Stored:
        message = Store(tuple(objects), (self.request_id,)[: len(objects)])
        return expect(self.worker.call(message, TIMEOUT_S), Stored)

    def store_prompt(
        self, keys: Sequence[bytes], tables: Sequence[Sequence[int]], without: Collection[int] = ()
    ) -> Stored:
        """Store all chunks of a prompt whose blocks are in `tables` (per group, by position), but not of
        the groups `without`."""
        objects = []
        for chunk in range(len(keys)):
            for index, each in enumerate(self.groups):
                positions = each.stored_blocks(chunk, self.chunk_size)
                if positions and index not in without:
                    ids = tuple(tables[index][i] for i in positions)
                    objects.append(chunk_object(keys, chunk, index, ids, self.tenant))
        return self.store(objects)

    def lookup_message(self, keys: Sequence[bytes], computed: int = 0, limit: int | None = None) -> Lookup:
        limit = len(keys) * self.chunk_size if limit is None else limit
        return Lookup(self.request_id, tuple(keys), computed, limit, limit + 1, tenant=self.tenant)

    def lookup(self, keys: Sequence[bytes], computed: int = 0, limit: int | None = None) -> Found:
        asked = self._scheduler.lookup(self.lookup_message(keys, computed, limit), TIMEOUT_S)
        return expect(self.scheduler.wait(asked), Found)

    def load(
        self, found: Found, keys: Sequence[bytes], tables: Sequence[Sequence[int]], computed: int = 0
    ) -> Message:
        """Load into the blocks of `tables`; raises ChannelError as the connector would see it."""
        key = keys[found.resume_tokens // self.chunk_size - 1]
        message = load_message(self.request_id, found, key, computed, self.groups, tables)
        return self.worker.call(message, TIMEOUT_S)

    def end(self, found: Found, keys: Sequence[bytes] = ()) -> None:
        leases = (found.lease_id,) if found.lease_id else ()
        expect(self.scheduler.wait(self._scheduler.release(leases, tuple(keys), self.request_id)), Done)

    def close(self, goodbye_s: float = 1.0) -> None:
        if self in _open:
            _open.remove(self)
            self.scheduler.close(goodbye_s)
            self.worker.close(goodbye_s)


def _laid_out(groups: Sequence[GroupSpec], num_blocks: int, pad: int) -> tuple[tuple[GroupSpec, ...], int]:
    """The groups with their regions one behind the other, and the bytes that they take."""
    laid_out, offset = [], 0
    for spec in groups:
        regions = []
        for region in spec.regions:
            stride = region.page_bytes + pad
            regions.append(Region(0, offset, stride, region.page_bytes))
            offset += num_blocks * stride
        laid_out.append(structs.replace(spec, regions=tuple(regions)))
    return tuple(laid_out), offset


def start_ranks(
    address: str,
    groups: Sequence[Sequence[GroupSpec]],
    tensor_parallel_size: int,
    num_blocks: int = 64,
    engine_id: str = "engine",
    model: str = "model",
) -> list[RawEngine]:
    """One engine of several workers, `groups` those of each in rank order: tensor-parallel ranks of a
    pipeline stage are neighbours."""
    ranks = [
        RawEngine(
            address,
            each,
            num_blocks,
            engine_id,
            model,
            rank=rank,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=len(groups) // tensor_parallel_size,
        )
        for rank, each in enumerate(groups)
    ]
    start_all([engine.worker for engine in ranks])
    if not any(engine.worker.refusal for engine in ranks):  # none can join then
        start_all([engine.scheduler for engine in ranks])
    return ranks


def start_all(channels: Sequence[Channel], wait_s: float = PATIENCE_S) -> None:
    """Start them until each is ready, or one is refused. On a busy machine, an attempt to greet or register
    may come too late, and the next one succeeds."""
    limit_s = time.monotonic() + wait_s
    for channel in channels:
        channel.start(wait_s, wait_s)
        while not (channel.ready or any(each.refusal for each in channels)) and time.monotonic() < limit_s:
            time.sleep(0.01)
