"""A client without vLLM: real memory of this process, the real channel, a real server.

`RawEngine` registers numpy buffers as one engine with one worker and gives the calls of the connector,
so that tests can say exactly which bytes are stored and restored; `start_ranks` makes one engine of
several.
"""

import dataclasses
import os
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from lmcache_client.channel import Channel, ChannelError
from lmcache_client.contract.geometry import Geometry, GroupSpec, Region
from lmcache_client.contract.keys import ROOT_KEY, ModelTag, chunk_key
from lmcache_client.contract.messages import (
    Challenge,
    Done,
    EndRequest,
    Found,
    Join,
    Joined,
    Lookup,
    Memory,
    Message,
    Prove,
    Register,
    Registered,
    Retrieve,
    Store,
    Stored,
    StoreObject,
)
from lmcache_client.memory.host import ProofBuffer, allow_tracer

TIMEOUT_S = 20.0


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


def chain(tokens: Sequence[int], chunk_size: int) -> tuple[bytes, ...]:
    """The keys of the whole chunks of a prompt."""
    keys, parent = [], ROOT_KEY
    for start in range(0, len(tokens) - chunk_size + 1, chunk_size):
        parent = chunk_key(parent, tokens[start : start + chunk_size], None)
        keys.append(parent)
    return tuple(keys)


class RawEngine:
    """One engine with one worker and one buffer, in which each region of each group has its own pages,
    `pad` bytes apart; or one rank of several (see `start_ranks`), of which any can ask as scheduler."""

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
    ) -> None:
        self.engine_id = engine_id
        self.num_blocks = num_blocks
        size, laid_out = 0, []
        for each in groups:
            spec, size = _laid_out(each, num_blocks, pad, size)
            laid_out.append(spec)
        self.groups = tuple(laid_out)
        self.memory: NDArray[np.uint8] = np.zeros(size, dtype=np.uint8)
        self.geometry = Geometry(self.groups, num_blocks)
        self.rank = rank
        self.model = ModelTag(model, (), tensor_parallel_size, pipeline_parallel_size)
        self.proof = ProofBuffer()
        self.chunk_size = 0
        self.states: list[tuple[bool, str]] = []
        self.worker = Channel(address, self._register, lambda *state: self.states.append(state))
        self.scheduler = Channel(address, self._join)

    def start(self, wait_s: float = 5.0) -> "RawEngine":
        self.worker.start(wait_s, wait_s)
        self.scheduler.start(wait_s, wait_s)
        return self

    def host_memory(self) -> Memory:
        return Memory(os.getpid(), ((self.memory.ctypes.data, self.memory.nbytes),), self.proof.address)

    def _register(self, channel: Channel) -> None:
        allow_tracer(channel.server_pid)
        challenge = channel.call(
            Register(self.engine_id, self.rank, self.model, self.geometry, self.host_memory()), TIMEOUT_S
        )
        assert isinstance(challenge, Challenge)
        self.proof.write(challenge.nonce)
        registered = channel.call(Prove(), TIMEOUT_S)
        assert isinstance(registered, Registered)
        self.chunk_size = registered.chunk_size

    def _join(self, channel: Channel) -> None:
        joined = channel.call(Join(self.engine_id), TIMEOUT_S)
        assert isinstance(joined, Joined)
        if not joined.ready:
            raise ChannelError("the worker has not registered")

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

    def _page(self, region: Region, block: int) -> NDArray[np.uint8]:
        start = region.offset + block * region.stride_bytes
        return self.memory[start : start + region.page_bytes]

    def store(self, objects: Sequence[StoreObject]) -> Stored:
        stored = self.worker.call(Store(tuple(objects)), TIMEOUT_S)
        assert isinstance(stored, Stored)
        return stored

    def store_prompt(
        self, keys: Sequence[bytes], tables: Sequence[Sequence[int]], without: Collection[int] = ()
    ) -> Stored:
        """Store all chunks of a prompt whose blocks are in `tables` (per group, by position), but not of
        the groups `without`."""
        objects = []
        for chunk, key in enumerate(keys):
            for index, each in enumerate(self.groups):
                positions = each.stored_blocks(chunk, self.chunk_size)
                if positions and index not in without:
                    ids = tuple(tables[index][i] for i in positions)
                    parent = keys[chunk - 1] if chunk else ROOT_KEY
                    objects.append(StoreObject(key, parent, chunk, index, ids))
        return self.store(objects)

    def lookup_message(self, keys: Sequence[bytes], computed: int = 0, limit: int | None = None) -> Lookup:
        limit = len(keys) * self.chunk_size if limit is None else limit
        return Lookup(self.engine_id, "request", tuple(keys), computed, limit, limit + 1)

    def lookup(self, keys: Sequence[bytes], computed: int = 0, limit: int | None = None) -> Found:
        found = self.scheduler.call(self.lookup_message(keys, computed, limit), TIMEOUT_S)
        assert isinstance(found, Found)
        return found

    def retrieve(
        self, found: Found, keys: Sequence[bytes], tables: Sequence[Sequence[int]], computed: int = 0
    ) -> Message:
        """Load into the blocks of `tables`; raises ChannelError as the connector would see it."""
        wanted = tuple(
            tuple(table[i] for i in each.needed_blocks(found.resume_tokens, computed))
            for each, table in zip(self.groups, tables, strict=True)
        )
        key = keys[found.resume_tokens // self.chunk_size - 1]
        message = Retrieve("request", found.lease_id, key, found.resume_tokens, computed, wanted)
        return self.worker.call(message, TIMEOUT_S)

    def end(self, found: Found, keys: Sequence[bytes] = ()) -> None:
        leases = (found.lease_id,) if found.lease_id else ()
        assert isinstance(
            self.scheduler.call(EndRequest(self.engine_id, leases, tuple(keys)), TIMEOUT_S), Done
        )

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()


def _laid_out(spec: GroupSpec, num_blocks: int, pad: int, offset: int) -> tuple[GroupSpec, int]:
    """The group with its regions from `offset` on, and where they end."""
    regions = []
    for region in spec.regions:
        stride = region.page_bytes + pad
        regions.append(Region(0, offset, stride, region.page_bytes))
        offset += num_blocks * stride
    return dataclasses.replace(spec, regions=tuple(regions)), offset


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
    for engine in ranks:
        engine.worker.start(5.0, 5.0)
    for engine in ranks:
        engine.scheduler.start(5.0, 5.0)
    return ranks
