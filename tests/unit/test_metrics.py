"""Metrics: complete from the first scrape, only what the table says, and documented. Histories, failures and
warnings: bounded, nothing lost, nothing twice."""

import itertools
import runpy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from lmcache_client.contract.geometry import FULL, RECURRENT, GroupSpec
from lmcache_server.core.layout import Layout
from lmcache_server.options import parts
from lmcache_server.telemetry.failures import MAX_FAILURES, MAX_SENTENCE, Failures
from lmcache_server.telemetry.history import INTERVAL_S, INTERVALS, History
from lmcache_server.telemetry.metrics import MAX_NAMESPACES, REASONS, TABLE, Metrics

ROOT = Path(__file__).parents[2]


def samples(metrics):
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def test_the_document_is_up_to_date():
    page = runpy.run_path(str(ROOT / "scripts/metrics_page.py"))["page"]()
    assert (ROOT / "docs/metrics.md").read_text() == page, (
        "run: python scripts/metrics_page.py > docs/metrics.md"
    )


def test_names_follow_the_conventions_of_prometheus():
    rows = [*TABLE, *(row for server in parts("server", "Server") for row in server.METRICS)]
    assert len({metric.name for metric in rows}) == len(rows)
    for metric in rows:
        assert metric.name.startswith("lmcache_")
        assert metric.name.endswith("_total") == (metric.kind is Counter)
        assert (metric.kind is Histogram) == bool(metric.options)
        buckets = metric.options.get("buckets", ())
        assert list(buckets) == sorted(set(buckets))
        assert metric.help.endswith(".")
        if metric.kind is Histogram:
            assert metric.name.endswith("_seconds")


def test_exactly_the_series_of_the_table_exist_from_the_first_scrape():
    found = samples(Metrics())
    expected = set()
    for metric in TABLE:
        own = {"model": ("other",), "namespace": ("other",)} if metric.by_model else {}
        names = {**metric.labels, **own}
        for values in itertools.product(*names.values()):
            labels = tuple(sorted(zip(names, values, strict=True)))
            if metric.kind is not Histogram:
                expected.add((metric.name, labels))
                continue
            expected |= {(f"{metric.name}_count", labels), (f"{metric.name}_sum", labels)}
            for bound in [*(str(float(b)) for b in metric.options["buckets"]), "+Inf"]:
                expected.add((f"{metric.name}_bucket", tuple(sorted((*labels, ("le", bound))))))
    assert set(found) == expected
    nonzero = {name for (name, _), value in found.items() if value}
    assert nonzero == {"lmcache_build_info", "lmcache_start_time_seconds"}


LOADED = "lmcache_transfer_bytes_total"


def test_values_go_where_they_belong():
    metrics = Metrics()
    labels = metrics.traffic(b"\x01" * 32, "one").labels
    metrics.count(LOADED, 100, direction="load", **labels)
    metrics.count(LOADED, 5, direction="load", **metrics.other.labels)
    metrics.observe("lmcache_transfer_seconds", 0.3, direction="store")
    found = samples(metrics)
    one, other = (("model", "one"), ("namespace", "01" * 8)), (("model", "other"), ("namespace", "other"))
    assert found[LOADED, (("direction", "load"), *one)] == 100
    assert found[LOADED, (("direction", "load"), *other)] == 5
    assert found[LOADED, (("direction", "store"), *one)] == 0
    assert found["lmcache_transfer_seconds_count", (("direction", "store"),)] == 1
    assert metrics.value(LOADED, direction="load") == 105
    assert metrics.value(LOADED, direction="load", **labels) == 100
    # What is not in the table is an error.
    for name, labels in (
        ("lmcache_nonsense_total", {}),
        ("lmcache_tokens_total", {}),
        ("lmcache_tokens_total", {"outcome": "other"}),
        ("lmcache_tokens_total", {"result": "hit"}),
        ("lmcache_tokens_requested_total", {"outcome": "hit"}),
    ):
        with pytest.raises(KeyError):
            Metrics().count(name, 1, **labels)


OUTCOMES = ("computed", "hit", "miss", "tail")


def outcomes(metrics):
    return [metrics.value("lmcache_tokens_total", outcome=outcome) for outcome in OUTCOMES]


def test_every_token_has_one_outcome():
    metrics = Metrics()
    for wrong in ((64, 64, 96, {}), (32, 32, 96, {"evicted": 31})):
        with pytest.raises(AssertionError):
            metrics.count_tokens(metrics.other, 100, *wrong)
    assert outcomes(metrics) == [0, 0, 0, 0], "what does not add up is not counted"
    metrics.count_tokens(metrics.other, 100, 16, 32, 96, {"evicted": 40, "not_stored": 8})
    metrics.count_tokens(metrics.traffic(b"n", "model"), 7, 0, 0, 0, {})
    assert outcomes(metrics) == [16, 32, 48, 11]
    assert metrics.value("lmcache_tokens_requested_total") == 16 + 32 + 48 + 11
    missed = {reason: metrics.value("lmcache_missed_tokens_total", reason=reason) for reason in REASONS}
    assert missed == {**dict.fromkeys(REASONS, 0), "not_stored": 8, "evicted": 40}


