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


def test_before_the_first_interval_has_ended_there_is_nothing():
    history = History()
    assert history.report()["growth"] == {}
    history.update(5.0, {"bytes": 3})
    history.update(5.0 + INTERVAL_S - 0.1, {"bytes": 9})
    assert history.report()["growth"] == {"bytes": []}


def test_it_starts_from_what_the_counters_are():
    history = History()
    history.update(0.0, {"bytes": 1000})
    history.update(INTERVAL_S, {"bytes": 1001})
    assert history.report()["growth"] == {"bytes": [1]}


def test_intervals_that_nobody_saw_end_have_no_growth():
    history = History()
    history.update(0.0, {"bytes": 0})
    history.update(3.5 * INTERVAL_S, {"bytes": 6})
    assert history.report()["growth"] == {"bytes": [0, 0, 6]}


def test_an_hour_is_kept_even_after_days_without_a_call():
    history = History()
    history.update(0.0, {"bytes": 0})
    history.update(1e6, {"bytes": 4})
    growth = history.report()["growth"]["bytes"]
    assert len(growth) == INTERVALS
    assert (growth[-1], sum(growth)) == (4, 4)


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
