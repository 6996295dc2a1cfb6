"""The chunks in L1: which frames are theirs, who holds them, and which are evicted to make room."""

import enum
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass

from lmcache_server.core.eviction_order import EvictionOrder
from lmcache_server.core.index import Chunk, Index
from lmcache_server.core.pool import FramePool, Runs

MAX_EVICTED_AGES = 1024
"""How many ages at eviction are kept until the caller drains them. Further ones are not recorded."""


class Gone(enum.Enum):
    """Why lookups do not find a chunk any more."""

    EVICTED = "evicted"
    """To make room for another."""
    QUOTA = "quota"
    """To make room within the quota of its tenant."""
    FORGOTTEN = "forgotten"


@dataclass(frozen=True)
class Contents:
    """The parts of a cache. `stored_bytes` is the payload of all objects."""

    pool: FramePool
    index: Index
    order: EvictionOrder
    stored_bytes: int


class Chunks:
    """The index, the eviction order and the frames of L1. A chunk can be evicted exactly while nothing
    refers to it.

    `frame_bytes` is the size of a frame.
    """

    def __init__(self, frame_bytes: int, total_frames: int = 0) -> None:
        if frame_bytes <= 0:
            raise ValueError(f"a frame has at least one byte, not {frame_bytes}")
        self.frame_bytes = frame_bytes
        self.evicted_chunks = 0
        self.evicted_bytes = 0
        """The payload of all evicted chunks."""
        self.evicted_ages_s: list[float] = []
        """For each chunk that was recently evicted for lack of room and was not `once`, the seconds since its
        last use. The caller drains the list."""
        self.stored_bytes = 0
        """The payload of all ready objects."""
        self.used_frames = 0
        """The frames of ready objects."""
        self.on_gone: list[Callable[[Chunk, Gone], object]] = []
        """Called with a chunk that lookups do not find any more, and why."""
        self.on_kept: list[Callable[[Chunk], object]] = []
        """Called with a chunk that somebody has asked for again, so that it is no longer `once`."""
        self.on_left: list[Callable[[int], object]] = []
        """Called with an owner that leaves its namespace."""
        self._now_s = 0.0
        self._pool = FramePool(total_frames)
        self._index = Index()
        self.order = EvictionOrder()
        """The chunks that nothing refers to; only to be read, but for its policy while it is empty."""
        self._spilling = Counter[Chunk]()
        """Chunks that tiers read from. They are not evicted, and their frames are freed afterwards."""
        self.protected: dict[Chunk, None] = {}
        """What an option keeps from eviction; only to be read."""

    @property
    def free_frames(self) -> int:
        return self._pool.free_frames

    @property
    def total_frames(self) -> int:
        return self._pool.total_frames

    @property
    def num_chunks(self) -> int:
        """How many chunks the index has, including those that have no ready object yet."""
        return len(self._index)

    def largest_free_run(self) -> int:
        return self._pool.largest_free_run()

    def namespaces(self) -> Mapping[bytes, Sized]:
        """The chunks of each namespace, as they change. There may be thousands of namespaces."""
        return self._index.namespaces

    def chunk(self, namespace: bytes, key: bytes) -> Chunk | None:
        return self._index.get(namespace, key)

    def grow(self, frames: int) -> None:
        """Adds `frames` free frames at the end of L1."""
        self._pool.grow(frames)

    def set_aside(self, ranges: Runs) -> None:
        """As FramePool.set_aside."""
        self._pool.set_aside(ranges)

    def clear(self, namespace: bytes | None = None, tenant: str = "") -> int:
        """Forgets every chunk (of `namespace`, of the tenants whose names begin with the digits `tenant`) as
        `forget` does; returns how many."""
        chunks = list(self._index if namespace is None else self._index.chunks(namespace).values())
        if tenant:
            chunks = [chunk for chunk in chunks if chunk.tenant.hex().startswith(tenant)]
        for chunk in chunks:
            self.forget(chunk)
        return len(chunks)

    def forget(self, chunk: Chunk) -> None:
        """Removes a chunk from the index. If it is in use, its frames are freed when the last use ends."""
        if chunk not in self._index:
            return
        self._index.remove(chunk)
        self._tell(chunk, Gone.FORGOTTEN)
        if chunk in self.protected:
            self.unprotect((chunk,))
        elif not chunk.ref_cnt:
            self.order.remove((chunk,))
            self._free_objects(chunk)

    def forget_old(self, namespace: bytes, before_s: float, most: int) -> int:
        """Forgets chunks that were first stored before `before_s`, as `forget` does: the oldest of the
        namespace first, and at most `most`. Returns how many."""
        oldest = itertools.islice(self._index.chunks(namespace).values(), most)
        old = list(itertools.takewhile(lambda chunk: chunk.stored_s < before_s, oldest))
        for chunk in old:
            self.forget(chunk)
        return len(old)

    def protect(self, chunks: Sequence[Chunk]) -> None:
        """Keeps chunks with ready objects from eviction until `unprotect`, or until they are forgotten."""
        new = [chunk for chunk in chunks if chunk not in self.protected]
        self.protected |= dict.fromkeys(new)
        self._keep(new)
        self._take_refs(new)

    def unprotect(self, chunks: Sequence[Chunk]) -> None:
        for chunk in reversed(chunks):
            del self.protected[chunk]
            self._drop_ref(chunk)

    def adopt(self, contents: Contents, now_s: float) -> None:
        """An empty cache has these contents from now on, which must agree with each other."""
        assert not self.num_chunks, "only an empty cache is restored"
        self._advance(now_s)
        contents.order.tenant_policy = self.order.tenant_policy
        self._pool, self._index, self.order = contents.pool, contents.index, contents.order
        self.stored_bytes, self.used_frames = contents.stored_bytes, contents.order.frames
        for chunk in self.order:
            self._grow(chunk, chunk.frames)
            if chunk.tenant:
                self.order.tenant_policy.added(chunk, None)

    def _advance(self, now_s: float) -> None:
        self._now_s = max(self._now_s, now_s)

    def _keep(self, chain: Iterable[Chunk | None]) -> None:
        for chunk in chain:
            if chunk is not None and chunk.once:
                self.order.keep(chunk)
                for told in self.on_kept:
                    told(chunk)

    def _use(self, chain: Iterable[Chunk | None]) -> None:
        used = [chunk for chunk in dict.fromkeys(chain) if chunk is not None]
        for chunk in used:
            chunk.last_used_s, chunk.in_tiers = self._now_s, 0
        self.order.renew([chunk for chunk in used if not chunk.ref_cnt])

    def _take_refs(self, chain: Sequence[Chunk]) -> None:
        unused = []
        for chunk in chain:
            if not chunk.ref_cnt and chunk.newer is not None:
                unused.append(chunk)
            chunk.ref_cnt += 1
        self.order.remove(unused)

    def _drop_refs(self, chain: Sequence[Chunk]) -> None:
        """The tail first: then a suffix is evicted before its prefix, without which it is useless."""
        now_s = self._now_s
        indexed = self._index.chunks(chain[0].namespace) if chain else {}
        for chunk in reversed(chain):
            if chunk.ref_cnt == 1 and chunk.ready and indexed.get(chunk.key) is chunk:
                chunk.ref_cnt = chunk.in_tiers = 0
                chunk.last_used_s = now_s
                self.order.add(chunk)
            else:
                self._drop_ref(chunk)

    def _drop_ref(self, chunk: Chunk, place: Chunk | None = None) -> None:
        chunk.ref_cnt -= 1
        chunk.last_used_s = self._now_s
        if chunk.ref_cnt:
            return
        if chunk not in self._index:
            self._free_objects(chunk)
        elif chunk.ready:
            self.order.add(chunk, place)
        else:
            self._index.remove(chunk)

    def _evict(self, victims: Sequence[Chunk], why: Gone) -> None:
        for chunk in victims:
            self.order.remove((chunk,))
            self._index.remove(chunk)
            self._tell(chunk, why)
            self.evicted_chunks += 1
            self.evicted_bytes += self._free_objects(chunk)
            if why is Gone.EVICTED and not chunk.once and len(self.evicted_ages_s) < MAX_EVICTED_AGES:
                self.evicted_ages_s.append(self._now_s - chunk.last_used_s)

    def _tell(self, chunk: Chunk, why: Gone) -> None:
        for told in self.on_gone:
            told(chunk, why)

    def _grow(self, chunk: Chunk, frames: int) -> None:
        if chunk.tenant:
            self.order.tenant_policy.grew(chunk, frames)

    def _free_objects(self, chunk: Chunk) -> int:
        """Frees the frames of all ready objects, unless a tier still reads them; returns their payload in
        bytes."""
        freed_bytes = 0
        if chunk in self._spilling:
            return 0
        for stored in chunk.packed.objects():
            self._pool.free(stored.runs)
            freed_bytes += stored.num_bytes
        self.used_frames -= chunk.frames
        self._grow(chunk, -chunk.frames)
        self.stored_bytes -= freed_bytes
        chunk.clear()
        return freed_bytes
