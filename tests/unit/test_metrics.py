"""Metrics: complete from the first scrape, only what the table says, and documented."""

import itertools
import runpy
from pathlib import Path

import pytest
from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from lmcache_server.core import misses
from lmcache_server.options import parts
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


def test_what_is_not_in_the_table_is_an_error():
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
    assert missed == {**dict.fromkeys(misses.REASONS, 0), "not_stored": 8, "evicted": 40}


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
