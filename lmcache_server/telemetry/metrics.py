"""Every metric of the server, declared in one table. All series exist, at zero, from the first scrape."""

import time
from collections.abc import Callable, Mapping, Sequence
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

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
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


def _counter(name: str, help_text: str, **labels: Sequence[str]) -> Metric:
    return Metric(name, COUNTER, help_text, labels)


def _gauge(name: str, help_text: str, **labels: Sequence[str]) -> Metric:
    return Metric(name, GAUGE, help_text, labels)


def _histogram(name: str, help_text: str, buckets: Sequence[float], **labels: Sequence[str]) -> Metric:
    return Metric(name, HISTOGRAM, help_text, labels, buckets)


TABLE = (
    _counter(
        "lmcache_requests_total",
        "Requests of clients, by operation and outcome.",
        op=_OPERATIONS,
        outcome=("ok", "refused", "failed"),
    ),
    _counter("lmcache_tokens_requested_total", "Tokens of the requests that were looked up."),
    _counter(
        "lmcache_tokens_total",
        "Looked-up tokens, each in exactly one outcome: held by the engine itself (computed), found here "
        "(hit), not restorable (miss), beyond the last whole chunk before the last token (tail). They add up "
        "to lmcache_tokens_requested_total. Without those of self-tests and benchmarks.",
        outcome=("computed", "hit", "miss", "tail"),
    ),
    _counter(
        "lmcache_objects_total",
        "Objects offered for storing: stored, there already, being written by another, no room, copy failed.",
        outcome=("stored", "present", "busy", "no_room", "failed"),
    ),
    _counter(
        "lmcache_transfer_bytes_total", "Bytes copied out of (store) and into (load) engines.", **_DIRECTION
    ),
    _histogram(
        "lmcache_transfer_seconds",
        "Time from a copy request to its end, waiting included.",
        _TRANSFER_S,
        **_DIRECTION,
    ),
    _counter(
        "lmcache_copy_failures_total", "Copies that failed; loads among them are recomputed.", **_DIRECTION
    ),
    _counter(
        "lmcache_verify_failures_total",
        "Stored pages that were found damaged (with --checksums); their chunks were forgotten.",
    ),
    _histogram("lmcache_lookup_seconds", "Time to answer a lookup.", _LOOKUP_S),
    _counter(
        "lmcache_partial_chunks_total",
        "Times that a lookup ended before a chunk which, for 5 s or more, some workers of the engine had "
        "stored and others had not.",
    ),
    _counter("lmcache_evicted_chunks_total", "Chunks evicted to make room."),
    _counter("lmcache_evicted_bytes_total", "Payload bytes of evicted chunks."),
    _histogram("lmcache_eviction_age_seconds", "Time since the last use of evicted chunks.", _AGE_S),
    _gauge("lmcache_l1_capacity_bytes", "Size of L1."),
    _gauge("lmcache_l1_ready_bytes", "L1 taken by stored objects, in whole frames."),
    _gauge("lmcache_l1_reserved_bytes", "L1 taken by objects that are being written."),
    _gauge("lmcache_l1_free_bytes", "L1 that is free."),
    _gauge(
        "lmcache_l1_populated_bytes", "L1 that the system has backed with memory or, in a file, with space."
    ),
    _gauge("lmcache_l1_pinned_bytes", "L1 that is pinned for copies of GPUs; 0 where there are none."),
    _gauge("lmcache_l1_largest_free_bytes", "The largest contiguous free piece of L1."),
    _gauge("lmcache_chunks", "Chunks in the index."),
    _gauge(
        "lmcache_worker_memories",
        "Memories of workers that are mapped: of processes (host), of GPUs (cuda).",
        kind=("host", "cuda"),
    ),
    _counter("lmcache_selftests_total", "Self-tests that were run for /selftest.", outcome=("ok", "failed")),
    _gauge("lmcache_leases", "Leases that hold chunks for requests."),
    _gauge("lmcache_sessions", "Connected clients."),
    _gauge("lmcache_namespaces", "Namespaces that have chunks or engines."),
    _gauge("lmcache_build_info", "Always 1; the label has the version.", version=(VERSION,)),
    _gauge("lmcache_start_time_seconds", "When the server started, in seconds since 1970."),
)


class Metrics:
    """The metrics of one server. Unknown names and label values raise KeyError."""

    def __init__(self) -> None:
        # Otherwise each counter and histogram gets a gauge *_created, which nobody asked for.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._families: dict[str, Any] = {}
        self._series: dict[tuple[str, tuple[tuple[str, str], ...]], Any] = {}
        for metric in TABLE:
            self._declare(metric)
        started_s = time.time()
        self.gauge("lmcache_build_info", lambda: 1, version=VERSION)
        self.gauge("lmcache_start_time_seconds", lambda: started_s)

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
        self._families[metric.name] = family
        for values in product(*metric.labels.values()):
            labels = dict(zip(names, values, strict=True))
            self._series[_key(metric.name, labels)] = family.labels(**labels) if labels else family

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        self._series[_key(name, labels)].inc(amount)

    def gauge(self, name: str, read: Callable[[], float], **labels: str) -> None:
        """The gauge is what `read` returns whenever somebody asks."""
        self._series[_key(name, labels)].set_function(read)

    def observe(self, name: str, value: float, **labels: str) -> None:
        self._series[_key(name, labels)].observe(value)

    def value(self, name: str, **labels: str) -> float:
        """The present value of a counter or gauge."""
        (family,) = self._families[name].collect()
        return float(next(sample.value for sample in family.samples if sample.labels == labels))

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
