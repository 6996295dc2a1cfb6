"""What the server keeps, over a part of a public trace, is what a least-recently-used cache keeps."""

import importlib.util

import pytest
from harness.paths import ROOT

_spec = importlib.util.spec_from_file_location("replay", ROOT / "benchmarks/replay.py")
assert _spec is not None
assert _spec.loader is not None
replay = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(replay)

REQUESTS = replay.load()


@pytest.mark.parametrize(("capacity", "rate"), [(10_000, "0.4430"), (1 << 20, "0.6504")])
def test_the_oracle_finds_the_known_hit_rates(capacity, rate):
    assert replay.rate(REQUESTS, replay.oracle(REQUESTS, capacity)[0]) == rate


@pytest.mark.parametrize("capacity", [200, 1_000])
def test_every_request_hits_what_the_oracle_says(capacity):
    """Also with prompts that are longer than L1. The first requests of the trace share too little to tell
    one order of eviction from another; the last do not."""
    last = REQUESTS[-300:]
    expected, full = replay.oracle(last, capacity)
    assert full < len(last) / 4, "L1 is full too late: little is decided"
    outcome = replay.replay(last, capacity)
    assert outcome.hits == expected
    assert (outcome.dropped > 0) == (capacity < max(len(request.ids) for request in last))


def test_the_plan_of_one_server_is_what_servers_of_other_sizes_hit():
    last, capacity = REQUESTS[-600:], 2_000
    outcome = replay.replay(last, capacity)
    for multiple, expected in outcome.planned.items():
        room = int(multiple * capacity) if multiple < 100 else 1 << 20
        assert float(replay.rate(last, replay.oracle(last, room)[0])) == pytest.approx(expected, abs=0.001)
