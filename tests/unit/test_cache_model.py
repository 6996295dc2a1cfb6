"""The cache against a model made of plain dicts and lists, in every order of operations.

The model knows nothing of frames' positions; the bytes are modelled apart: a tag per frame, written when
a store ends, and read by every open read after every step.
"""

import itertools
import math
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lmcache_client.contract import codec
from lmcache_client.contract.geometry import CHUNKED_LOCAL, FULL, RECURRENT, SLIDING_WINDOW, GroupSpec
from lmcache_server.core.cache import ONCE_SHARE, Cache, Gone, Layout, NotReserved, Read, Reservation
from lmcache_server.core.index import Chunk
from lmcache_server.core.named_limits import Limits
from lmcache_server.host.units import GB_BYTES

FRAME_BYTES = 10
CHUNK_SIZE = 16
UNIFIED = 8
LEASE_S = 5.0
CHAIN_CHUNKS = 6


def group(kind, block_size, window=0, replicated=False):
    return GroupSpec(kind, block_size, window, "", (), replicated)


LAYOUTS = (
    Layout(b"plain", CHUNK_SIZE, (group(FULL, 4),), ((0,),)),
    Layout(
        b"every kind",
        CHUNK_SIZE,
        (group(FULL, 4), group(SLIDING_WINDOW, 2, 24), group(CHUNKED_LOCAL, 4, 24), group(RECURRENT, 8)),
        ((0, 1), (0,), (1,), (0, 1)),
    ),
    Layout(
        b"sparse",
        CHUNK_SIZE,
        (group(SLIDING_WINDOW, 4, 10), group(RECURRENT, 8), group(FULL, 8)),
        ((0, 1), (1,), ()),
    ),
    Layout(
        b"replicated",
        CHUNK_SIZE,
        (group(FULL, 4, replicated=True), group(SLIDING_WINDOW, 4, 10, replicated=True), group(FULL, 8)),
        ((0, 2), (2,), (0, 1)),
        tensor_parallel_size=2,
    ),
)
SHARDS = range(4)
TENANTS = {b"every kind": b"a tenant", b"sparse": b"a tenant", b"replicated": b"another"}
"""Whose chunks those of a namespace are; those of the first are nobody's."""


def owner(layout: Layout, of: int, shard: int) -> int:
    """Ranks 0 and 1 are a stage, as are 2 and 3: what is replicated is the first one's."""
    return {1: 0, 3: 2}.get(shard, shard) if layout.groups[of].replicated else shard


def writers(layout: Layout, of: int) -> list[int]:
    return [shard for shard in SHARDS if owner(layout, of, shard) in layout.holders[of]]


def chain_keys(branch: int) -> list[bytes]:
    """Two chains that part after two chunks."""
    return [bytes([0 if index < 2 else branch, index]) * 16 for index in range(CHAIN_CHUNKS)]


PARENTS = {
    key: ([b""] + chain_keys(branch))[index]
    for branch in range(1 << 3)
    for index, key in enumerate(chain_keys(branch))
}


