"""What test_cache_model.py does not show of the cache. That one drives all its decisions in any order."""

import dataclasses
import itertools
import sys
import tracemalloc

import pytest

from lmcache_client.contract.geometry import FULL, GroupSpec
from lmcache_client.contract.keys import ROOT_KEY
from lmcache_server.core import chunks as chunks_module
from lmcache_server.core import leases
from lmcache_server.core.cache import ONCE_SHARE, Cache, Layout, NotReserved, Reservation
from lmcache_server.core.index import Chunk
from lmcache_server.core.leases import LEASE_COST, MAX_COST, MAX_SESSION_COST
from lmcache_server.core.packed import StoredObject

FRAME_BYTES = 100
CHUNK_SIZE = 16
SESSION, OTHER = 7, 8


def layout(groups=1, shards=1):
    group = GroupSpec(FULL, CHUNK_SIZE, 0, "", ())
    return Layout(b"ns", CHUNK_SIZE, (group,) * groups, (tuple(range(shards)),) * groups)


PLAIN = layout()


def chain(count, name=0):
    return [bytes([name, index]) * 16 for index in range(count)]


def reserve(cache, key, where=PLAIN, of=0, shard=0, frames=1):
    return cache.reserve(where, key, of, shard, 1, frames * FRAME_BYTES)


def store(cache, keys):
    for key in keys:
        cache.commit(reserve(cache, key))
    cache.check_integrity()


def lookup(cache, keys, session=SESSION, limit=1 << 20, now_s=0.0):
    return cache.lookup(PLAIN, keys, 0, limit, session, now_s)


