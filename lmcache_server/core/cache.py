"""The cache: every decision about L1 is made here.

It runs on one thread and takes the time as an argument. A frame is always free, reserved or ready; a chunk
can be evicted exactly while nothing pins it.
"""

from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass

from lmcache_client.contract.keys import ROOT_KEY
from lmcache_server.core import integrity
from lmcache_server.core.hits import resume_point
from lmcache_server.core.index import Chunk, Index
from lmcache_server.core.leases import Lease, LeaseTable
from lmcache_server.core.lru import EvictionOrder
from lmcache_server.core.packed import StoredObject
from lmcache_server.core.placement import Layout, bitmap
from lmcache_server.core.pool import FramePool, count_frames
from lmcache_server.core.reads import Read, plan_parts
from lmcache_server.core.reservation import NotReserved, Reservation
from lmcache_server.core.snapshot import Snapshot, rebuild, take

__all__ = ["Cache", "Hit", "Layout", "NotReserved", "Read", "Reservation"]

ONCE_SHARE = 20
"""When L1 is full, prompts that will not come back may take one in so many of its frames. With none, a batch
of such prompts could not share its beginning."""
MAX_EVICTED_AGES = 1024
"""How many ages at eviction are kept until the caller drains them. Further ones are not recorded."""


@dataclass(frozen=True)
class Hit:
    """The answer to a lookup. `resume_tokens` and `lease_id` are 0 when nothing can be restored. `held` has
    a bitmap per group, least significant bit first: the requested chunks that are ready on every holder."""

    resume_tokens: int
    lease_id: int
    held: tuple[bytes, ...]


