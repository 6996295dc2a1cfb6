"""The sessions, the shards that workers have registered, and the engines that shards make up."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lmcache_client.contract.geometry import FULL, Geometry, GeometryError, GroupSpec
from lmcache_client.contract.keys import ModelTag, namespace_fields, namespace_id
from lmcache_client.contract.messages import MAX_NAME, Memory, NotCached
from lmcache_server.core.layout import Layout
from lmcache_server.service.system import Process
from lmcache_server.transfer.copy_queue import CopyWorker


@dataclass
class Shard:
    """What one worker registered. `copier` is set once the worker tries to prove that it owns the memory."""

    engine_id: str
    rank: int
    model: ModelTag
    geometry: Geometry
    memory: Memory
    chunk_size: int
    nonce: bytes
    ephemeral: bool
    process: Process | None = None
    copier: CopyWorker | None = None
    proven: bool = False
    copy_failed: bool = False


@dataclass
class Session:
    """One connected client, from its greeting until it is dropped. ROUTER knows it as `identity`."""

    session_id: int
    identity: bytes
    pid: int
    client_id: bytes
    client_version: str
    started_s: float
    heard_s: float
    process: Process | None
    model: str = ""
    """The model that it last tried to register, for the log."""
    joined: str = ""
    joined_namespace: bytes = b""
    """The engine whose scheduler this is, and the namespace that it was answered with."""
    not_cached: NotCached | None = None
    """Set by an engine that does not use the cache."""
    shard: Shard | None = None
    jobs: int = 0
    waiting_bytes: int = 0

    @contextmanager
    def working(self, request_bytes: int) -> Iterator[None]:
        """Counts a copy and the bytes of its request while the copy waits or runs."""
        self.jobs += 1
        self.waiting_bytes += request_bytes
        try:
            yield
        finally:
            self.jobs -= 1
            self.waiting_bytes -= request_bytes

    @property
    def role(self) -> str:
        if self.not_cached is not None:
            return "not cached"
        return "worker" if self.shard is not None else "scheduler" if self.joined else "client"

    @property
    def vllm_version(self) -> str:
        """The version that a worker or an uncached engine has given; empty for other clients."""
        if self.not_cached is not None:
            return self.not_cached.vllm_version
        return dict(self.shard.model.details).get("vllm", "") if self.shard is not None else ""

    @property
    def engine_id(self) -> str:
        if self.not_cached is not None:
            return self.not_cached.engine_id
        return self.shard.engine_id if self.shard is not None else self.joined


@dataclass(frozen=True, eq=False)
class Greeting:
    """A greeting that waits until all copies of the client's earlier sessions have ended."""

    identity: bytes


