"""The simulator of fleets, beside caches of a few lines, and the arithmetic of ports."""

import sys
from collections import OrderedDict
from collections.abc import Iterable

import pytest
from harness.paths import ROOT

sys.path.append(str(ROOT / "benchmarks"))

import ports
import scaling
from scaling import ALONE, CHUNK, COLD, COMMIT, L1_CHUNKS, THERE, TURNS, Arrival, Fleet

ROOM_FOR_ALL = 10**6
FLEET = Fleet(3, 0.03, ROOM_FOR_ALL)


def found(arrivals: Iterable[Arrival], capacity: int) -> float:
    """The share of tokens that a least-recently-used cache of so many chunks finds."""
    cache: OrderedDict[int, None] = OrderedDict()
    hit = total = 0
    for _, _, tokens, ids in arrivals:
        held = [each in cache for each in ids[: (tokens - 1) // CHUNK]] + [False]
        hit += held.index(False) * CHUNK
        total += tokens
        for each in reversed(ids):
            cache[each] = None
            cache.move_to_end(each)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hit / total


def test_a_host_alone_is_a_cache() -> None:
    fleet = Fleet(1, 0.1)
    capacity = round(L1_CHUNKS * fleet.share)
    counted = scaling.run(fleet, TURNS, ALONE)
    assert counted["hit rate"] == pytest.approx(found(scaling.arrivals(fleet), capacity), abs=0.01)
    assert 0.2 < counted["hit rate"] < 0.6
    assert counted["busiest"] == 1
    assert scaling.run(fleet, THERE, ALONE) == counted, "there is nothing to choose"


def test_a_store_with_room_for_all_finds_what_one_cache_finds() -> None:
    alone = Fleet(1, 0.05, ROOM_FOR_ALL)
    everything = found(scaling.arrivals(alone), 10**9)
    for writes in (COLD, COMMIT):
        assert scaling.run(alone, TURNS, writes)["hit rate"] == pytest.approx(everything, abs=1e-9)
    everything = found(scaling.arrivals(FLEET), 10**9)
    for routing in (TURNS, THERE):
        assert scaling.run(FLEET, routing, COMMIT)["hit rate"] == pytest.approx(everything, abs=1e-9)
        cold = scaling.run(FLEET, routing, COLD)
        # What is in the L1 of another host is in no store yet.
        assert everything - 0.05 < cold["hit rate"] <= everything
        assert (cold["hit rate"] < everything) == (routing == TURNS)
        assert cold["written"] <= cold["stored"]


def test_a_store_that_evicts_finds_less() -> None:
    rates = [scaling.run(Fleet(3, 0.1, times), TURNS, COLD)["hit rate"] for times in (1, 3, 10)]
    assert rates[0] + 0.05 < rates[1] < rates[2]


def test_the_work_of_a_prompt_is_known() -> None:
    llama, hybrid, latent = ports.MODELS
    assert llama.bytes(1) == 327_680
    assert hybrid.bytes(1000) - hybrid.bytes(0) == 1000 * 24_576
    assert latent.bytes(1) == 70_272
    assert llama.operations(1000) == pytest.approx(2 * 70.6e12, rel=0.02)
    assert ports.restored(llama, 8192, 12.5e9) == pytest.approx(12.5e9 * 0.9 / 327_680)