@dataclass(eq=False)
class ModelObject:
    num_bytes: int
    tag: tuple
    ready: bool = False

    @property
    def frames(self) -> int:
        return -(-self.num_bytes // FRAME_BYTES)


@dataclass(eq=False)
class ModelChunk:
    name: tuple[bytes, bytes]
    pins: int = 0
    objects: dict[tuple[int, int], ModelObject] = field(default_factory=dict)
    once: bool = False
    stored_s: float = 0.0

    @property
    def tenant(self) -> bytes:
        return TENANTS.get(self.name[0], b"")

    @property
    def taken(self) -> int:
        return sum(each.frames for each in self.objects.values())

    def frames(self, ready: bool = True) -> int:
        return sum(each.frames for each in self.objects.values() if each.ready == ready)


@dataclass
class ModelLease:
    session: int
    layout: Layout
    resume_tokens: int
    chunks: dict[int, ModelChunk]
    deadline_s: float


class Model:
    """What the cache should hold; slow, and obvious."""

    def __init__(self) -> None:
        self.total_frames = 0
        self.index: dict[tuple[bytes, bytes], ModelChunk] = {}
        self.forgotten: list[ModelChunk] = []
        self.once: list[ModelChunk] = []
        self.others: list[ModelChunk] = []
        self.leases: dict[int, ModelLease] = {}
        self.evicted = [0, 0, 0]
        """Chunks, their bytes, and the chunks whose tenant was at its quota."""
        self.now_s = 0.0
        self.quotas: dict[bytes, float] = {}
        self.protected: list[ModelChunk] = []
        self.spilling: list[ModelChunk] = []
        self.ancestors: dict[bytes, bytes | None] = {}
        """As in the cache."""

    def protect(self, names: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Those that are there, and not being written."""
        chunks = [self.index[each] for each in dict.fromkeys(names) if each in self.index]
        there = [each for each in chunks if each.frames() and not each.frames(False)]
        for each in there:
            if each not in self.protected:
                each.once = False
                self.pin(each)
                self.protected.append(each)
        return [each.name for each in there]

    def unprotect(self, chunk: ModelChunk) -> None:
        self.protected.remove(chunk)
        self.unpin(chunk)

    @property
    def order(self) -> list[ModelChunk]:
        return [*self.once, *self.others]

    def insert(self, chunk: ModelChunk, before: ModelChunk | None = None) -> None:
        """Last in its own part, or ahead of another."""
        part = next((part for part in (self.once, self.others) if before in part), None)
        if part is None:
            (self.once if chunk.once else self.others).append(chunk)
        else:
            part.insert(part.index(before), chunk)

    def remove(self, chunk: ModelChunk) -> None:
        for part in (self.once, self.others):
            if chunk in part:
                part.remove(chunk)

    def chunks(self) -> list[ModelChunk]:
        return [*self.index.values(), *self.forgotten]

    def free_frames(self) -> int:
        return self.total_frames - sum(chunk.taken for chunk in self.chunks())

    def tenant_frames(self, tenant: bytes) -> int:
        return sum(chunk.taken for chunk in self.chunks() if chunk.tenant == tenant)

    def is_held(self, layout: Layout, key: bytes, index: int, of: int) -> bool:
        if not layout.groups[of].stored_blocks(index, CHUNK_SIZE):
            return True
        objects = self.index[layout.namespace, key].objects if (layout.namespace, key) in self.index else {}
        return all((of, shard) in objects and objects[of, shard].ready for shard in layout.holders[of])

    def needed_chunks(self, layout: Layout, of: int, resume: int, computed: int) -> set[int]:
        spec = layout.groups[of]
        return {block * spec.block_size // CHUNK_SIZE for block in spec.needed_blocks(resume, computed)}

    def resume_point(self, layout: Layout, keys: list[bytes], computed: int, limit: int) -> int:
        for resume in range(len(keys) * CHUNK_SIZE, computed, -CHUNK_SIZE):
            if resume <= limit and all(
                self.is_held(layout, keys[index], index, of)
                for of in range(len(layout.groups))
                for index in self.needed_chunks(layout, of, resume, computed)
            ):
                return resume
        return 0

    def use(self, names: list[tuple[bytes, bytes]], keep: bool = False) -> None:
        for name in reversed(names):
            chunk = self.index.get(name)
            if chunk is not None and keep:
                chunk.once = False
            if chunk in self.order:
                self.remove(chunk)
                self.insert(chunk)

    def pin(self, chunk: ModelChunk) -> None:
        chunk.pins += 1
        self.remove(chunk)

    def unpin(self, chunk: ModelChunk, parent: bytes = b"") -> None:
        chunk.pins -= 1
        if chunk.pins:
            return
        if chunk in self.forgotten:
            self.end_forgotten(chunk)
        elif chunk.objects:
            before = self.index.get((chunk.name[0], parent))
            if parent and before is None:
                self.once.insert(0, chunk)
            elif before is not None and chunk.once and not before.once:
                self.insert(chunk)
            else:
                self.insert(chunk, before)
        else:
            del self.index[chunk.name]

    def end_forgotten(self, chunk: ModelChunk) -> None:
        if chunk in self.forgotten and not chunk.pins and chunk not in self.spilling:
            self.forgotten.remove(chunk)

    def end_lease(self, lease_id: int) -> None:
        lease = self.leases.pop(lease_id)
        for index in sorted(lease.chunks, reverse=True):
            self.unpin(lease.chunks[index])

    def reserve(
        self, name: tuple[bytes, bytes], place: tuple[int, int], new: ModelObject, parent: bytes, once: bool
    ):
        """A NotReserved, or the chunk that now has a reserved object."""
        chunk = self.index.get(name)
        if chunk is not None and place in chunk.objects:
            return NotReserved.PRESENT if chunk.objects[place].ready else NotReserved.BUSY
        known = self.index.get((name[0], parent)) or self.ancestor(name[0], parent)
        before = known
        if known is not None and known not in self.order:
            before = self.ancestor(name[0], known.name[1]) or known
        if known is not None and known.once and not once:
            self.use([known.name], keep=True)
        # Unless it gets frames:
        self.ancestors[name[1]] = known.name[1] if known is not None else None
        tenant, lost = TENANTS.get(name[0], b""), list[ModelChunk]()
        over = self.tenant_frames(tenant) + new.frames - self.quotas.get(tenant, math.inf)
        if over > 0:
            line = self.once if once else self.order
            older = line[: line.index(before)] if before in line else line
            own = [each for each in older if each.tenant == tenant and each is not chunk]
            own = [each for each in own if each not in self.spilling]
            # However far it is above its quota, a store takes at most twice its size.
            missing = min(over, 2 * new.frames)
            while missing > 0:
                if not own:
                    return NotReserved.QUOTA
                lost.append(own.pop(0))
                missing -= lost[-1].frames()
        line = [each for each in self.order if each not in lost]
        if once:
            reserved = sum(each.frames(ready=False) for each in self.chunks())
            taken = sum(each.frames() for each in self.order if each.once) + reserved + new.frames
            part = self.others if taken <= self.total_frames // ONCE_SHARE else self.once
            line = [each for each in part if each not in lost]
        # Chunks that are as recently used as the parent are none to evict for its child.
        older = line[: line.index(before)] if before in line else line
        evictable = [each for each in older if each is not chunk and each not in self.spilling]
        if self.free_frames() + sum(each.frames() for each in lost + evictable) < new.frames:
            return NotReserved.ONCE if once else NotReserved.NO_ROOM
        self.evicted[2] += len(lost)
        while lost or self.free_frames() < new.frames:
            victim = lost.pop(0) if lost else evictable.pop(0)
            self.remove(victim)
            del self.index[victim.name]
            self.evicted[0] += 1
            self.evicted[1] += sum(each.num_bytes for each in victim.objects.values())
        chunk = self.index.setdefault(name, ModelChunk(name, once=once, stored_s=self.now_s))
        self.pin(chunk)
        chunk.once = chunk.once and once
        chunk.objects[place] = new
        self.ancestors[name[1]] = before.name[1] if before is not None else None
        return chunk

    def ancestor(self, namespace: bytes, key: bytes) -> ModelChunk | None:
        return self.index.get((namespace, self.ancestors.get(key) or b""))

    def forget_old(self, namespace: bytes, before_s: float, most: int) -> int:
        old = [
            chunk for name, chunk in self.index.items() if name[0] == namespace and chunk.stored_s < before_s
        ]
        return self.forget(sorted(old, key=lambda chunk: chunk.stored_s)[:most])

    def clear(self, namespaces: list[bytes]) -> int:
        return self.forget([chunk for name, chunk in self.index.items() if name[0] in namespaces])

    def forget(self, gone: list[ModelChunk]) -> int:
        for chunk in (each for each in self.protected if each in gone):
            chunk.pins -= 1
        self.protected = [each for each in self.protected if each not in gone]
        self.forgotten += [chunk for chunk in gone if chunk.pins or chunk in self.spilling]
        for chunk in gone:
            self.remove(chunk)
            del self.index[chunk.name]
        return len(gone)


def frames_of(runs) -> list[int]:
    return [frame for start, count in runs for frame in range(start, start + count)]


layouts = st.sampled_from(LAYOUTS)
sessions = st.integers(1, 3)
branches = st.integers(1, 2)
places = st.integers(0, 1 << 10)
eighths = st.integers(0, 40).map(lambda number: number / 8)
"""Seconds that floats add and subtract exactly."""
names = st.sampled_from(("one", "two"))
flags = st.booleans()
indexes, counts = st.integers(0, CHAIN_CHUNKS - 1), st.just(CHAIN_CHUNKS) | st.integers(0, CHAIN_CHUNKS)
sizes = st.integers(1, 60)
computed = st.just(0) | st.integers(0, 12)
"""In unified blocks."""
limits = st.just(1 << 20) | st.integers(0, CHAIN_CHUNKS * CHUNK_SIZE + 5)
quotas = st.just(math.inf) | st.integers(0, 40)
"""In frames."""
questions = {"layout": layouts, "branch": branches, "count": counts, "session": sessions, "once": flags}


class CacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cache = Cache(FRAME_BYTES)
        self.model = Model()
        self.now_s = 0.0
        self.serial = 0
        self.l1: dict[int, tuple] = {}
        self.reservations: list[tuple[Reservation, ModelChunk, tuple[int, int]]] = []
        self.reads: list[tuple[Read, list[ModelChunk], dict[int, tuple]]] = []
        self.spills: list[tuple[Chunk, ModelChunk, dict[int, tuple]]] = []

    @initialize(frames=st.integers(0, 80), quota=quotas, other=quotas)
    def start(self, frames, quota, other):
        self.model.total_frames = frames
        self.set_quotas(quota, other)
        self.cache.grow(frames)

    def gone(self, chunk, why):
        self.lost_to_quota += why is Gone.QUOTA

    def set_quotas(self, quota, other):
        """For an empty cache. Floats have all these numbers exactly."""
        self.model.quotas = {b"a tenant": quota, b"another": other}
        self.model.ancestors = {}
        from lmcache_server.options.quotas.tenants import Tenants

        in_gb = {name.hex(): frames * FRAME_BYTES / GB_BYTES for name, frames in self.model.quotas.items()}
        self.cache, self.lost_to_quota = Cache(FRAME_BYTES, lease_s=LEASE_S), 0
        self.cache.order.tenant_policy = Tenants(Limits(named=in_gb), FRAME_BYTES)
        self.cache.on_gone.append(self.gone)

    @rule(frames=st.integers(1, 6))
    def grow(self, frames):
        if self.model.total_frames < 60:
            self.model.total_frames += frames
            self.cache.grow(frames)

    @rule(layout=layouts, branch=branches, index=indexes, place=places, size=sizes, chained=flags, once=flags)
    def reserve(self, layout, branch, index, place, size, chained, once):
        objects = [
            (of, shard)
            for of in range(len(layout.groups))
            for shard in writers(layout, of)
            if layout.groups[of].stored_blocks(index, CHUNK_SIZE)
        ]
        if objects:
            own = objects[place % len(objects)]
            self._reserve(layout, branch, index, *own, size, chained, once)

    def _reserve(self, layout, branch, index, of, shard, num_bytes, chained=True, once=False):
        key = chain_keys(branch)[index]
        self.serial += 1
        parent = PARENTS[key] if chained else b""
        place = (of, owner(layout, of, shard))
        tag = (layout.namespace, key, *place, self.serial)
        new = ModelObject(num_bytes, tag)
        expected = self.model.reserve((layout.namespace, key), place, new, parent, once)
        blocks = len(layout.groups[of].stored_blocks(index, CHUNK_SIZE))
        tenant = TENANTS.get(layout.namespace, b"")
        got = self.cache.reserve(layout, key, of, shard, blocks, num_bytes, parent, once, tenant)
        if isinstance(expected, NotReserved):
            assert got is expected
            return None
        assert isinstance(got, Reservation)
        frames = frames_of(got.runs)
        assert len(frames) == -(-num_bytes // FRAME_BYTES)
        for frame in frames:
            self.l1[frame] = ("half written", self.serial)
        self.reservations.append((got, expected, place))
        return got

    @rule(computed=computed, **questions)
    def store_a_chain_and_look_it_up(self, layout, branch, count, computed, session, once):
        for index, (of, spec) in itertools.product(range(count), enumerate(layout.groups)):
            for shard in writers(layout, of) if spec.stored_blocks(index, CHUNK_SIZE) else ():
                if self._reserve(layout, branch, index, of, shard, FRAME_BYTES + of, once=once):
                    self.commit(-1)
        self.lookup(layout, branch, count, computed, 1 << 20, session, once)

    @precondition(lambda self: self.reservations)
    @rule(place=places)
    def commit(self, place):
        index = place % len(self.reservations) if place >= 0 else -1
        reservation, chunk, own = self.reservations.pop(index)
        stored = chunk.objects[own]
        for position, frame in enumerate(frames_of(reservation.runs)):
            self.l1[frame] = (*stored.tag, position)
        self.cache.commit(reservation)
        if chunk in self.model.forgotten:
            del chunk.objects[own]
        else:
            stored.ready = True
        self.model.unpin(chunk, reservation.parent)

    @precondition(lambda self: self.reservations)
    @rule(place=places)
    def abort(self, place):
        reservation, chunk, own = self.reservations.pop(place % len(self.reservations))
        self.cache.abort(reservation)
        del chunk.objects[own]
        self.model.unpin(chunk)

    @rule(computed=computed, limit=limits, **questions)
    def lookup(self, layout, branch, count, computed, limit, session, once):
        keys, computed, model = chain_keys(branch)[:count], computed * UNIFIED, self.model
        hit = self.cache.lookup(layout, keys, computed, limit, session, self.now_s, once)
        for of, bitmap in enumerate(hit.held):
            held = [model.is_held(layout, key, index, of) for index, key in enumerate(keys)]
            assert bitmap == sum(flag << bit for bit, flag in enumerate(held)).to_bytes(
                (count + 7) // 8, "little"
            )
        assert hit.resume_tokens == model.resume_point(layout, keys, computed, limit)
        assert (hit.lease_id != 0) == (hit.resume_tokens != 0)
        if not hit.resume_tokens:
            return
        assert hit.lease_id not in model.leases
        end = hit.resume_tokens // CHUNK_SIZE
        model.use([(layout.namespace, key) for key in keys[:end]], keep=not once)
        needed = {
            index
            for of, ranks in enumerate(layout.holders)
            if ranks
            for index in model.needed_chunks(layout, of, hit.resume_tokens, computed)
        }
        leased = {index: model.index[layout.namespace, keys[index]] for index in needed}
        for chunk in leased.values():
            model.pin(chunk)
        model.leases[hit.lease_id] = ModelLease(
            session, layout, hit.resume_tokens, leased, self.now_s + LEASE_S
        )

    @precondition(lambda self: self.model.leases)
    @rule(place=places, session=sessions)
    def release(self, place, session):
        lease_id = sorted(self.model.leases)[place % len(self.model.leases)]
        own = self.model.leases[lease_id].session == session
        assert self.cache.release(lease_id, session) == own
        if own:
            self.model.end_lease(lease_id)
            assert not self.cache.release(lease_id, session)

    @rule(seconds=eighths)
    def time_passes(self, seconds):
        self.now_s = self.model.now_s = self.now_s + seconds
        due = [lease_id for lease_id, lease in self.model.leases.items() if lease.deadline_s <= self.now_s]
        assert self.cache.expire(self.now_s) == len(due)
        for lease_id in due:
            self.model.end_lease(lease_id)

    @rule(session=sessions)
    def drop_session(self, session):
        lost = sorted(lease_id for lease_id, lease in self.model.leases.items() if lease.session == session)
        assert self.cache.drop_owner(session) == len(lost)
        for lease_id in lost:
            self.model.end_lease(lease_id)

    @rule(layout=layouts, branch=branches, start=indexes)
    def touch(self, layout, branch, start):
        keys = [*chain_keys(branch)[start:], b"unknown"]
        self.cache.touch(layout.namespace, keys)
        self.model.use([(layout.namespace, key) for key in keys], keep=True)

    @precondition(lambda self: self.model.leases)
    @rule(place=places, shard=st.sampled_from(SHARDS), computed=computed)
    def open_read(self, place, shard, computed):
        lease_id = sorted(self.model.leases)[place % len(self.model.leases)]
        lease, computed = self.model.leases[lease_id], computed * UNIFIED
        layout, resume = lease.layout, lease.resume_tokens
        mine = [of for of in range(len(layout.groups)) if shard in writers(layout, of)]
        needed = set().union(*(self.model.needed_chunks(layout, of, resume, computed) for of in mine))
        key = lease.chunks[max(lease.chunks)].name[1] if lease.chunks else b""
        assert (
            not lease.chunks or self.cache.open_read(lease_id, b"?", shard, resume, computed, layout) is None
        )
        read = self.cache.open_read(lease_id, key, shard, resume, computed, layout)
        assert (read is not None) == needed.issubset(lease.chunks)
        if read is None:
            return
        expected = {}
        assert {part.group for part in read.parts} <= set(mine)
        for of in mine:
            expected |= self._check_parts(read, lease, of, shard, computed)
        for chunk in lease.chunks.values():
            self.model.pin(chunk)
        self.reads.append((read, list(lease.chunks.values()), expected))

    def _check_parts(self, read, lease, of, shard, computed):
        """The parts of a group cover its needed blocks in order; returns the tag of each frame."""
        spec, expected, positions = lease.layout.groups[of], {}, []
        for part in (part for part in read.parts if part.group == of):
            index = spec.needed_blocks(lease.resume_tokens, computed)[len(positions)] * spec.block_size
            index //= CHUNK_SIZE
            stored = spec.stored_blocks(index, CHUNK_SIZE)
            assert part.num_blocks == len(stored)
            positions += stored[part.first_page : part.first_page + part.pages]
            tag = lease.chunks[index].objects[of, owner(lease.layout, of, shard)].tag
            expected |= {frame: (*tag, nth) for nth, frame in enumerate(frames_of(part.runs))}
        assert positions == list(spec.needed_blocks(lease.resume_tokens, computed))
        return expected

    @precondition(lambda self: self.reads)
    @rule(place=places)
    def close_read(self, place):
        read, chunks, _ = self.reads.pop(place % len(self.reads))
        self.cache.close_read(read)
        self.cache.close_read(read)
        for chunk in reversed(chunks):
            self.model.unpin(chunk)

    @precondition(lambda self: any(each.objects for each in self.model.index.values()))
    @rule(place=places)
    def open_spill(self, place):
        objects = [(name, at) for name in sorted(self.model.index) for at in self.model.index[name].objects]
        (namespace, key), (of, shard) = objects[place % len(objects)]
        layout = next(each for each in LAYOUTS if each.namespace == namespace)
        chunk, model = self.cache.chunk(namespace, key), self.model.index[namespace, key]
        stored = self.cache.open_spill(chunk, layout.bit(of, shard))
        expected = model.objects[of, shard]
        assert (stored is not None) == expected.ready
        if stored is not None:
            self.model.spilling.append(model)
            frames = {frame: (*expected.tag, nth) for nth, frame in enumerate(frames_of(stored.runs))}
            self.spills.append((chunk, model, frames))

    @precondition(lambda self: self.spills)
    @rule(place=places)
    def close_spill(self, place):
        chunk, model, _ = self.spills.pop(place % len(self.spills))
        self.cache.close_spill(chunk)
        self.model.spilling.remove(model)
        self.model.end_forgotten(model)

    @rule(frames=st.integers(0, 40))
    def coldest(self, frames):
        """From the first to be evicted on, until there are so many frames."""
        found = [(each.namespace, each.key) for each in self.cache.coldest(frames)]
        expected, left = [], frames
        for each in self.model.others:
            if left > 0:
                expected.append(each.name)
                left -= each.frames()
        assert found == expected

    @rule(layout=layouts, branch=branches, count=counts)
    def protect(self, layout, branch, count):
        names = [(layout.namespace, key) for key in chain_keys(branch)[:count]]
        self.cache.protect([self.cache.chunk(*name) for name in self.model.protect(names)])

    @precondition(lambda self: self.model.protected)
    @rule(place=places)
    def unprotect(self, place):
        chunk = self.model.protected[place % len(self.model.protected)]
        self.cache.unprotect([self.cache.chunk(*chunk.name)])
        self.model.unprotect(chunk)

    @rule(really=st.integers(0, 5))
    def clear(self, really):
        if not really:
            assert self.cache.clear() == self.model.clear([layout.namespace for layout in LAYOUTS])

    @rule(layout=layouts, really=st.integers(0, 3))
    def forget_a_namespace(self, layout, really):
        if not really:
            assert self.cache.clear(layout.namespace) == self.model.clear([layout.namespace])

    @rule(layout=layouts, age_s=eighths, most=st.integers(0, 8))
    def forget_old(self, layout, age_s, most):
        """Chunks that were stored longest ago, however they are used or pinned."""
        expected = self.model.forget_old(layout.namespace, self.now_s - age_s, most)
        assert self.cache.forget_old(layout.namespace, self.now_s - age_s, most) == expected

    @rule(really=st.integers(0, 3), asleep_s=eighths, quota=quotas, other=quotas)
    def restart(self, really, asleep_s, quota, other):
        """What the cache holds then comes back; nothing is leased or protected. Quotas may be others."""
        from lmcache_server.options.warm_restart import snapshot

        if not really:
            self.everybody_goes()
            index = codec.pack(snapshot.take(self.cache, {}, {}, self.now_s, 0.0))
            model = self.model
            saved = [*model.order, *model.protected]
            for chunk in model.protected:
                chunk.pins -= 1
            model.protected = []
            for chunk in saved:
                chunk.stored_s -= self.now_s + asleep_s
            model.index = {each.name: each for each in sorted(saved, key=lambda each: each.stored_s)}
            self.now_s = self.model.now_s = 0.0
            self.set_quotas(quota, other)
            saved_cache = snapshot.decode(index, self.model.total_frames)
            snapshot.rebuild(saved_cache, self.cache, self.now_s, asleep_s)
            self.model.evicted = [0, 0, 0]
            # Nobody knows any more why they are the first to go, but they still are.
            self.model.once, self.model.others = [], saved
            for chunk in self.model.others:
                chunk.once = False

    @invariant()
    def nothing_is_written_where_a_read_reads(self):
        for _, _, expected in [*self.reads, *self.spills]:
            for frame, tag in expected.items():
                assert self.l1[frame] == tag

    @invariant()
    def the_cache_holds_what_the_model_holds(self):
        self.cache.check_integrity()
        cache, model = self.cache, self.model
        chunks = model.chunks()
        counts = Counter(namespace for namespace, _ in model.index)
        assert {name: len(chunks) for name, chunks in cache.namespaces().items()} == counts
        assert cache.num_chunks == len(model.index)
        assert cache.num_leases == len(model.leases)
        assert cache.num_readers == len(self.reads)
        assert cache.total_frames == model.total_frames
        assert cache.free_frames == model.free_frames()
        assert cache.used_frames == sum(chunk.frames(True) for chunk in chunks)
        assert cache.reserved_frames == sum(chunk.frames(False) for chunk in chunks)
        assert cache.stored_bytes == sum(
            each.num_bytes for chunk in chunks for each in chunk.objects.values() if each.ready
        )
        assert [(chunk.namespace, chunk.key) for chunk in cache.order] == [each.name for each in model.order]
        assert sum(1 for _ in cache.order.once()) == len(model.once)
        assert [cache.evicted_chunks, cache.evicted_bytes, self.lost_to_quota] == model.evicted
        held = {each.name: each.frames for each in cache.order.tenant_policy}
        assert held == {name: taken for name in model.quotas if (taken := model.tenant_frames(name))}
        for tenant in cache.order.tenant_policy:
            line = [each.name for each in model.order if each.tenant == tenant.name]
            assert [(chunk.namespace, chunk.key) for chunk in tenant.line()] == line
        protected = [(chunk.namespace, chunk.key) for chunk in cache.protected]
        assert protected == [each.name for each in model.protected]

    def everybody_goes(self):
        while self.reservations:
            self.abort(0)
        while self.reads:
            self.close_read(0)
        while self.spills:
            self.close_spill(0)
        for session in (1, 2, 3):
            self.drop_session(session)

    def teardown(self):
        """Whatever happened, nothing leaks once everybody is gone."""
        self.everybody_goes()
        self.the_cache_holds_what_the_model_holds()
        assert not any(chunk.pins for chunk in self.model.chunks() if chunk not in self.model.protected)
        self.cache.clear()
        self.cache.check_integrity()
        assert self.cache.free_frames == self.cache.total_frames
        assert (self.cache.num_leases, self.cache.num_readers, self.cache.stored_bytes) == (0, 0, 0)


CacheMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)
test_the_cache_agrees_with_the_model = CacheMachine.TestCase
