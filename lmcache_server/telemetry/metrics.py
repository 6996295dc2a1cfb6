"""All metrics of the server, in one table. Every series exists, at zero, from the first scrape."""

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from lmcache_client.contract.version import VERSION

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LOOKUP_S = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)
_TRANSFER_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
_AGE_S = (1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)
_OPERATIONS = (
    "hello", "register", "join", "not_cached", "lookup", "release", "load", "store", "clear", "status",
    "ping", "goodbye", "other",
)  # fmt: skip
_DIRECTION = {"direction": ("store", "load")}


class Metric(NamedTuple):
    """One row of the table. `labels` lists every value that a label can take; `options` go to `kind`."""

    kind: type[Counter] | type[Gauge] | type[Histogram]
    name: str
    help: str
    labels: Mapping[str, Sequence[str]] = {}
    options: Mapping[str, Any] = {}


TABLE = (
    Metric(Counter, "lmcache_requests_total", "Requests of clients, by operation and outcome.",
           {"op": _OPERATIONS, "outcome": ("ok", "refused", "failed")}),
    Metric(Counter, "lmcache_tokens_requested_total", "Tokens of the requests that were looked up."),
    Metric(Counter, "lmcache_tokens_total",
           "Looked-up tokens: held by the engine itself (computed), found here (hit), not restorable (miss), "
           "after the last whole chunk that leaves a token to compute (tail). The four add up to "
           "lmcache_tokens_requested_total. Self-tests and benchmarks are left out.",
           {"outcome": ("computed", "hit", "miss", "tail")}),
    Metric(Counter, "lmcache_objects_total",
           "Objects that workers offered: stored, already present, being written by another store (busy), "
           "dropped for lack of room, dropped because their prompt will not come back (once), or failed to "
           "copy.",
           {"outcome": ("stored", "present", "busy", "no_room", "once", "failed")}),
    Metric(Counter, "lmcache_transfer_bytes_total", "Bytes copied from (store) and to (load) engines.",
           _DIRECTION),
    Metric(Histogram, "lmcache_transfer_seconds", "Time from a copy request to its end, waiting included.",
           _DIRECTION, {"buckets": _TRANSFER_S}),
    Metric(Counter, "lmcache_copy_failures_total", "Failed copies; vLLM recomputes the failed loads.",
           _DIRECTION),
    Metric(Counter, "lmcache_verify_failures_total",
           "Stored pages found damaged (with --checksums); the server forgot their chunks."),
    Metric(Histogram, "lmcache_lookup_seconds", "Time to answer a lookup.", {}, {"buckets": _LOOKUP_S}),
    Metric(Counter, "lmcache_partial_chunks_total",
           "Lookups that ended before a chunk which, for 5 s, only some workers of the engine had stored."),
    Metric(Counter, "lmcache_evicted_chunks_total", "Chunks evicted to make room."),
    Metric(Counter, "lmcache_evicted_bytes_total", "Payload bytes of evicted chunks."),
    Metric(Histogram, "lmcache_eviction_age_seconds",
           "Time since the last use of evicted chunks. Prompts that will not come back are left out.",
           {}, {"buckets": _AGE_S}),
    Metric(Gauge, "lmcache_l1_capacity_bytes", "Size of L1."),
    Metric(Gauge, "lmcache_l1_ready_bytes", "L1 taken by stored objects, in whole frames."),
    Metric(Gauge, "lmcache_l1_reserved_bytes", "L1 taken by objects that are being written."),
    Metric(Gauge, "lmcache_l1_free_bytes", "Free L1."),
    Metric(Gauge, "lmcache_l1_populated_bytes", "L1 that the system has backed with memory or file space."),
    Metric(Gauge, "lmcache_l1_pinned_bytes", "L1 pinned for copies to and from GPUs; 0 without GPUs."),
    Metric(Gauge, "lmcache_l1_largest_free_bytes", "The largest contiguous free piece of L1."),
    Metric(Gauge, "lmcache_demand_hit_ratio",
           "Hit rate that an L1 of so many times the size would have had in the last hour.",
           {"l1": ("0.25", "0.5", "1", "2", "4", "10", "unlimited")}),
    Metric(Gauge, "lmcache_chunks", "Chunks in the index."),
    Metric(Gauge, "lmcache_worker_memories", "Mapped memories of workers, by kind: host or GPU (cuda).",
           {"kind": ("host", "cuda")}),
    Metric(Counter, "lmcache_selftests_total", "Runs of /selftest.", {"outcome": ("ok", "failed")}),
    Metric(Gauge, "lmcache_leases", "Leases that hold chunks for requests."),
    Metric(Gauge, "lmcache_sessions", "Connected clients."),
    Metric(Gauge, "lmcache_namespaces", "Namespaces that have chunks or engines."),
    Metric(Gauge, "lmcache_build_info", "Always 1; the label has the version.", {"version": (VERSION,)}),
    Metric(Gauge, "lmcache_start_time_seconds", "When the server started, in seconds since 1970."),
)  # fmt: skip


class Metrics:
    """The metrics of one server. A name or label value that is not in the table raises KeyError."""

    def __init__(self) -> None:
        # Without this, every counter and histogram also gets a gauge *_created.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._series: dict[tuple[str, frozenset[tuple[str, str]]], Any] = {}
        for kind, name, help_text, labels, options in TABLE:
            family: Any = kind(name, help_text, tuple(labels), registry=self._registry, **options)
            for values in product(*labels.values()):
                pairs = dict(zip(labels, values, strict=True))
                self._series[_key(name, pairs)] = family.labels(**pairs) if pairs else family
        started_s = time.time()
        self.gauge("lmcache_build_info", lambda: 1, version=VERSION)
        self.gauge("lmcache_start_time_seconds", lambda: started_s)

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        self._series[_key(name, labels)].inc(amount)

    def gauge(self, name: str, read: Callable[[], float], **labels: str) -> None:
        """From now on the gauge shows what `read` returns."""
        self._series[_key(name, labels)].set_function(read)

    def observe(self, name: str, value: float, **labels: str) -> None:
        self._series[_key(name, labels)].observe(value)

    def value(self, name: str, **labels: str) -> float:
        """The present value of a counter or gauge."""
        (series,) = self._series[_key(name, labels)].collect()
        return float(series.samples[0].value)

    def count_tokens(self, requested: int, computed: int, hit: int, limit: int) -> None:
        """Count a lookup: `hit` tokens found after `computed` ones, of at most `limit` restorable ones."""
        miss, tail = limit - computed - hit, requested - limit
        outcomes = {"computed": computed, "hit": hit, "miss": miss, "tail": tail}
        assert min(outcomes.values()) >= 0
        for outcome, tokens in outcomes.items():
            self.count("lmcache_tokens_total", tokens, outcome=outcome)
        self.count("lmcache_tokens_requested_total", requested)

    def render(self) -> bytes:
        """The Prometheus text format."""
        return prometheus_client.generate_latest(self._registry)


def _key(name: str, labels: dict[str, str]) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())