def test_models_are_bounded_in_number_and_in_length():
    metrics = Metrics()
    before = len(samples(metrics))
    named = [metrics.traffic(bytes([number]) * 32, "m" * 1000) for number in range(MAX_NAMESPACES)]
    assert all(len(each.labels["model"]) <= 128 for each in named)
    assert len({each.labels["namespace"] for each in named}) == MAX_NAMESPACES
    assert metrics.traffic(bytes([255]) * 32, "one too many") is metrics.other
    assert metrics.traffic(bytes(32), "m") is named[0]
    assert len(samples(metrics)) - before <= 24 * MAX_NAMESPACES
    hostile = Metrics()
    hostile.traffic(b"n", 'a"}\n\\')
    assert any(("model", 'a"}\n\\') in labels for _, labels in samples(hostile))


def test_a_gauge_is_what_it_reads_and_can_fall():
    metrics, leases = Metrics(), [1, 2, 3]
    assert Gauge in {metric.kind for metric in TABLE}
    metrics.gauge("lmcache_leases", lambda: len(leases))
    assert metrics.value("lmcache_leases") == samples(metrics)["lmcache_leases", ()] == 3
    leases.clear()
    assert metrics.value("lmcache_leases") == samples(metrics)["lmcache_leases", ()] == 0


# -- the last hour of counters ---------------------------------------------------------------------------


def grown(*updates):
    """The growth of a counter that was updated at these times."""
    history = History()
    for now_s, value in updates:
        history.update(now_s, {"bytes": value})
    assert history.report()["interval_s"] == INTERVAL_S
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


# -- recent failures, and chunks that only some shards have stored -----------------------------------------


def test_what_fails_again_and_again_is_one_entry():
    failures = Failures()
    failures.add(1.0, "load failed", "engine", "first")
    for second in range(5000):
        failures.add(2.0 + second, "store dropped", "engine", f"no room {second}", count=3)
    dropped, load = failures.report(5010.0)
    assert dropped == {
        **{"what": "store dropped", "engine_id": "engine", "sentence": "no room 4999"},
        **{"count": 15000, "age_s": 9.0, "first_age_s": 5008.0},
    }
    assert (load["what"], load["count"], load["age_s"]) == ("load failed", 1, 5009.0)


def test_the_latest_come_first_the_oldest_go_and_sentences_are_bounded():
    failures = Failures()
    for number in range(MAX_FAILURES + 5):
        failures.add(float(number), "load failed", f"engine {number}", "why")
    failures.add(100.0, "load failed", "engine 7", "x" * 10_000)
    report = failures.report(100.0)
    assert len(report) == MAX_FAILURES
    assert [each["engine_id"] for each in report[:2]] == ["engine 7", f"engine {MAX_FAILURES + 4}"]
    assert "engine 4" not in {each["engine_id"] for each in report}
    assert (report[0]["count"], len(report[0]["sentence"])) == (2, MAX_SENTENCE)


def test_a_chunk_is_partial_where_the_holders_of_one_group_disagree():
    full, state = (GroupSpec(kind, 16, 0, "", ()) for kind in (FULL, RECURRENT))
    layout = Layout(b"n", 16, (full, state), ((0, 1), (0, 1)))
    bits = {(of, rank): 1 << layout.bit(of, rank) for of in (0, 1) for rank in (0, 1)}
    both, one = bits[0, 0] | bits[0, 1], bits[0, 0]
    assert not layout.is_partial(0, 0)
    assert not layout.is_partial(both, 0), "a chunk without a state is no disagreement"
    assert not layout.is_partial(both | bits[1, 0] | bits[1, 1], 0)
    assert layout.is_partial(one, 0)
    assert layout.is_partial(both | bits[1, 1], 0)
    assert not layout.is_partial(one, bits[0, 1]), "it is being written"
    assert layout.is_partial(one, bits[1, 1])


def test_ranks_share_a_replicated_group_with_the_first_rank_of_their_stage_that_is_here():
    full, shared = (GroupSpec(FULL, 16, 0, "", (), replicated) for replicated in (False, True))
    # Ranks 2 to 5 of two stages with four tensor-parallel ranks each.
    layout = Layout(b"n", 16, (full, shared), ((2, 3, 4, 5), (2, 4)), tensor_parallel_size=4, first_rank=2)
    assert [layout.holder(0, rank) for rank in range(2, 6)] == [2, 3, 4, 5]
    assert [layout.holder(1, rank) for rank in range(2, 6)] == [2, 2, 4, 4]
    assert layout.masks == (0b1010101, 0b100010)