@dataclass
class Engine:
    """The shards of one engine by rank, and its layout once all of them are there."""

    engine_id: str
    model: ModelTag
    ephemeral: bool
    shards: dict[int, Shard] = field(default_factory=dict)
    layout: Layout | None = None

    def complete(self) -> Layout | None:
        """The layout, or None until every shard is proven. Raises GeometryError if the shards disagree."""
        if self.layout is None and len(self.shards) == self.model.ranks.stop - self.model.ranks.start:
            ordered = [self.shards[rank] for rank in sorted(self.shards)]
            self.layout = _layout(self.model, ordered, self.ephemeral)
        return self.layout

    def capacity_tokens(self, l1_bytes: int, frame_bytes: int) -> int:
        """How many tokens of a complete engine fit into L1. Of windows and states, which are not stored at
        every chunk, only those of models that have nothing else count."""
        if (layout := self.layout) is None:
            return 0
        every = range(len(layout.groups))
        groups = [index for index in every if layout.groups[index].kind == FULL] or every
        taken = 0
        for index in groups:
            blocks = layout.chunk_size // layout.groups[index].block_size
            for rank in layout.holders[index]:
                taken += -(-self.shards[rank].geometry.groups[index].block_bytes * blocks // frame_bytes)
        return l1_bytes // (max(taken, 1) * frame_bytes) * layout.chunk_size


def _layout(model: ModelTag, shards: Sequence[Shard], ephemeral: bool) -> Layout:
    """The layout of an engine with these shards, which are in rank order: so the tensor-parallel ranks of a
    pipeline stage are neighbours."""
    groups = shards[0].geometry.groups
    shape = [(group.kind, group.block_size, group.window, group.replicated) for group in groups]
    tensor_ranks, first_rank = model.tensor_parallel_size, model.ranks.start
    holders = [list[int]() for _ in groups]
    for shard in shards:
        own = shard.geometry.groups
        if [(group.kind, group.block_size, group.window, group.replicated) for group in own] != shape:
            raise GeometryError("the workers of this engine registered different KV cache groups")
        holder = max(shard.rank - shard.rank % tensor_ranks, first_rank)
        first = shards[holder - first_rank].geometry.groups
        # One rank reads the objects of another, so both must have the same pages in the same order.
        if any(a.replicated and _contents(a) != _contents(b) for a, b in zip(own, first, strict=True)):
            raise GeometryError("the workers of this engine registered different pages as replicated")
        for ranks, group in zip(holders, own, strict=True):
            if group.regions and (shard.rank == holder or not group.replicated):
                ranks.append(shard.rank)
    namespace = namespace_id(model, [shard.geometry for shard in shards], ephemeral)
    name, held = model.model[:MAX_NAME], tuple(tuple(ranks) for ranks in holders)
    return Layout(namespace, shards[0].chunk_size, groups, held, tensor_ranks, ephemeral, name, first_rank)


def _contents(group: GroupSpec) -> tuple[str, list[int]]:
    return group.tag, [region.page_bytes for region in group.regions]


class Engines:
    """The engines that have a registered worker."""

    def __init__(self) -> None:
        self._engines: dict[str, Engine] = {}

    def __iter__(self) -> Iterator[Engine]:
        return iter(list(self._engines.values()))

    def get(self, engine_id: str) -> Engine | None:
        return self._engines.get(engine_id)

    def fits(self, engine_id: str, rank: int, model: ModelTag, ephemeral: bool) -> bool:
        """Whether no live engine of this id has another model, or a worker of this rank already."""
        engine = self._engines.get(engine_id)
        return engine is None or (
            (engine.model, engine.ephemeral) == (model, ephemeral) and rank not in engine.shards
        )

    def add(self, shard: Shard) -> Engine:
        """Adds a proven shard that fits to its engine."""
        new = Engine(shard.engine_id, shard.model, shard.ephemeral)
        engine = self._engines.setdefault(shard.engine_id, new)
        engine.shards[shard.rank] = shard
        engine.layout = None
        return engine

    def remove(self, shard: Shard) -> None:
        engine = self._engines.get(shard.engine_id)
        if engine is None or engine.shards.get(shard.rank) is not shard:
            return
        del engine.shards[shard.rank]
        engine.layout = None
        if not engine.shards:
            del self._engines[shard.engine_id]

    def explained(self) -> Iterator[dict[str, Any]]:
        """What the namespace of each live engine is made of."""
        for engine in self:
            if engine.layout is not None:
                shards = [engine.shards[rank].geometry for rank in sorted(engine.shards)]
                fields = namespace_fields(engine.model, shards, engine.ephemeral)
                namespace = engine.layout.namespace.hex()
                texts = {name: str(value) for name, value in fields.items()}
                names = {"engine": engine.engine_id, "namespace": namespace, "model": engine.layout.model}
                yield {**names, "fields": texts}


def _lookahead_tokens(model: ModelTag) -> int:
    text = dict(model.details).get("lookahead", "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 4 else 0


def namespace_summary(model: ModelTag, layout: Layout, capacity_tokens: int) -> dict[str, Any]:
    """What the status report says about a namespace. It is small, because it outlives the engines."""
    return {
        "namespace": layout.namespace.hex(),
        "model": layout.model,
        "chunk_size": layout.chunk_size,
        "capacity_tokens": capacity_tokens,
        "lookahead_tokens": _lookahead_tokens(model),
        "world_size": model.world_size,
        "ephemeral": layout.ephemeral,
        "groups": [
            {"kind": group.kind, "block_size": group.block_size, "window": group.window,
             "layers": len(group.regions), "block_bytes": group.block_bytes, "replicated": group.replicated}
            for group in layout.groups
        ],
    }  # fmt: skip
