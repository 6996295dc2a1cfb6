"""What to fetch, and when a tier is left alone."""

import itertools
import logging

import pytest
from tier_rig import Rig, with_rig

from lmcache_client.contract.geometry import CHUNKED_LOCAL, FULL, RECURRENT, SLIDING_WINDOW, GroupSpec
from lmcache_client.contract.hits import fetch_patience_s
from lmcache_server.core.cache import Cache, Layout
from lmcache_server.options.tiers.base import TierError
from lmcache_server.options.tiers.breaker import (
    FAILURES,
    MAX_RETRY_S,
    PRESENT,
    READ,
    RETRY_S,
    WITHIN_S,
    WRITE,
    Breaker,
)
from lmcache_server.options.tiers.fetch_choice import SLOW_OLD_S, Speed, wanted

CHUNK_SIZE = 16
KEYS = [number.to_bytes(32, "big") for number in range(6)]
GROUPS = (
    GroupSpec(FULL, 4, 0, "", ()),
    GroupSpec(SLIDING_WINDOW, 2, 24, "", ()),
    GroupSpec(CHUNKED_LOCAL, 4, 24, "", ()),
    GroupSpec(RECURRENT, 8, 0, "", ()),
)
LAYOUT = Layout(b"ns", CHUNK_SIZE, GROUPS, ((0, 1), (0,), (1,), (0, 1)))


def put(cache: Cache, chunk: int, group: int, rank: int) -> None:
    blocks = len(LAYOUT.groups[group].stored_blocks(chunk, CHUNK_SIZE))
    if blocks:
        cache.commit(cache.reserve(LAYOUT, KEYS[chunk], group, rank, blocks, 10 * blocks))


@pytest.mark.parametrize(
    ("chunks", "computed"),
    [
        (chunks, computed)
        for chunks in range(1, len(KEYS) + 1)
        for computed in (0, 8, 16, 40)
        if computed < chunks * CHUNK_SIZE
    ],
)
@pytest.mark.parametrize("held", [0, 1, 3])
def test_with_what_is_wanted_a_lookup_resumes_and_with_less_it_does_not(
    chunks: int, computed: int, held: int
) -> None:
    resume = chunks * CHUNK_SIZE

    def filled() -> Cache:
        cache = Cache(10, 10_000)
        for chunk, group in itertools.product(range(min(held, chunks)), range(4)):
            for rank in LAYOUT.holders[group]:
                put(cache, chunk, group, rank)
        return cache

    cache = filled()
    objects = list(wanted(LAYOUT, cache.ready(LAYOUT, KEYS), resume, computed))
    assert objects == sorted(objects, key=lambda each: each.chunk)
    for each in objects:
        put(cache, *each)
    limit = chunks * CHUNK_SIZE
    assert cache.lookup(LAYOUT, KEYS[:chunks], computed, limit, 1, 0.0).resume_tokens == resume
    for left_out in objects:
        cache = filled()
        for each in objects:
            if each != left_out:
                put(cache, *each)
        assert cache.lookup(LAYOUT, KEYS[:chunks], computed, limit, 1, 0.0).resume_tokens < resume


def opened(call: str) -> Breaker:
    breaker = Breaker()
    for number in range(FAILURES):
        assert not breaker.is_open
        breaker.failed(number, call)
    assert breaker.is_open
    return breaker


@pytest.mark.parametrize("call", [PRESENT, READ, WRITE])
def test_a_breaker_opens_after_failures_in_a_row_and_tries_later(call: str) -> None:
    breaker = opened(call)
    now_s = FAILURES - 1.0
    assert not breaker.tries(now_s + RETRY_S - 0.1)
    delay_s = RETRY_S
    for _ in range(6):
        now_s += delay_s
        assert breaker.tries(now_s)
        assert not breaker.tries(now_s + 0.1), "one call tries it"
        breaker.failed(now_s, PRESENT)
        delay_s = min(2 * delay_s, MAX_RETRY_S)
        assert not breaker.tries(now_s + delay_s - 0.1)
    breaker.answers()
    assert not breaker.is_open
    assert not breaker.tries(now_s + 1000)


@pytest.mark.parametrize("call", [READ, WRITE])
def test_a_tier_that_only_answers_is_on_trial(call: str) -> None:
    breaker, now_s, delay_s = opened(call), FAILURES - 1.0, RETRY_S
    for _ in range(4):
        now_s += delay_s
        assert breaker.tries(now_s)
        breaker.answers()
        assert not breaker.is_open
        breaker.succeeded(PRESENT)
        breaker.failed(now_s, call)
        assert breaker.is_open, "one failure is enough"
        delay_s = min(2 * delay_s, MAX_RETRY_S)
        assert not breaker.tries(now_s + delay_s - 0.1)
    breaker.answers()
    breaker.succeeded(call)
    breaker.failed(now_s, call)
    assert not breaker.is_open, "it has proved itself"


@with_rig(16)
async def test_a_tier_that_answers_but_cannot_be_written_is_said_once_until_it_can(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(FAILURES + 3):
        if rig.tier.breaker.is_open:
            rig.tier.breaker.answers()
        rig.tiers.failed(rig.tier, TierError("no space"), WRITE)
    assert rig.tier.breaker.is_open
    rig.tier.breaker.answers()
    for _ in range(FAILURES):
        rig.tiers.failed(rig.tier, TierError("the disk fails"), READ)
    rig.tier.breaker.answers()
    rig.tiers.succeeded(rig.tier, READ)
    assert rig.tier.breaker.trial == {WRITE}
    rig.keep(1)
    await rig.all_ended()
    begin = "tier tier is left alone for now: "
    assert caplog.messages == [f"{begin}no space", f"{begin}the disk fails", "tier tier works again"]


def test_only_failures_of_one_kind_in_a_row_and_near_each_other_open_a_breaker() -> None:
    breaker = Breaker()
    for number in range(10):
        breaker.failed(number * (WITHIN_S / 2 + 0.1), READ)
    assert not breaker.is_open, "they are far apart"
    breaker = Breaker()
    for _ in range(5):
        breaker.failed(1.0, READ)
        breaker.failed(1.0, READ)
        breaker.succeeded(READ)
    assert not breaker.is_open, "a success forgets those before it"
    for _ in range(FAILURES):
        breaker.succeeded(PRESENT)
        breaker.failed(1.0, READ)
    assert breaker.is_open, "a tier whose reads all fail has still answered every question"


def test_speed_follows_what_was_measured_and_grows_old() -> None:
    speed = Speed()
    assert speed.seconds(10**9) == 0
    assert speed.is_old(100.0)
    speed.add(10**9, 1.0, 100.0)
    assert speed.seconds(2 * 10**9) == 2.0
    assert not speed.is_old(101.0)
    assert speed.is_old(200.0)
    for _ in range(50):
        speed.add(10**9, 0.1, 200.0)
    assert speed.seconds(10**9) == pytest.approx(0.1, rel=0.01)
    speed.add(10**9, 100.0, 201.0)
    assert speed.seconds(10**9) > 30, "a tier that becomes slow counts as slow at once"
    for _ in range(3):
        speed.add(10**9, 0.1, 202.0)
    assert speed.seconds(10**9) < 1, "one fetch beside other work is soon forgotten"
    assert speed.is_old(208.0, SLOW_OLD_S)
    assert not speed.is_old(208.0)


def test_longer_prompts_wait_longer_but_not_for_ever() -> None:
    assert fetch_patience_s(0) == 2.0
    assert fetch_patience_s(10_000) == 3.0
    assert fetch_patience_s(10**7) == 30.0