def stored_chunks(cache, keys):
    """Which of these chunks are present, as text."""
    held = lookup(cache, keys, limit=0).held[0]
    return "".join(str(held[index // 8] >> index % 8 & 1) for index in range(len(keys)))


def test_an_object_has_one_writer_who_ends_once():
    cache, (key, other) = Cache(FRAME_BYTES, 1), chain(2)
    cache.abort(reserve(cache, key))
    assert (cache.free_frames, cache.num_chunks) == (1, 0)
    reservation = reserve(cache, key)
    assert reserve(cache, key) is NotReserved.BUSY
    cache.commit(reservation)
    assert reserve(cache, key) is NotReserved.PRESENT
    for end in (cache.abort, cache.commit):
        with pytest.raises(AssertionError):
            end(reservation)
    with pytest.raises(ValueError, match="cannot be stored"):
        reserve(cache, other, frames=0)
    with pytest.raises(ValueError, match="at least one byte"):
        Cache(0)


def test_a_read_is_refused_unless_it_is_what_was_promised():
    cache = Cache(FRAME_BYTES, 100)
    store(cache, chain(3))
    hit = lookup(cache, chain(3))
    lease, key, resume = hit.lease_id, chain(3)[-1], hit.resume_tokens
    assert cache.open_read(lease, key, 0, resume, 0, PLAIN) is not None
    for lie in (
        (lease + 1, key, 0, resume, 0, PLAIN),
        (lease, chain(3)[0], 0, resume, 0, PLAIN),
        (lease, key, 0, resume, 0, dataclasses.replace(PLAIN, namespace=b"other")),
        (lease, key, 0, resume - 16, 0, PLAIN),
        (lease, key, 0, resume + 16, 0, PLAIN),
    ):
        assert cache.open_read(*lie) is None, lie
    assert cache.num_readers == 1
    (other,) = chain(1, name=1)
    cache.commit(cache.reserve(PLAIN, other, 0, 0, 2, FRAME_BYTES))
    lease = lookup(cache, [other]).lease_id
    assert cache.open_read(lease, other, 0, CHUNK_SIZE, 0, PLAIN) is None, "an object of another size"
    cache.check_integrity()


def test_what_is_being_written_to_a_tier_outlives_eviction_and_clear():
    cache = Cache(FRAME_BYTES, 2)
    for key in chain(2):
        store(cache, [key])
    oldest = cache.chunk(PLAIN.namespace, chain(1)[0])
    assert cache.open_spill(oldest, 0) is not None
    store(cache, chain(1, name=1))
    assert [stored_chunks(cache, [key]) for key in chain(2)] == ["1", "0"], "the other one made room"
    cache.clear()
    assert (cache.num_chunks, cache.used_frames, cache.free_frames) == (0, 1, 1)
    cache.close_spill(oldest)
    assert (cache.used_frames, cache.free_frames) == (0, 2)
    cache.check_integrity()


def test_chunks_in_frames_that_are_set_aside_make_no_room():
    cache, (new, other) = Cache(FRAME_BYTES, 4), chain(2, name=1)
    store(cache, chain(3))
    cache.set_aside(((0, 2),))
    assert reserve(cache, other, frames=3) is NotReserved.NO_ROOM
    assert stored_chunks(cache, chain(3)) == "111", "nothing is evicted in vain"
    cache.commit(reserve(cache, new, frames=2))
    assert stored_chunks(cache, chain(3)) == "000", "the last made room, the others were older"
    cache.check_integrity()
    cache.set_aside(())
    assert cache.free_frames == 2


def test_a_store_that_ends_after_clear_is_dropped():
    cache = Cache(FRAME_BYTES, 3)
    (key,) = chain(1)
    before = reserve(cache, key)
    assert cache.clear() == 1
    after = reserve(cache, key)
    cache.commit(before)
    assert (cache.used_frames, cache.reserved_frames) == (0, 1)
    cache.commit(after)
    assert lookup(cache, [key]).resume_tokens == CHUNK_SIZE
    cache.check_integrity()
    # Its frames are free then, even while the chunk is leased.
    late = reserve(cache, key, layout(groups=2), of=1)
    cache.clear()
    cache.commit(late)
    assert (cache.used_frames, cache.free_frames) == (1, 2)
    cache.drop_owner(SESSION)
    assert cache.free_frames == 3


def test_ages_at_eviction_are_kept_but_bounded(monkeypatch):
    monkeypatch.setattr(chunks_module, "MAX_EVICTED_AGES", 2)
    cache = Cache(FRAME_BYTES, 3)
    store(cache, chain(3))
    cache.expire(30.0)
    cache.touch(b"ns", chain(1))
    cache.expire(40.0)
    store(cache, chain(3, name=1))
    assert cache.evicted_ages_s == [40.0, 40.0]


def test_a_repeated_key_in_a_lookup_is_harmless():
    cache = Cache(FRAME_BYTES, 10)
    store(cache, chain(1))
    hit = lookup(cache, chain(1) * 3)
    assert hit.resume_tokens == 3 * CHUNK_SIZE
    cache.check_integrity()
    cache.release(hit.lease_id, SESSION)
    cache.check_integrity()


def test_objects_are_packed_without_loss():
    objects = {
        bit: StoredObject(3 + bit, 1 << 40, ((0, 1), (1 << 31, (1 << 32) - 1)), bytes(4 * bit))
        for bit in (5, 0, 40)
    }
    chunk = Chunk(b"n", b"k")
    for bit, stored in objects.items():
        chunk.add(bit, stored, 1)
    assert {bit: chunk.get(bit) for bit in objects} == objects
    assert chunk.packed.objects() == [objects[0], objects[5], objects[40]]
    assert chunk.get(1) is None


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="measures CPython's objects")
@pytest.mark.parametrize(("groups", "shards", "most_bytes"), [(1, 1, 350), (4, 2, 450)])
def test_a_chunk_costs_little_memory(groups, shards, most_bytes):
    where, count = layout(groups, shards), 1000
    cache = Cache(FRAME_BYTES, count * groups * shards)
    keys = [index.to_bytes(32, "big") for index in range(count)]
    tracemalloc.start()
    for key in keys:
        for of in range(groups):
            for shard in range(shards):
                cache.commit(reserve(cache, key, where, of, shard))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used / count < most_bytes


# -- prompts that will not come back ---------------------------------------------------------------------


def store_once(cache, keys):
    for key, parent in zip(keys, [ROOT_KEY, *keys], strict=False):
        reservation = cache.reserve(PLAIN, key, 0, 0, 1, FRAME_BYTES, parent, once=True)
        if reservation is not NotReserved.ONCE:
            cache.commit(reservation)


def test_a_prompt_that_comes_back_after_all_is_kept_like_any_other():
    cache = Cache(FRAME_BYTES, 20)
    store_once(cache, chain(4, name=1))
    cache.touch(b"ns", chain(4, name=1))
    cache.check_integrity()
    store_once(cache, chain(16, name=2))
    store(cache, chain(16, name=3))
    assert stored_chunks(cache, chain(4, name=1)) == "1111"
    assert cache.evicted_ages_s == [], "the age of what was not to be kept says nothing about the size of L1"


def test_what_is_written_counts_in_the_share_of_what_will_not_come_back():
    cache = Cache(FRAME_BYTES, 100)
    store(cache, chain(100))
    results = [cache.reserve(PLAIN, key, 0, 0, 1, FRAME_BYTES, once=True) for key in chain(50, name=2)]
    assert sum(isinstance(each, Reservation) for each in results) == 100 // ONCE_SHARE
    assert results[-1] is NotReserved.ONCE


# -- leases are bounded ------------------------------------------------------------------------------------


def filled(chunks):
    """A cache with one chain of chunks."""
    cache = Cache(FRAME_BYTES, chunks)
    keys = [number.to_bytes(32, "big") for number in range(chunks)]
    store(cache, keys)
    return cache, keys


def leased(cache, keys, session):
    return lookup(cache, keys, session).lease_id


def lives(cache, lease_id):
    return cache._leases.get(lease_id) is not None


def test_the_leases_of_a_session_are_bounded_by_their_number_and_by_their_chunks():
    cache, keys = filled(1)
    modest = leased(cache, keys, OTHER)
    granted = [leased(cache, keys, SESSION) for _ in range(10_000)]
    assert cache.num_leases == 1 + MAX_SESSION_COST // (LEASE_COST + 1)
    assert lives(cache, modest)
    assert lives(cache, granted[-1]), "the newest promise holds"
    assert not lives(cache, granted[0])
    cache.check_integrity()
    assert cache.drop_owner(SESSION) == cache.num_leases + 4079
    cache.drop_owner(OTHER)
    assert cache.num_leases == 0
    cache.check_integrity()
    cache, keys = filled(1 << 14)
    for _ in range(200):
        leased(cache, keys, SESSION)
    assert cache.num_leases == MAX_SESSION_COST // (LEASE_COST + len(keys))
    cache.check_integrity()


def test_many_sessions_are_bounded_together_and_the_largest_gives_way(monkeypatch):
    monkeypatch.setattr(leases, "MAX_COST", 4 * (LEASE_COST + 8))
    cache, keys = filled(8)
    modest = leased(cache, keys, OTHER)
    first = leased(cache, keys, SESSION)
    second = leased(cache, keys, SESSION)
    strangers = [leased(cache, keys, session) for session in range(20, 22)]
    assert not lives(cache, first)
    assert all(lives(cache, each) for each in (second, modest, *strangers))
    cache.check_integrity()


def test_a_lease_that_made_room_loads_nothing(monkeypatch):
    monkeypatch.setattr(leases, "MAX_SESSION_COST", 2 * (LEASE_COST + 1))
    cache, keys = filled(1)
    granted = [leased(cache, keys, SESSION) for _ in range(3)]
    reads = [cache.open_read(each, keys[0], 0, CHUNK_SIZE, 0, PLAIN) for each in granted]
    assert [read is not None for read in reads] == [False, True, True]


def test_only_its_session_can_end_a_lease():
    cache, keys = filled(1)
    lease = leased(cache, keys, OTHER)
    assert not cache.release(lease, SESSION)
    assert lives(cache, lease)
    assert cache.release(lease, OTHER)
    assert not cache.release(lease, OTHER), "once"


def test_the_bounds_leave_room():
    longest = LEASE_COST + (1 << 16)
    assert MAX_SESSION_COST // longest >= 15
    assert MAX_SESSION_COST // (LEASE_COST + 128_000 // 256) >= 1024, "prompts of 128,000 tokens"
    assert MAX_COST >= 16 * MAX_SESSION_COST


def test_releasing_in_any_order_keeps_count():
    cache, keys = filled(4)
    for order in itertools.permutations(range(4)):
        granted = [leased(cache, keys[: 1 + number], SESSION) for number in range(4)]
        for number in order:
            assert cache.release(granted[number], SESSION)
    assert cache._leases._cost == 0
    assert not cache._leases._by_owner
