"""Why a lookup found no more than it did, for each reason and for several at once."""

import random

import pytest

from lmcache_client.contract.geometry import FULL, RECURRENT, SLIDING_WINDOW, GroupSpec
from lmcache_client.contract.hits import group_ends, resume_point
from lmcache_client.contract.messages import Lookup
from lmcache_server.config import Config
from lmcache_server.core.cache import Cache, Gone, Layout, Reservation
from lmcache_server.core.layout import bitmap
from lmcache_server.options.miss_reasons import reasons
from lmcache_server.options.miss_reasons.partial import PATIENCE_S
from lmcache_server.options.miss_reasons.reasons import (
    EVICTED,
    NO_STATE,
    NOT_STORED,
    PARTIAL,
    TIER_LATE,
    ending_groups,
)
from lmcache_server.options.miss_reasons.server import Server
from lmcache_server.service.option import Base
from lmcache_server.telemetry.metrics import Metrics

CHUNK = 16
SESSION = 1
ATTENTION, STATE = (GroupSpec(kind, CHUNK, 0, "", ()) for kind in (FULL, RECURRENT))
PLAIN = Layout(b"n" * 32, CHUNK, (ATTENTION,), ((0,),))
HYBRID = Layout(b"h" * 32, CHUNK, (ATTENTION, STATE), ((0,), (0,)))
STATES = Layout(b"s" * 32, CHUNK, (STATE,), ((0,),))
TWO_RANKS = Layout(b"t" * 32, CHUNK, (ATTENTION,), ((0, 1),))


class WatchedCache(Cache):
    """A cache beside the option, which remembers what was evicted."""

    def __init__(self, frames):
        super().__init__(1, frames)
        base = Base(Config(), self, None, None, Metrics(), None, None, [])
        self.evicted = Server(base)._evicted


def chain(count, seed=0):
    generator = random.Random(seed)
    return tuple(generator.randbytes(32) for _ in range(count))


def store(cache, layout, keys, group=0, rank=0, first=0):
    for index in range(first, len(keys)):
        parent = keys[index - 1] if index else b""
        reservation = cache.reserve(layout, keys[index], group, rank, 1, 1, parent)
        assert isinstance(reservation, Reservation)
        cache.commit(reservation)


def missed(cache, layout, keys, computed=0):
    """The reasons of a lookup of all of `keys`, in tokens."""
    limit = len(keys) * CHUNK
    hit = cache.lookup(layout, keys, computed, limit, SESSION, 0.0)
    cache.drop_owner(SESSION)
    start = max(hit.resume_tokens, computed)
    found = reasons.missed_tokens(
        layout, keys, hit.held, start, limit, cache.evicted, lambda key: cache.is_partial(layout, key)
    )
    assert set(found) <= set(reasons.REASONS)
    assert sum(found.values()) == limit - start
    return found


@pytest.mark.parametrize("layout", [PLAIN, STATES], ids=["attention", "states alone"])
def test_what_nobody_stored(layout):
    cache, keys = WatchedCache(100), chain(8)
    assert missed(cache, layout, keys) == {NOT_STORED: 8 * CHUNK}
    for computed in (8, 24, 40):
        assert missed(cache, layout, keys, computed) == {NOT_STORED: 8 * CHUNK - computed}, "the engine's own"
    store(cache, layout, keys[:5])
    assert missed(cache, layout, keys) == {NOT_STORED: 3 * CHUNK}
    assert missed(cache, layout, keys[:5]) == {}


def test_what_was_evicted_is_told_from_what_never_was_there():
    cache, keys, other = WatchedCache(8), chain(6), chain(6, seed=1)
    store(cache, PLAIN, keys)
    store(cache, PLAIN, other)
    assert missed(cache, PLAIN, keys + chain(2, seed=2)) == {EVICTED: 4 * CHUNK, NOT_STORED: 2 * CHUNK}
    assert missed(cache, PLAIN, keys, computed=3 * CHUNK) == {EVICTED: 3 * CHUNK}, "the engine has the others"
    assert missed(cache, HYBRID, keys) == {NOT_STORED: 6 * CHUNK}, "in another namespace"
    cache.clear()
    assert missed(cache, PLAIN, other[:2]) == {NOT_STORED: 2 * CHUNK}, "forgotten, not evicted"
    store(cache, PLAIN, keys)
    assert missed(cache, PLAIN, keys) == {}, "stored again"
    store(cache, PLAIN, new := chain(1, seed=3))
    cache._evict([cache.chunk(PLAIN.namespace, new[0])], Gone.QUOTA)
    assert missed(cache, PLAIN, new) == {EVICTED: CHUNK}, "because of a quota"


def test_full_attention_without_a_state_to_resume_from():
    cache, keys = WatchedCache(100), chain(8)
    store(cache, HYBRID, keys[:6])
    assert missed(cache, HYBRID, keys) == {NO_STATE: 6 * CHUNK, NOT_STORED: 2 * CHUNK}
    store(cache, HYBRID, keys[:4], group=1, first=3)
    assert missed(cache, HYBRID, keys) == {NO_STATE: 2 * CHUNK, NOT_STORED: 2 * CHUNK}


