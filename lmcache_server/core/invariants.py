"""Asserts the invariants of the cache."""

from collections import Counter
from collections.abc import Collection, Iterable

from lmcache_server.core.eviction_order import EvictionOrder
from lmcache_server.core.index import Chunk, Index
from lmcache_server.core.leases import Lease
from lmcache_server.core.pool import FramePool, Runs, count_frames
from lmcache_server.core.reservation import Reservation


def check_chunks(
    index: Index,
    leases: Iterable[Lease],
    reservations: Collection[Reservation],
    protected: Iterable[Chunk],
    spilling: Iterable[Chunk],
) -> set[Chunk]:
    """Asserts that every chunk agrees with its objects and its references; returns the chunks. `leases`
    has each lease once for itself and once for each read that holds it; `protected` has what an option
    keeps from eviction, and `spilling` what tiers read from."""
    refs = Counter(chunk for lease in leases for chunk in lease.chunks)
    refs.update(reservation.chunk for reservation in reservations)
    refs.update(iter(protected))
    indexed = list(index)
    chunks = {*indexed, *refs, *spilling}
    for chunk in chunks:
        assert chunk.ref_cnt == refs[chunk], "references are leases, reads, reservations and protection"
        assert chunk.ready.bit_count() == len(chunk.packed.objects())
        assert chunk.frames == sum(count_frames(stored.runs) for stored in chunk.packed.objects())
        assert chunk.ready or chunk.reserved or chunk.ref_cnt, "an empty chunk is forgotten"
    assert all(index.get(chunk.namespace, chunk.key) is chunk for chunk in indexed)
    for namespace in index.namespaces:
        ages = [chunk.stored_s for chunk in index.chunks(namespace).values()]
        assert ages == sorted(ages), "the oldest is the first to be too old"
    reserved = Counter((reservation.chunk, reservation.bit) for reservation in reservations)
    assert all(chunk.reserved >> bit & 1 for chunk, bit in reserved)
    assert len(reserved) == sum(chunk.reserved.bit_count() for chunk in chunks), "one object, one writer"
    return chunks


def check_order(index: Index, order: EvictionOrder) -> None:
    """Asserts that the eviction order has exactly the chunks that nothing refers to, once each."""
    members = list(order)
    assert len(members) == len(set(members)), "a chunk is in the eviction order once"
    assert set(members) == {chunk for chunk in index if not chunk.ref_cnt}
    assert order.frames == sum(chunk.frames for chunk in members)
    assert order.once_frames == sum(chunk.frames for chunk in members if chunk.once)
    assert not any(chunk.once for chunk in order.others()), "they lie ahead of the others"


def check_frames(pool: FramePool, taken: Iterable[Runs]) -> None:
    """Asserts that every frame is free, set aside, or has one owner."""
    end = 0
    for start, count in sorted((*pool.free_runs(), *pool.aside, *(run for runs in taken for run in runs))):
        assert start == end, "every frame is free or has one owner"
        end = start + count
    assert end == pool.total_frames
