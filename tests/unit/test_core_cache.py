"""What test_cache_model.py does not show of the cache, which drives all its decisions in any order, and some
examples to read."""

import dataclasses
import sys
import tracemalloc

import pytest

from lmcache_client.contract.geometry import FULL, SLIDING_WINDOW, GroupSpec
from lmcache_client.contract.keys import ROOT_KEY
from lmcache_server.core import chunks as chunks_module
from lmcache_server.core.cache import ONCE_SHARE, Cache, Layout, NotReserved, Reservation
from lmcache_server.core.index import Chunk
from lmcache_server.core.packed import StoredObject

FRAME_BYTES = 100
CHUNK_SIZE = 16
SESSION, STRANGER = 7, 8


def group(kind=FULL, block_size=16, window=0):
    return GroupSpec(kind, block_size, window, "", ())


def layout(*groups, holders=None, namespace=b"ns"):
    groups = groups or (group(),)
    return Layout(namespace, CHUNK_SIZE, groups, holders or ((0,),) * len(groups))


PLAIN = layout()


def chain(count, name=0):
    return [bytes([name, index]) * 16 for index in range(count)]


def reserve(cache, key, index=0, where=PLAIN, of=0, shard=0, frames=1):
    blocks = len(where.groups[of].stored_blocks(index, where.chunk_size))
    return cache.reserve(where, key, of, shard, blocks, frames * FRAME_BYTES)


def store(cache, keys, where=PLAIN, frames=1):
    """Stores all objects of a chain."""
    for index, key in enumerate(keys):
        for of, ranks in enumerate(where.holders):
            for shard in ranks:
                if where.groups[of].stored_blocks(index, where.chunk_size):
                    reservation = reserve(cache, key, index, where, of, shard, frames)
                    assert isinstance(reservation, Reservation)
                    cache.commit(reservation)
    cache.check_integrity()


def lookup(cache, keys, where=PLAIN, computed=0, limit=1 << 20, now_s=0.0, once=False):
    return cache.lookup(where, keys, computed, limit, SESSION, now_s, once)


def open_read(cache, hit, where=PLAIN, shard=0, computed=0):
    lease = cache._leases.get(hit.lease_id)
    key = lease.chunks[-1].key if lease else b""
    return cache.open_read(hit.lease_id, key, shard, hit.resume_tokens, computed, where)


def stored_chunks(cache, keys, where=PLAIN):
    """Which of these chunks are present, as text."""
    held = lookup(cache, keys, where, limit=0).held[0]
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


@pytest.mark.parametrize("where", [PLAIN, layout(group(SLIDING_WINDOW, 16, 17))], ids=["full", "window"])
def test_a_lookup_makes_the_chain_recently_used_even_what_a_window_does_not_need(where):
    cache = Cache(FRAME_BYTES, 8)
    old, new = chain(4), chain(4, name=1)
    store(cache, old, where)
    store(cache, new, where)
    cache.release(lookup(cache, old, where).lease_id, SESSION)
    store(cache, chain(4, name=2), where)
    assert stored_chunks(cache, new, where) == "0000"
    assert stored_chunks(cache, old, where) == "1111"


def test_leased_chunks_are_never_evicted():
    cache = Cache(FRAME_BYTES, 4)
    keys, others = chain(4), chain(1, name=1)
    store(cache, keys)
    hit = lookup(cache, keys, limit=3 * CHUNK_SIZE)
    assert hit.resume_tokens == 3 * CHUNK_SIZE
    assert reserve(cache, others[0], frames=2) is NotReserved.NO_ROOM
    assert cache.evicted_chunks == 0
    store(cache, others)
    assert stored_chunks(cache, keys) == "1110"
    assert cache.release(hit.lease_id, SESSION)
    assert isinstance(reserve(cache, chain(1, name=2)[0], frames=4), Reservation)
    assert (cache.evicted_chunks, cache.evicted_bytes) == (5, 5 * FRAME_BYTES)


def test_a_burst_larger_than_the_pool_loses_no_store_that_fits():
    cache = Cache(FRAME_BYTES, 10)
    for burst in range(50):
        store(cache, chain(7, name=burst), frames=1 + burst % 10)
    assert cache.evicted_chunks == 350 - cache.num_chunks