def test_what_tiers_have_and_did_not_bring():
    cache, keys, evicted = WatchedCache(100), chain(8), reasons.Evicted()
    store(cache, PLAIN, keys[:2])
    _, hit = cache.find(PLAIN, keys, 0, 8 * CHUNK)
    start = hit.resume_tokens
    for in_tiers, late in ((0, 0), (start, 0), (5 * CHUNK, 3 * CHUNK), (9 * CHUNK, 6 * CHUNK)):
        found = reasons.missed_tokens(
            PLAIN, keys, hit.held, start, 8 * CHUNK, evicted, lambda _: False, in_tiers=in_tiers
        )
        expected = {TIER_LATE: late, NOT_STORED: 6 * CHUNK - late}
        assert found == {reason: tokens for reason, tokens in expected.items() if tokens}


def test_ranks_that_disagree():
    cache, keys = WatchedCache(100), chain(6)
    store(cache, TWO_RANKS, keys)
    store(cache, TWO_RANKS, keys[:2], rank=1)
    assert missed(cache, TWO_RANKS, keys) == {PARTIAL: 4 * CHUNK}
    reservation = cache.reserve(TWO_RANKS, keys[2], 0, 1, 1, 1, keys[1])
    assert missed(cache, TWO_RANKS, keys) == {NOT_STORED: 4 * CHUNK}, "the other rank is storing it now"
    assert isinstance(reservation, Reservation)
    cache.abort(reservation)


def test_the_memory_of_evicted_chunks_is_bounded_and_takes_none_for_another():
    evicted, keys = reasons.Evicted(slots=1 << 10), chain(5000)
    for key in keys:
        evicted.add(b"n" * 32, key)
    assert all(evicted.has(b"n" * 32, key) for key in keys[-10:])
    remembered = sum(evicted.has(b"n" * 32, key) for key in keys)
    assert 1 << 9 < remembered <= 1 << 10
    assert not any(evicted.has(b"m" * 32, key) for key in keys)
    assert not any(evicted.has(b"n" * 32, key) for key in chain(5000, seed=1))


def ending(cache, layout, keys):
    chain, hit = cache.find(layout, keys, 0, len(keys) * CHUNK)
    ready = [chunk.ready if chunk else 0 for chunk in chain]
    return hit.resume_tokens, list(ending_groups(layout, hit.held, ready, len(keys) * CHUNK))


def test_the_groups_that_end_a_hit_and_the_ranks_that_it_waits_for():
    cache, keys = WatchedCache(100), chain(4)
    assert ending(cache, HYBRID, keys) == (0, [(0, 0, ()), (1, 0, ())])
    store(cache, HYBRID, keys)
    store(cache, HYBRID, keys[:3], group=1, first=2)
    assert ending(cache, HYBRID, keys) == (3 * CHUNK, [(1, 3 * CHUNK, ())]), (
        "the state of the last is missing"
    )
    store(cache, HYBRID, keys, group=1, first=3)
    assert ending(cache, HYBRID, keys) == (4 * CHUNK, [])
    store(cache, TWO_RANKS, keys[:3])
    store(cache, TWO_RANKS, keys[:1], rank=1)
    assert ending(cache, TWO_RANKS, keys) == (CHUNK, [(0, CHUNK, (1,))])


def test_a_hit_ends_early_exactly_if_a_group_alone_does():
    generator, window = random.Random(5), GroupSpec(SLIDING_WINDOW, CHUNK, 2 * CHUNK + 1, "", ())
    groups, seen = (ATTENTION, window, STATE), set()
    for _ in range(500):
        present = [bytes(generator.random() < 0.8 for _ in range(6)) for _ in groups]
        computed, limit = (CHUNK * each for each in sorted(generator.sample(range(7), 2)))
        ends = group_ends(groups, CHUNK, list(map(bitmap, present)), computed, limit)
        found = max(resume_point(groups, CHUNK, present, computed, limit), computed)
        assert (found == limit) == (min(ends) == limit)
        assert computed <= found <= min(ends)
        seen.add(found == limit)
    assert seen == {False, True}


@pytest.mark.parametrize(("limit", "counted"), [(2 * CHUNK, 1), (2 * CHUNK - 1, 0)])
def test_a_partial_chunk_behind_the_limit_ends_no_hit(limit, counted):
    cache, metrics = Cache(1, 10), Metrics()
    option = Server(Base(Config(), cache, None, None, metrics, None, None, []))
    keys = chain(2)
    store(cache, TWO_RANKS, keys)
    store(cache, TWO_RANKS, keys[:1], rank=1)
    hit = cache.lookup(TWO_RANKS, keys, 0, limit, SESSION, 0.0)
    assert hit.resume_tokens == CHUNK
    for now_s in (0.0, 2 * PATIENCE_S):
        option.looked_up(SESSION, TWO_RANKS, Lookup("r", keys, 0, limit, limit + 1), hit, 0, now_s)
    assert metrics.value("lmcache_partial_chunks_total") == counted
