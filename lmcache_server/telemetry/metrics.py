"""Every metric of the server, declared in one table; docs/metrics.md is made from it.

`python -m lmcache_server.telemetry.metrics` prints that page. All series exist from the first scrape.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from lmcache_client.contract.version import VERSION

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"

_LOOKUP_S = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)
_TRANSFER_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
_AGE_S = (1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)
_OPERATIONS = (
    "hello", "register", "join", "lookup", "end_request", "retrieve", "store", "clear", "status", "ping",
    "goodbye", "other",
)  # fmt: skip
_DIRECTION = {"direction": ("store", "load")}


@dataclass(frozen=True)
class Metric:
    """One row of the table. `labels` has all values that each label can have."""

    name: str
    kind: str
    help: str
    labels: Mapping[str, Sequence[str]]
    buckets: Sequence[float] = ()


TABLE = (
    Metric(
        "lmcache_requests_total",
        COUNTER,
        "Requests of clients, by operation and outcome.",
        {"op": _OPERATIONS, "outcome": ("ok", "refused", "failed")},
    ),
    Metric("lmcache_tokens_requested_total", COUNTER, "Tokens of the requests that were looked up.", {}),
    Metric(
        "lmcache_tokens_total",
        COUNTER,
        "Looked-up tokens, each in exactly one outcome: held by the engine itself (computed), found here "
        "(hit), not restorable (miss), beyond the last whole chunk before the last token (tail). They add up "
        "to lmcache_tokens_requested_total. Without those of self-tests and benchmarks.",
        {"outcome": ("computed", "hit", "miss", "tail")},
    ),
    Metric(
        "lmcache_objects_total",
        COUNTER,
        "Objects offered for storing: stored, there already, being written by another, no room, copy failed.",
        {"outcome": ("stored", "present", "busy", "no_room", "failed")},
    ),
    Metric(
        "lmcache_transfer_bytes_total",
        COUNTER,
        "Bytes copied out of (store) and into (load) engines.",
        _DIRECTION,
    ),
    Metric(
        "lmcache_transfer_seconds",
        HISTOGRAM,
        "Time from a copy request to its end, waiting included.",
        _DIRECTION,
        _TRANSFER_S,
    ),
    Metric(
        "lmcache_copy_failures_total",
        COUNTER,
        "Copies that failed; loads among them are recomputed.",
        _DIRECTION,
    ),
    Metric(
        "lmcache_verify_failures_total",
        COUNTER,
        "Stored pages that were found damaged (with --verify); their chunks were forgotten.",
        {},
    ),
    Metric("lmcache_lookup_seconds", HISTOGRAM, "Time to answer a lookup.", {}, _LOOKUP_S),
    Metric(
        "lmcache_partial_chunks_total",
        COUNTER,
        "Times that a lookup ended before a chunk which, for 5 s or more, some workers of the engine had "
        "stored and others had not.",
        {},
    ),
    Metric("lmcache_evicted_chunks_total", COUNTER, "Chunks evicted to make room.", {}),
    Metric("lmcache_evicted_bytes_total", COUNTER, "Payload bytes of evicted chunks.", {}),
    Metric(
        "lmcache_eviction_age_seconds", HISTOGRAM, "Time since the last use of evicted chunks.", {}, _AGE_S
    ),
    Metric("lmcache_l1_capacity_bytes", GAUGE, "Size of L1.", {}),
    Metric("lmcache_l1_ready_bytes", GAUGE, "L1 taken by stored objects, in whole frames.", {}),
    Metric("lmcache_l1_reserved_bytes", GAUGE, "L1 taken by objects that are being written.", {}),
    Metric("lmcache_l1_free_bytes", GAUGE, "L1 that is free.", {}),
    Metric(
        "lmcache_l1_populated_bytes",
        GAUGE,
        "L1 that the system has backed with memory or, in a file, with space.",
        {},
    ),
    Metric(
        "lmcache_l1_pinned_bytes", GAUGE, "L1 that is pinned for copies of GPUs; 0 where there are none.", {}
    ),
    Metric("lmcache_l1_largest_free_bytes", GAUGE, "The largest contiguous free piece of L1.", {}),
    Metric("lmcache_chunks", GAUGE, "Chunks in the index.", {}),
    Metric(
        "lmcache_worker_memories",
        GAUGE,
        "Memories of workers that are mapped: of processes (host), of GPUs (cuda).",
        {"kind": ("host", "cuda")},
    ),
    Metric(
        "lmcache_selftests_total",
        COUNTER,
        "Self-tests that were run for /selftest.",
        {"outcome": ("ok", "failed")},
    ),
    Metric("lmcache_leases", GAUGE, "Leases that hold chunks for requests.", {}),
    Metric("lmcache_sessions", GAUGE, "Connected clients.", {}),
    Metric("lmcache_namespaces", GAUGE, "Namespaces that have chunks or engines.", {}),
    Metric("lmcache_build_info", GAUGE, "Always 1; the label has the version.", {"version": (VERSION,)}),
    Metric("lmcache_start_time_seconds", GAUGE, "When the server started, in seconds since 1970.", {}),
)


class Metrics:
    """The metrics of one server. Unknown names and label values raise KeyError."""

    def __init__(self) -> None:
        # Otherwise each counter and histogram gets a gauge *_created, which nobody asked for.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._series: dict[tuple[str, tuple[tuple[str, str], ...]], Any] = {}
        for metric in TABLE:
            self._declare(metric)
        self.set("lmcache_build_info", 1, version=VERSION)
        self.set("lmcache_start_time_seconds", time.time())

    def _declare(self, metric: Metric) -> None:
        names = tuple(metric.labels)
        family: Any
        if metric.kind == HISTOGRAM:
            family = Histogram(
                metric.name, metric.help, names, buckets=metric.buckets, registry=self._registry
            )
        else:
            cls = Counter if metric.kind == COUNTER else Gauge
            family = cls(metric.name, metric.help, names, registry=self._registry)
        for values in product(*metric.labels.values()):
            labels = dict(zip(names, values, strict=True))
            self._series[_key(metric.name, labels)] = family.labels(**labels) if labels else family

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        self._series[_key(name, labels)].inc(amount)

    def set(self, name: str, value: float, **labels: str) -> None:
        self._series[_key(name, labels)].set(value)

    def observe(self, name: str, value: float, **labels: str) -> None:
        self._series[_key(name, labels)].observe(value)

    def value(self, name: str, **labels: str) -> float:
        """The present value of a counter or gauge."""
        series = self._series[_key(name, labels)]
        return float(series._value.get())

    def count_tokens(self, requested: int, computed: int, hit: int, limit: int) -> None:
        """A lookup: `hit` tokens found beyond the `computed` ones; beyond `limit` nothing can be used."""
        outcomes = {
            "computed": computed,
            "hit": hit,
            "miss": limit - computed - hit,
            "tail": requested - limit,
        }
        assert min(outcomes.values()) >= 0
        for outcome, tokens in outcomes.items():
            self.count("lmcache_tokens_total", tokens, outcome=outcome)
        self.count("lmcache_tokens_requested_total", requested)

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self._registry)


def _key(name: str, labels: dict[str, str]) -> tuple[str, tuple[tuple[str, str], ...]]:
    return name, tuple(sorted(labels.items()))


def page() -> str:
    """docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Served at `/metrics` on `--http-host` and `--http-port`. Made from the table in",
        "`lmcache_server/telemetry/metrics.py` by `python -m lmcache_server.telemetry.metrics`; a test holds",
        "both together.",
        "Every series exists, at zero, from the first scrape; labels take the values listed and no others.",
        "",
        "| metric | kind | labels | meaning |",
        "|---|---|---|---|",
    ]
    for metric in TABLE:
        labels = "; ".join(
            f"`{name}`: {'the version' if name == 'version' else ', '.join(values)}"
            for name, values in metric.labels.items()
        )
        lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
