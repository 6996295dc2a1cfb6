"""The last hour of counters: every growth in one interval, nothing lost, bounded."""

from hypothesis import given
from hypothesis import strategies as st

from lmcache_server.telemetry.history import INTERVAL_S, INTERVALS, History


def test_growth_belongs_to_the_interval_in_which_it_happened():
    history = History()
    for second in range(16):
        history.update(100.0 + second, {"bytes": 10 * second, "tokens": 7})
    assert history.report() == {
        "interval_s": INTERVAL_S,
        "ended": 3,
        "growth": {"bytes": [50, 50, 50], "tokens": [0, 0, 0]},
    }


def grown(*updates: tuple[float, int]) -> list[int]:
    """The growth of a counter that was updated at these times."""
    history = History()
    for now_s, value in updates:
        history.update(now_s, {"bytes": value})
    return history.report()["growth"].get("bytes")


def test_growth_is_counted_from_the_first_value_in_each_interval_that_has_ended():
    assert grown() is None
    assert grown((5.0, 3), (5.0 + INTERVAL_S - 0.1, 9)) == []
    assert grown((0.0, 1000), (INTERVAL_S, 1001)) == [1]
    assert grown((0.0, 0), (3.5 * INTERVAL_S, 6)) == [0, 0, 6], "nobody saw two of them end"
    assert grown((0.0, 0), (1e6, 4)) == [0] * (INTERVALS - 1) + [4], "an hour is kept"


@given(st.lists(st.tuples(st.floats(0, 40), st.integers(0, 1000)), max_size=60))
def test_growth_adds_up_and_there_is_one_for_each_interval(steps):
    history, now_s, total, seen = History(), 0.0, 0, 0
    history.update(now_s, {"bytes": 0})
    for seconds, more in steps:
        now_s, total, before = now_s + seconds, total + more, history.report()["ended"]
        history.update(now_s, {"bytes": total})
        seen = total if history.report()["ended"] > before else seen
    report = history.report()
    assert report["ended"] == int(now_s / INTERVAL_S)
    assert len(report["growth"]["bytes"]) == min(report["ended"], INTERVALS)
    if report["ended"] <= INTERVALS:
        assert sum(report["growth"]["bytes"]) == seen
