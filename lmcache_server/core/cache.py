"""The cache: every decision about L1 is made here.

It runs on one thread and takes the time as an argument. A frame is always free, reserved or ready; a chunk
can be evicted exactly while nothing refers to it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lmcache_client.contract.hits import resume_point
from lmcache_client.contract.keys import ROOT_KEY
from lmcache_server.core import invariants
from lmcache_server.core.chunks import Chunks, Contents, Gone
from lmcache_server.core.eviction_order import find_victims
from lmcache_server.core.index import Chunk
from lmcache_server.core.layout import Layout, bitmap
from lmcache_server.core.leases import Lease, LeaseTable
from lmcache_server.core.packed import StoredObject
from lmcache_server.core.pool import count_frames
from lmcache_server.core.reads import Read, plan_parts
from lmcache_server.core.reservation import NotReserved, Reservation

__all__ = ["Cache", "Contents", "Gone", "Hit", "Layout", "NotReserved", "Read", "Reservation"]

ONCE_SHARE = 20
"""When L1 is full, prompts that will not come back may take one in so many of its frames. With none, a batch
of such prompts could not share its beginning."""
MAX_ANCESTORS = 1 << 14
"""How many of the last chunks that were reserved or refused have a known ancestor."""


@dataclass(frozen=True)
class Hit:
    """The answer to a lookup. `resume_tokens` and `lease_id` are 0 when nothing can be restored. `held` has
    a bitmap per group, least significant bit first: the requested chunks that are ready on every holder."""

    resume_tokens: int
    lease_id: int
    held: tuple[bytes, ...]


class Cache(Chunks):
    """The chunks of L1 with their leases, reservations and reads.

    `frame_bytes` is the size of a frame; `lease_s` is how long a lease lasts, in seconds.
    """

    def __init__(self, frame_bytes: int, total_frames: int = 0, lease_s: float = 120.0) -> None:
        super().__init__(frame_bytes, total_frames)
        self.reserved_frames = 0
        self._leases = LeaseTable(lease_s)
        self._reservations: set[Reservation] = set()
        self._reads: set[Read] = set()
        self._ancestors: dict[bytes, bytes] = {}
        """By key. For a chunk that lately got frames: the nearest before it in its chain that could be
        evicted. For one that was refused: the nearest before it that was there."""

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    @property
    def num_readers(self) -> int:
        return len(self._reads)

    def lookup(
        self,
        layout: Layout,
        keys: Sequence[bytes],
        computed_tokens: int,
        limit_tokens: int,
        owner: int,
        now_s: float,
        once: bool = False,
    ) -> Hit:
        """Finds the largest resume point of a chain beyond `computed_tokens`, at most `limit_tokens`.

        If there is one, the chunks that it needs are leased to session number `owner`, and the chain up to it
        becomes recently used; by a prompt that may come back, unless `once`. An owner that holds too much
        loses its oldest leases.
        """
        self._advance(now_s)
        chain, hit = self.find(layout, keys, computed_tokens, limit_tokens)
        resume_tokens = hit.resume_tokens
        if not resume_tokens:
            return hit
        end = resume_tokens // layout.chunk_size
        first = layout.first_leased_chunk(resume_tokens, computed_tokens)
        leased: tuple[Chunk, ...] = tuple(chain[first:end])  # type: ignore[arg-type]
        assert None not in leased, "a needed chunk is in the index"
        # The leased chunks are marked as used when the lease ends.
        if not once:
            self._keep(chain[:end])
        self._use(chain[:first])
        self._take_refs(leased)
        while (old := self._leases.crowded_out(owner, len(leased))) is not None:
            self.release(old.lease_id, old.owner)
        lease = self._leases.grant(owner, layout.namespace, resume_tokens, first, leased, now_s)
        return Hit(resume_tokens, lease.lease_id, hit.held)

    def ready(self, layout: Layout, keys: Sequence[bytes]) -> list[int]:
        """Per chunk of a chain, the bits of its ready objects."""
        chain = map(self._index.chunks(layout.namespace).get, keys)
        return [chunk.ready if chunk else 0 for chunk in chain]

    def find(
        self, layout: Layout, keys: Sequence[bytes], computed_tokens: int, limit_tokens: int
    ) -> tuple[list[Chunk | None], Hit]:
        """The chunks of a chain, and what a lookup would answer. Nothing is leased or used."""
        chain = list(map(self._index.chunks(layout.namespace).get, keys))
        present = layout.present([chunk.ready if chunk else 0 for chunk in chain])
        resume_tokens = resume_point(layout.groups, layout.chunk_size, present, computed_tokens, limit_tokens)
        return chain, Hit(resume_tokens, 0, tuple(map(bitmap, present)))

    def is_partial(self, layout: Layout, key: bytes) -> bool:
        """Whether some shards have stored their part of a chunk, and others have not and are not storing it
        now."""
        chunk = self._index.get(layout.namespace, key)
        return chunk is not None and layout.is_partial(chunk.ready, chunk.reserved)

    def release(self, lease_id: int, owner: int) -> bool:
        """Ends a lease; returns False if `owner` has no such lease (any more)."""
        lease = self._leases.end(lease_id, owner)
        if lease is None:
            return False
        self._drop_refs(lease.chunks)
        return True

    def expire(self, now_s: float) -> int:
        """Ends the leases whose deadline has passed; returns how many."""
        self._advance(now_s)
        return self._end(self._leases.overdue(now_s))

    def drop_owner(self, owner: int) -> int:
        """Ends the leases of an owner; returns how many. Its reservations last as long as their copies."""
        self.leave(owner)
        return self._end(self._leases.of_owner(owner))

    def leave(self, owner: int) -> None:
        """An owner has ended, or has another namespace from now on."""
        for told in self.on_left:
            told(owner)

    def touch(self, namespace: bytes, keys: Sequence[bytes]) -> None:
        """Makes a chain of chunks recently used, the head most recently, by a prompt that may come back.
        Unknown keys are ignored."""
        chain = list(map(self._index.chunks(namespace).get, keys))
        self._keep(chain)
        self._use(chain)

    def reserve(
        self,
        layout: Layout,
        key: bytes,
        group: int,
        rank: int,
        num_blocks: int,
        num_bytes: int,
        parent: bytes = b"",
        once: bool = False,
        tenant: bytes = b"",
    ) -> Reservation | NotReserved:
        """Takes frames for an object of `num_bytes` payload and evicts chunks if it must. For a replicated
        group the first rank to ask writes the one object; the others get PRESENT or BUSY.

        `parent` is the key of the chunk before it in its chain. No ancestor is evicted for its descendant, so
        a chain longer than L1 loses its tail, not its head. Nothing is evicted unless that makes enough room.
        With `once`, it is of an answer, or of a prompt that will not come back. Chunks that came only so are
        evicted before all others, until another prompt reads or extends them. The chunk is this `tenant`'s if
        it is new. A tenant at its quota makes room among its own.
        """
        if num_bytes <= 0:
            raise ValueError(f"an object of {num_bytes} bytes cannot be stored")
        bit = layout.bit(group, rank)
        chunk = self._index.get(layout.namespace, key)
        if chunk is not None and chunk.ready >> bit & 1:
            return NotReserved.PRESENT
        if chunk is not None and chunk.reserved >> bit & 1:
            return NotReserved.BUSY
        frames = -(-num_bytes // self.frame_bytes)
        known, before = self._ancestors_of(layout.namespace, parent)
        if known is not None and known.once and not once:
            self.touch(layout.namespace, (known.key,))
        owner = chunk.tenant if chunk is not None else tenant
        victims = self._victims(frames, owner, chunk, before, once)
        if isinstance(victims, NotReserved):
            self._descends(key, known)
            return victims
        self._descends(key, before)
        if chunk is None:
            # A chain shares one name.
            shared = known.tenant if known is not None and known.tenant == tenant else tenant
            chunk = Chunk(layout.namespace, key, self._now_s, shared)
            chunk.once = once
            self._index.add(chunk)
        self._take_refs((chunk,))
        chunk.once &= once
        self._grow(chunk, frames)
        self._evict(victims[0], Gone.QUOTA)
        self._evict(victims[1], Gone.EVICTED)
        runs = self._pool.allocate(frames)
        assert runs is not None, "there was room"
        chunk.reserved |= 1 << bit
        self.reserved_frames += frames
        reservation = Reservation(chunk, bit, runs, num_blocks, num_bytes, parent)
        self._reservations.add(reservation)
        return reservation

    def _ancestors_of(self, namespace: bytes, parent: bytes) -> tuple[Chunk | None, Chunk | None]:
        """The last chunk that is there of a chain up to `parent`, and the last that can be evicted. A parent
        may have been refused, or be in use."""
        chunks, known = self._index.chunks(namespace), self._ancestors
        last = chunks.get(parent) or chunks.get(known.get(parent, b""))
        if last is None or last in self.order:
            return last, last
        return last, chunks.get(known.get(last.key, b"")) or last

    def _descends(self, key: bytes, ancestor: Chunk | None) -> None:
        self._ancestors.pop(key, None)
        if ancestor is not None:
            self._ancestors[key] = ancestor.key
            if len(self._ancestors) > MAX_ANCESTORS:
                del self._ancestors[next(iter(self._ancestors))]

    def _victims(
        self, frames: int, tenant: bytes, chunk: Chunk | None, parent: Chunk | None, once: bool
    ) -> tuple[list[Chunk], list[Chunk]] | NotReserved:
        """What must go for so many frames more: what the policy takes of a tenant, and what L1 lacks then."""
        order, policy, spilling = self.order, self.order.tenant_policy, self._spilling
        own: list[Chunk] | None = []
        if tenant and (excess := policy.excess_frames(tenant, frames)):
            own = find_victims(excess, policy.line(tenant, once), chunk, parent, spilling)
        if own is None:
            return NotReserved.QUOTA
        missing = frames - self._pool.free_frames - sum(map(self._frees, own))
        line, held = iter(order), {*own, *spilling} if own else spilling
        if once:
            taken = order.once_frames + self.reserved_frames + frames
            line = order.once() if taken > self.total_frames // ONCE_SHARE else order.others()
        is_there = missing <= order.frames
        others = find_victims(missing, line, chunk, parent, held, self._frees) if is_there else None
        if others is None:
            return NotReserved.ONCE if once else NotReserved.NO_ROOM
        return own, others

    def _frees(self, chunk: Chunk) -> int:
        """How many frames its eviction frees. Nobody gets those that are set aside."""
        if not self._pool.ranges:
            return chunk.frames
        return sum(self._pool.usable(stored.runs) for stored in chunk.packed.objects())

    def commit(self, reservation: Reservation, digest: bytes = b"") -> None:
        """Makes a written object ready, and its chunk recently used."""
        chunk, runs = reservation.chunk, reservation.runs
        if chunk not in self._index:
            self.abort(reservation)
            return
        frames = self._end_reservation(reservation)
        stored = StoredObject(reservation.num_blocks, reservation.num_bytes, runs, digest)
        chunk.add(reservation.bit, stored, frames)
        self.used_frames += frames
        self.stored_bytes += reservation.num_bytes
        place, parent = None, reservation.parent
        if parent not in (b"", ROOT_KEY):
            place = self.order.place(chunk, self._index.get(chunk.namespace, parent))
        self._drop_ref(chunk, place)

    def abort(self, reservation: Reservation) -> None:
        """Frees the frames of an object that was not written. Nothing may still be writing to them."""
        frames = self._end_reservation(reservation)
        self._grow(reservation.chunk, -frames)
        self._pool.free(reservation.runs)
        self._drop_ref(reservation.chunk)

    def open_read(
        self, lease_id: int, key: bytes, rank: int, resume_tokens: int, computed_tokens: int, layout: Layout
    ) -> Read | None:
        """Opens what `rank` reads to resume at the leased resume point. It stays in place until close_read.

        Returns None unless the lease is alive, belongs to this namespace and resume point, ends with the
        chunk `key` and holds everything needed.
        """
        lease = self._leases.get(lease_id)
        if lease is None or lease.namespace != layout.namespace or lease.resume_tokens != resume_tokens:
            return None
        if lease.chunks and lease.chunks[-1].key != key:
            return None
        parts = plan_parts(lease, layout, rank, computed_tokens)
        if parts is None:
            return None
        read = Read(parts, lease)
        self._take_refs(lease.chunks)
        self._reads.add(read)
        return read

    def close_read(self, read: Read) -> None:
        """Ends a read: nothing reads from its frames any more. Closing twice does no harm."""
        if read in self._reads:
            self._reads.remove(read)
            self._drop_refs(read.lease.chunks)

    def coldest(self, frames: int) -> Iterator[Chunk]:
        """The chunks that are evicted next and have so many frames together. Prompts that will not come back
        are left out."""
        for chunk in self.order.others():
            if frames <= 0:
                return
            frames -= chunk.frames
            yield chunk

    def open_spill(self, chunk: Chunk, bit: int) -> StoredObject | None:
        """A ready object that will be written to a tier; None if there is none. Its chunk is not evicted, and
        its frames stay as they are, until close_spill."""
        stored = chunk.get(bit) if chunk in self._index else None
        if stored is not None:
            self._spilling[chunk] += 1
        return stored

    def close_spill(self, chunk: Chunk) -> None:
        """Ends a spill: it reads from the chunk's frames no more."""
        self._spilling -= Counter((chunk,))
        if chunk not in self._index and not chunk.ref_cnt:
            self._free_objects(chunk)

    def check_integrity(self) -> None:
        """Asserts the invariants of the cache; takes time linear in its size."""
        self._pool.check_integrity()
        leases = [*self._leases, *(read.lease for read in self._reads)]
        held = self._reservations, self.protected, self._spilling
        chunks = invariants.check_chunks(self._index, leases, *held)
        objects = [stored for chunk in chunks for stored in chunk.packed.objects()]
        writing = Counter[Chunk]()
        for each in self._reservations:
            writing[each.chunk] += count_frames(each.runs)
        invariants.check_order(self._index, self.order)
        self.order.tenant_policy.check(chunks, writing, self.order)
        reserved = [reservation.runs for reservation in self._reservations]
        assert self.stored_bytes == sum(stored.num_bytes for stored in objects)
        assert self.used_frames == sum(count_frames(stored.runs) for stored in objects)
        assert self.reserved_frames == sum(map(count_frames, reserved))
        invariants.check_frames(self._pool, [*reserved, *(stored.runs for stored in objects)])

    def _end(self, leases: list[Lease]) -> int:
        for lease in leases:
            self.release(lease.lease_id, lease.owner)
        return len(leases)

    def _end_reservation(self, reservation: Reservation) -> int:
        assert reservation in self._reservations, "a reservation ends once"
        self._reservations.remove(reservation)
        reservation.chunk.reserved &= ~(1 << reservation.bit)
        frames = count_frames(reservation.runs)
        self.reserved_frames -= frames
        return frames
