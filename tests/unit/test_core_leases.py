"""Leases are bounded: a client that looks up and never releases loses its oldest, and only its own."""

import itertools

import pytest

from lmcache_client.contract.geometry import FULL, GroupSpec
from lmcache_server.core import leases
from lmcache_server.core.cache import Cache, Layout
from lmcache_server.core.leases import LEASE_COST, MAX_COST, MAX_SESSION_COST

CHUNK_SIZE = 16
PLAIN = Layout(b"ns", CHUNK_SIZE, (GroupSpec(FULL, 16, 0, "", ()),), ((0,),))
GREEDY, MODEST = 7, 8


def filled(chunks: int) -> tuple[Cache, list[bytes]]:
    """A cache with one chain of chunks."""
    cache = Cache(100, chunks)
    keys = [number.to_bytes(32, "big") for number in range(chunks)]
    for key in keys:
        cache.commit(cache.reserve(PLAIN, key, 0, 0, 1, 100))
    return cache, keys


def lookup(cache: Cache, keys: list[bytes], session: int) -> int:
    return cache.lookup(PLAIN, keys, 0, len(keys) * CHUNK_SIZE, session, 0.0).lease_id


def lives(cache: Cache, lease_id: int) -> bool:
    return cache._leases.get(lease_id) is not None


def test_the_leases_of_a_session_are_bounded_by_their_number_and_by_their_chunks() -> None:
    cache, keys = filled(1)
    modest = lookup(cache, keys, MODEST)
    granted = [lookup(cache, keys, GREEDY) for _ in range(10_000)]
    assert cache.num_leases == 1 + MAX_SESSION_COST // (LEASE_COST + 1)
    assert lives(cache, modest)
    assert lives(cache, granted[-1]), "the newest promise holds"
    assert not lives(cache, granted[0])
    cache.check_integrity()
    assert cache.drop_owner(GREEDY) == cache.num_leases + 4079
    cache.drop_owner(MODEST)
    assert cache.num_leases == 0
    cache.check_integrity()
    cache, keys = filled(1 << 14)
    for _ in range(200):
        lookup(cache, keys, GREEDY)
    assert cache.num_leases == MAX_SESSION_COST // (LEASE_COST + len(keys))
    cache.check_integrity()


def test_many_sessions_are_bounded_together_and_the_largest_gives_way(monkeypatch) -> None:
    monkeypatch.setattr(leases, "MAX_COST", 4 * (LEASE_COST + 8))
    cache, keys = filled(8)
    modest = lookup(cache, keys, MODEST)
    first = lookup(cache, keys, GREEDY)
    second = lookup(cache, keys, GREEDY)
    strangers = [lookup(cache, keys, session) for session in range(20, 22)]
    assert not lives(cache, first)
    assert all(lives(cache, each) for each in (second, modest, *strangers))
    cache.check_integrity()


def test_a_lease_that_made_room_loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "MAX_SESSION_COST", 2 * (LEASE_COST + 1))
    cache, keys = filled(1)
    granted = [lookup(cache, keys, GREEDY) for _ in range(3)]
    reads = [cache.open_read(each, keys[0], 0, CHUNK_SIZE, 0, PLAIN) for each in granted]
    assert [read is not None for read in reads] == [False, True, True]


def test_only_its_session_can_end_a_lease() -> None:
    cache, keys = filled(1)
    lease = lookup(cache, keys, MODEST)
    assert not cache.release(lease, GREEDY)
    assert lives(cache, lease)
    assert cache.release(lease, MODEST)
    assert not cache.release(lease, MODEST), "once"


def test_the_bounds_leave_room() -> None:
    longest = LEASE_COST + (1 << 16)
    assert MAX_SESSION_COST // longest >= 15
    assert MAX_SESSION_COST // (LEASE_COST + 128_000 // 256) >= 1024, "prompts of 128,000 tokens"
    assert MAX_COST >= 16 * MAX_SESSION_COST


def test_releasing_in_any_order_keeps_count() -> None:
    cache, keys = filled(4)
    for order in itertools.permutations(range(4)):
        granted = [lookup(cache, keys[: 1 + number], GREEDY) for number in range(4)]
        for number in order:
            assert cache.release(granted[number], GREEDY)
    assert cache._leases._cost == 0
    assert not cache._leases._by_owner