class Cache:
    """The index, the leases and the frames of L1.

    `frame_bytes` is the size of a frame; `lease_s` is how long a lease lasts, in seconds.
    """

    def __init__(self, frame_bytes: int, total_frames: int = 0, lease_s: float = 120.0) -> None:
        if frame_bytes <= 0:
            raise ValueError(f"a frame has at least one byte, not {frame_bytes}")
        self.frame_bytes = frame_bytes
        self.evicted_chunks = 0
        self.evicted_bytes = 0
        """The payload of all evicted chunks."""
        self.evicted_ages_s: list[float] = []
        """For each recently evicted chunk that was not `once`, the seconds since its last use. The caller
        drains the list."""
        self.stored_bytes = 0
        """The payload of all ready objects."""
        self.used_frames = 0
        """The frames of ready objects."""
        self.reserved_frames = 0
        self._now_s = 0.0
        self._pool = FramePool(total_frames)
        self._index = Index()
        self._order = EvictionOrder()
        self._leases = LeaseTable(lease_s)
        self._reservations: set[Reservation] = set()
        self._reads: set[Read] = set()

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

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    @property
    def num_readers(self) -> int:
        return len(self._reads)

    def largest_free_run(self) -> int:
        return self._pool.largest_free_run()

    def namespaces(self) -> Mapping[bytes, Sized]:
        """The chunks of each namespace, as they change. There may be thousands of namespaces."""
        return self._index.namespaces()

    def grow(self, frames: int) -> None:
        """Adds `frames` free frames at the end of L1."""
        self._pool.grow(frames)

    def lookup(
        self,
        layout: Layout,
        keys: Sequence[bytes],
        computed_tokens: int,
        limit_tokens: int,
        owner: int,
        now_s: float,
    ) -> Hit:
        """Finds the largest resume point of a chain beyond `computed_tokens`, at most `limit_tokens`.

        If there is one, the chunks that it needs are leased to session number `owner`, and the chain up to it
        becomes recently used. An owner that holds too much loses its oldest leases.
        """
        self._advance(now_s)
        chain = list(map(self._index.chunks(layout.namespace).get, keys))
        present = layout.present([chunk.ready if chunk else 0 for chunk in chain])
        held = tuple(map(bitmap, present))
        resume_tokens = resume_point(layout.groups, layout.chunk_size, present, computed_tokens, limit_tokens)
        if not resume_tokens:
            return Hit(0, 0, held)
        end = resume_tokens // layout.chunk_size
        first = layout.first_leased_chunk(resume_tokens, computed_tokens)
        leased: tuple[Chunk, ...] = tuple(chain[first:end])  # type: ignore[arg-type]
        assert None not in leased, "a needed chunk is in the index"
        # The leased chunks are marked as used when the lease ends.
        self._use(chain[:first])
        self._pin(leased)
        while (old := self._leases.crowded_out(owner, len(leased))) is not None:
            self.release(old.lease_id, old.owner)
        lease = self._leases.grant(owner, layout.namespace, resume_tokens, first, leased, now_s)
        return Hit(resume_tokens, lease.lease_id, held)

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
        self._unpin_all(lease.chunks)
        return True

    def expire(self, now_s: float) -> int:
        """Ends the leases whose deadline has passed; returns how many."""
        self._advance(now_s)
        return self._end(self._leases.overdue(now_s))

    def drop_owner(self, owner: int) -> int:
        """Ends the leases of an owner; returns how many. Its reservations last as long as their copies."""
        return self._end(self._leases.of_owner(owner))

    def touch(self, namespace: bytes, keys: Sequence[bytes]) -> None:
        """Makes a chain of chunks recently used, the head most recently, by a prompt that may come back.
        Unknown keys are ignored."""
        chain = list(map(self._index.chunks(namespace).get, keys))
        for chunk in chain:
            if chunk is not None and chunk.once:
                self._order.keep(chunk)
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
    ) -> Reservation | NotReserved:
        """Takes frames for an object of `num_bytes` payload and evicts chunks if it must. For a replicated
        group the first rank to ask writes the one object; the others get PRESENT or BUSY.

        `parent` is the key of the chunk before it in its chain. A parent is never evicted for its child, so
        a chain longer than L1 loses its tail, not its head. Nothing is evicted unless that makes enough room.
        With `once`, the prompt will not come back. Chunks that only such prompts bring are evicted before all
        others.
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
        before = self._index.get(layout.namespace, parent)
        if before is not None and before.once and not once:
            self.touch(layout.namespace, (parent,))
        missing, line = frames - self._pool.free_frames, iter(self._order)
        if once:
            taken = self._order.once_frames + self.reserved_frames + frames
            line = self._order.once() if taken > self.total_frames // ONCE_SHARE else self._order.others()
        victims = self._order.victims(missing, line, chunk, before)
        if victims is None:
            return NotReserved.ONCE if once else NotReserved.NO_ROOM
        if chunk is None:
            chunk = Chunk(layout.namespace, key)
            chunk.once = once
            self._index.add(chunk)
        self._pin((chunk,))
        chunk.once &= once
        self._evict(victims)
        runs = self._pool.allocate(frames)
        assert runs is not None, "there was room"
        chunk.reserved |= 1 << bit
        self.reserved_frames += frames
        reservation = Reservation(chunk, bit, runs, num_blocks, num_bytes, parent)
        self._reservations.add(reservation)
        return reservation

    def commit(self, reservation: Reservation, checksums: bytes = b"") -> None:
        """Makes a written object ready, and its chunk recently used."""
        chunk, runs = reservation.chunk, reservation.runs
        if chunk not in self._index:
            self.abort(reservation)
            return
        frames = self._end_reservation(reservation)
        stored = StoredObject(reservation.num_blocks, reservation.num_bytes, runs, checksums)
        chunk.add(reservation.bit, stored, frames)
        self.used_frames += frames
        self.stored_bytes += reservation.num_bytes
        self._unpin(chunk, self._place(chunk, reservation.parent))

    def abort(self, reservation: Reservation) -> None:
        """Frees the frames of an object that was not written. Nothing may still be writing to them."""
        self._end_reservation(reservation)
        self._pool.free(reservation.runs)
        self._unpin(reservation.chunk)

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
        self._pin(lease.chunks)
        self._reads.add(read)
        return read

    def close_read(self, read: Read) -> None:
        """Ends a read: nothing reads from its frames any more. Closing twice does no harm."""
        if read in self._reads:
            self._reads.remove(read)
            self._unpin_all(read.lease.chunks)

    def clear(self, namespace: bytes | None = None) -> int:
        """Forgets every chunk (of `namespace`) as `forget` does; returns how many."""
        chunks = list(self._index if namespace is None else self._index.chunks(namespace).values())
        for chunk in chunks:
            self.forget(chunk)
        return len(chunks)

    def forget(self, chunk: Chunk) -> None:
        """Removes a chunk from the index. If it is pinned, its frames are freed when the last pin goes."""
        if chunk not in self._index:
            return
        self._index.remove(chunk)
        if not chunk.pins:
            self._order.remove((chunk,))
            self._free_objects(chunk)

    def snapshot(self, now_s: float) -> Snapshot:
        """Returns all ready chunks that nothing pins, for `restore`."""
        return take(self.total_frames, self._order, now_s)

    def restore(self, snapshot: Snapshot, now_s: float) -> None:
        """Fills an empty cache from `snapshot`. Raises SnapshotError, and stays empty, unless every part of
        the snapshot agrees with the rest."""
        contents = rebuild(snapshot, self.frame_bytes, now_s)
        assert not self.num_chunks, "only an empty cache is restored"
        self._advance(now_s)
        self._pool, self._index, self._order = contents.pool, contents.index, contents.order
        self.used_frames, self.stored_bytes = contents.order.frames, contents.stored_bytes

    def check_integrity(self) -> None:
        """Asserts the invariants of the cache; takes time linear in its size."""
        self._pool.check_integrity()
        reads = [read.lease for read in self._reads]
        objects = integrity.check_chunks(self._index, [*self._leases, *reads], self._reservations)
        integrity.check_order(self._index, self._order)
        reserved = [reservation.runs for reservation in self._reservations]
        assert self.stored_bytes == sum(stored.num_bytes for stored in objects)
        assert self.used_frames == sum(count_frames(stored.runs) for stored in objects)
        assert self.reserved_frames == sum(map(count_frames, reserved))
        assert self.free_frames + self.reserved_frames + self.used_frames == self.total_frames
        integrity.check_frames(self._pool, [*reserved, *(stored.runs for stored in objects)])

    def _advance(self, now_s: float) -> None:
        self._now_s = max(self._now_s, now_s)

    def _end(self, leases: list[Lease]) -> int:
        for lease in leases:
            self.release(lease.lease_id, lease.owner)
        return len(leases)

    def _use(self, chain: Iterable[Chunk | None]) -> None:
        used = [chunk for chunk in dict.fromkeys(chain) if chunk is not None]
        for chunk in used:
            chunk.last_used_s = self._now_s
        self._order.renew([chunk for chunk in used if not chunk.pins])

    def _pin(self, chain: Sequence[Chunk]) -> None:
        unused = []
        for chunk in chain:
            if not chunk.pins and chunk.newer is not None:
                unused.append(chunk)
            chunk.pins += 1
        self._order.remove(unused)

    def _unpin_all(self, chain: Sequence[Chunk]) -> None:
        """Unpins the tail first: then a suffix is evicted before its prefix, without which it is useless."""
        now_s, unused = self._now_s, []
        indexed = self._index.chunks(chain[0].namespace) if chain else {}
        for chunk in reversed(chain):
            if chunk.pins == 1 and chunk.ready and indexed.get(chunk.key) is chunk:
                chunk.pins = 0
                chunk.last_used_s = now_s
                unused.append(chunk)
            else:
                self._unpin(chunk)
        self._order.add_all(unused)

    def _place(self, chunk: Chunk, parent: bytes) -> Chunk | None:
        """Where a child of `parent` goes in the eviction order: just ahead of the returned chunk, or at the
        end of its part if None."""
        if parent in (b"", ROOT_KEY):
            return None
        before = self._index.get(chunk.namespace, parent)
        if before is None:
            # A chunk without its parent is seldom of use: it is evicted first.
            return self._order.front
        return None if chunk.once and not before.once else before

    def _unpin(self, chunk: Chunk, place: Chunk | None = None) -> None:
        chunk.pins -= 1
        chunk.last_used_s = self._now_s
        if chunk.pins:
            return
        if chunk not in self._index:
            self._free_objects(chunk)
        elif chunk.ready:
            self._order.add(chunk, place if place is not None and place in self._order else None)
        else:
            self._index.remove(chunk)

    def _evict(self, victims: Sequence[Chunk]) -> None:
        for chunk in victims:
            self._order.remove((chunk,))
            self._index.remove(chunk)
            self.evicted_chunks += 1
            self.evicted_bytes += self._free_objects(chunk)
            if not chunk.once and len(self.evicted_ages_s) < MAX_EVICTED_AGES:
                self.evicted_ages_s.append(self._now_s - chunk.last_used_s)

    def _free_objects(self, chunk: Chunk) -> int:
        """Frees the frames of all ready objects; returns their payload in bytes."""
        freed_bytes = 0
        for stored in chunk.packed.objects():
            self._pool.free(stored.runs)
            freed_bytes += stored.num_bytes
        self.used_frames -= chunk.frames
        self.stored_bytes -= freed_bytes
        chunk.clear()
        return freed_bytes

    def _end_reservation(self, reservation: Reservation) -> int:
        assert reservation in self._reservations, "a reservation ends once"
        self._reservations.remove(reservation)
        reservation.chunk.reserved &= ~(1 << reservation.bit)
        frames = count_frames(reservation.runs)
        self.reserved_frames -= frames
        return frames