def test_a_lease_ends_at_its_deadline():
    cache = Cache(FRAME_BYTES, 10, lease_s=5.0)
    store(cache, chain(1))
    early, late = lookup(cache, chain(1), now_s=10.0), lookup(cache, chain(1), now_s=12.0)
    assert cache.expire(14.9) == 0
    assert cache.expire(15.0) == 1
    assert open_read(cache, early) is None
    assert open_read(cache, late) is not None
    assert cache.expire(100.0) == 1
    assert cache.num_leases == 0


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
    assert open_read(cache, lookup(cache, [other])) is None, "an object of another size"
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
    late = reserve(cache, key, 0, layout(group(), group()), of=1)
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
    where = layout(*[group()] * groups, holders=(tuple(range(shards)),) * groups)
    count = 1000
    cache = Cache(FRAME_BYTES, count * groups * shards)
    keys = [index.to_bytes(32, "big") for index in range(count)]
    tracemalloc.start()
    for key in keys:
        for of in range(groups):
            for shard in range(shards):
                cache.commit(reserve(cache, key, 0, where, of, shard))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used / count < most_bytes


# -- prompts that will not come back ---------------------------------------------------------------------


def store_once(cache, keys, frames=1):
    """Offers a chain that will not come back; returns how much of it was stored."""
    for index, (key, parent) in enumerate(zip(keys, [ROOT_KEY, *keys], strict=False)):
        bits = cache.reserve(PLAIN, key, 0, 0, 1, frames * FRAME_BYTES, parent, once=True)
        if bits is NotReserved.ONCE:
            return index
        cache.commit(bits)
    cache.check_integrity()
    return len(keys)


def test_what_is_written_counts_in_the_share_of_what_will_not_come_back():
    cache = Cache(FRAME_BYTES, 100)
    store(cache, [bytes([1, index]) * 16 for index in range(100)])
    results = [cache.reserve(PLAIN, key, 0, 0, 1, FRAME_BYTES, once=True) for key in chain(50, name=2)]
    assert sum(isinstance(each, Reservation) for each in results) == 100 // ONCE_SHARE
    assert results[-1] is NotReserved.ONCE


def test_a_beginning_that_such_prompts_share_outlives_their_ends():
    cache = Cache(FRAME_BYTES, 100)
    store(cache, [bytes([1, index]) * 16 for index in range(100)])
    beginning = chain(3, name=2)
    for name in range(10, 20):
        hit = lookup(cache, [*beginning, *chain(2, name)], once=True)
        assert hit.resume_tokens == (3 * CHUNK_SIZE if name > 10 else 0)
        cache.release(hit.lease_id, SESSION)
        assert store_once(cache, [*beginning, *chain(2, name)][hit.resume_tokens // CHUNK_SIZE :])


def test_a_prompt_that_comes_back_after_all_is_kept_like_any_other():
    cache = Cache(FRAME_BYTES, 20)
    store_once(cache, chain(4, name=1))
    cache.touch(b"ns", chain(4, name=1))
    cache.check_integrity()
    store_once(cache, chain(16, name=2))
    store(cache, chain(16, name=3))
    assert stored_chunks(cache, chain(4, name=1)) == "1111"
    assert cache.evicted_ages_s == [], "the age of what was not to be kept says nothing about the size of L1"


@pytest.mark.parametrize("once", [False, True])
def test_an_answer_is_kept_from_the_moment_a_prompt_that_may_come_back_reads_it(once):
    cache = Cache(FRAME_BYTES, 20)
    prompt, answer = chain(6, name=1)[:2], chain(6, name=1)[2:]
    store(cache, chain(4, name=3))
    store(cache, prompt)
    for key, parent in zip(answer, [prompt[-1], *answer], strict=False):
        cache.commit(cache.reserve(PLAIN, key, 0, 0, 1, FRAME_BYTES, parent, once=True))
    hit = lookup(cache, [*prompt, *answer], once=once)
    assert hit.resume_tokens == 6 * CHUNK_SIZE
    cache.release(hit.lease_id, SESSION)
    cache.check_integrity()
    store(cache, chain(14, name=2))
    assert stored_chunks(cache, [*prompt, *answer]) == ("110000" if once else "111111")


def test_a_child_that_may_come_back_keeps_its_parent():
    cache = Cache(FRAME_BYTES, 20)
    (parent, child) = chain(2, name=1)
    store_once(cache, [parent])
    cache.commit(cache.reserve(PLAIN, child, 0, 0, 1, FRAME_BYTES, parent))
    store_once(cache, chain(18, name=2))
    store(cache, chain(18, name=3))
    assert stored_chunks(cache, [parent, child]) == "11"
