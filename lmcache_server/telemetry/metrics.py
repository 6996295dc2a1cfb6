"""All metrics of the server, in one table. Every series without a model exists, at zero, from the start."""

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from lmcache_client.contract.version import VERSION

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LOOKUP_S = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)
TRANSFER_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
_AGE_S = (1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)
_OPERATIONS = (
    "hello", "register", "join", "not_cached", "lookup", "accept", "release", "load", "store", "clear",
    "pin", "unpin", "inspect", "follow", "retain", "status", "ping", "goodbye", "other",
)  # fmt: skip
_Labels = dict[str, Sequence[str]]
_DIRECTION: _Labels = {"direction": ("store", "load")}
_OUTCOMES: _Labels = {"outcome": ("computed", "hit", "miss", "tail")}
OBJECTS = ("stored", "present", "busy", "no_room", "once", "quota", "failed")
_OBJECTS: _Labels = {"outcome": OBJECTS}
NOT_STORED = "not_stored"
REASONS = (NOT_STORED, "evicted", "tier_down", "tier_late", "no_state", "partial")
TESTS: _Labels = {"test": ("bench", "selftest", "verify")}
MAX_NAMESPACES = 64
"""Further namespaces are counted together."""
MAX_MODEL_CHARS = 128
OTHER = "other"


class Metric(NamedTuple):
    """One row of the table. `labels` lists every value that a label can take; `options` go to `kind`. With
    `by_model`, the labels `model` and `namespace` are added."""

    kind: type[Counter] | type[Gauge] | type[Histogram]
    name: str
    help: str
    labels: Mapping[str, Sequence[str]] = {}
    options: Mapping[str, Any] = {}
    by_model: bool = False


TABLE = (
    Metric(Counter, "lmcache_requests_total", "Requests of clients, by operation and outcome.",
           {"op": _OPERATIONS, "outcome": ("ok", "refused", "failed")}),
    Metric(Counter, "lmcache_tokens_requested_total", "Tokens of the requests that were looked up.",
           by_model=True),
    Metric(Counter, "lmcache_tokens_total",
           "Looked-up tokens: held by the engine itself (computed), found here (hit), not restorable (miss), "
           "or at the end of a prompt (tail): a hit is whole chunks and leaves one token or more to compute. "
           "The four add up to lmcache_tokens_requested_total.", _OUTCOMES, by_model=True),
    Metric(Counter, "lmcache_missed_tokens_total",
           "Looked-up tokens of outcome miss, by reason: never stored or cleared (not_stored), evicted, "
           "perhaps in a tier that is left alone because it fails (tier_down), in a tier, but not in L1 in "
           "time (tier_late), stored without the window or state that a resume needs (no_state), stored by "
           "only some workers of the engine (partial).",
           {"reason": REASONS}, by_model=True),
    Metric(Counter, "lmcache_objects_total",
           "Objects that workers offered: stored, already present, being written by another store (busy), "
           "dropped for lack of room, dropped because they are of an answer or of a prompt that will not "
           "come back (once) or their tenant is at its quota, or failed to copy.", _OBJECTS, by_model=True),
    Metric(Counter, "lmcache_transfer_bytes_total", "Bytes copied from (store) and to (load) engines.",
           _DIRECTION, by_model=True),
    Metric(Histogram, "lmcache_transfer_seconds",
           "Time from a copy request to its end, waiting included. Tests are counted, too.",
           _DIRECTION, {"buckets": TRANSFER_S}),
    Metric(Counter, "lmcache_copy_failures_total", "Failed copies; vLLM recomputes the failed loads.",
           _DIRECTION, by_model=True),
    Metric(Counter, "lmcache_test_tokens_total", "As lmcache_tokens_total, of tests only.",
           TESTS | _OUTCOMES),
    Metric(Counter, "lmcache_test_objects_total", "As lmcache_objects_total, of tests only.",
           TESTS | _OBJECTS),
    Metric(Counter, "lmcache_test_transfer_bytes_total", "As lmcache_transfer_bytes_total, of tests only.",
           TESTS | _DIRECTION),
    Metric(Counter, "lmcache_verify_failures_total",
           "Stored objects found damaged (with --checksums); the server forgot their chunks."),
    Metric(Histogram, "lmcache_lookup_seconds", "Time to answer a lookup. Tests are counted, too.", {},
           {"buckets": _LOOKUP_S}),
    Metric(Counter, "lmcache_evicted_chunks_total", "Chunks evicted to make room."),
    Metric(Counter, "lmcache_evicted_bytes_total", "Payload bytes of evicted chunks."),
    Metric(Histogram, "lmcache_eviction_age_seconds",
           "Time since the last use of evicted chunks. Prompts that will not come back and evictions because "
           "of --quota-gb are left out.",
           {}, {"buckets": _AGE_S}),
    Metric(Gauge, "lmcache_l1_capacity_bytes", "Size of L1."),
    Metric(Gauge, "lmcache_l1_ready_bytes", "L1 taken by stored objects, in whole frames."),
    Metric(Gauge, "lmcache_l1_reserved_bytes", "L1 taken by objects that are being written."),
    Metric(Gauge, "lmcache_l1_free_bytes", "Free L1."),
    Metric(Gauge, "lmcache_l1_populated_bytes", "L1 that the system has backed with memory or file space."),
    Metric(Gauge, "lmcache_l1_pinned_bytes", "L1 pinned for copies to and from GPUs; 0 without GPUs."),
    Metric(Gauge, "lmcache_l1_largest_free_bytes", "The largest contiguous free piece of L1."),
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


class Traffic(NamedTuple):
    """Whose requests are counted: a namespace's, or those of a kind of test, which have their own metrics."""

    prefix: str
    labels: Mapping[str, str]


class Metrics:
    """The metrics of one server. A name or label value that is not in the table raises KeyError."""

    def __init__(self) -> None:
        # Without this, every counter and histogram also gets a gauge *_created.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._series: dict[tuple[str, frozenset[tuple[str, str]]], Any] = {}
        self._by_model: dict[str, tuple[Metric, Any]] = {}
        self._namespaces: dict[bytes, Traffic] = {}
        for metric in TABLE:
            self.add(metric)
        self.other = self._add_traffic(OTHER, OTHER)
        started_s = time.time()
        self.gauge("lmcache_build_info", lambda: 1, version=VERSION)
        self.gauge("lmcache_start_time_seconds", lambda: started_s)

    def add(self, metric: Metric) -> None:
        """Adds a row to the table."""
        own = ("model", "namespace") if metric.by_model else ()
        family: Any = metric.kind(
            metric.name, metric.help, (*metric.labels, *own), registry=self._registry, **metric.options
        )
        if metric.by_model:
            self._by_model[metric.name] = (metric, family)
        else:
            self._add(metric, family, {})

    def _add(self, metric: Metric, family: Any, own: Mapping[str, str]) -> None:
        for values in product(*metric.labels.values()):
            pairs = {**dict(zip(metric.labels, values, strict=True)), **own}
            self._series[_key(metric.name, pairs)] = family.labels(**pairs) if pairs else family

    def _add_traffic(self, model: str, namespace: str) -> Traffic:
        labels = {"model": model, "namespace": namespace}
        for metric, family in self._by_model.values():
            self._add(metric, family, labels)
        return Traffic("lmcache_", labels)

    def traffic(self, namespace: bytes, model: str) -> Traffic:
        """The traffic of a namespace, whose series exist from now on. Beyond MAX_NAMESPACES it is the one of
        all others."""
        if namespace not in self._namespaces:
            if len(self._namespaces) >= MAX_NAMESPACES:
                return self.other
            self._namespaces[namespace] = self._add_traffic(model[:MAX_MODEL_CHARS], namespace.hex()[:16])
        return self._namespaces[namespace]

    def of_namespace(self, name: str, label: str, namespace: bytes) -> dict[str, int] | None:
        """A metric of a namespace by the values of `label`; None if it is counted with others."""
        traffic = self._namespaces.get(namespace)
        return self.values(name, label, **traffic.labels) if traffic is not None else None

    def values(self, name: str, label: str, **labels: str) -> dict[str, int]:
        """As `value`, of a metric by model, for each value of `label`."""
        each_value = self._by_model[name][0].labels[label]
        return {each: int(self.value(name, **labels, **{label: each})) for each in each_value}

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        self._series[_key(name, labels)].inc(amount)

    def gauge(self, name: str, read: Callable[[], float], **labels: str) -> None:
        """From now on the gauge shows what `read` returns."""
        self._series[_key(name, labels)].set_function(read)

    def observe(self, name: str, value: float, **labels: str) -> None:
        self._series[_key(name, labels)].observe(value)

    def value(self, name: str, **labels: str) -> float:
        """The present value of a counter or gauge, of all models together unless `labels` names one."""
        if name in self._by_model and "namespace" not in labels:
            all_traffic = (self.other, *self._namespaces.values())
            return sum(self.value(name, **labels, **traffic.labels) for traffic in all_traffic)
        (series,) = self._series[_key(name, labels)].collect()
        return float(series.samples[0].value)

    def count_tokens(
        self, traffic: Traffic, requested: int, computed: int, hit: int, limit: int, missed: Mapping[str, int]
    ) -> None:
        """Count a lookup: `hit` tokens found after `computed` ones, of at most `limit` restorable ones.
        `missed` has the others by reason."""
        prefix, labels = traffic
        miss, tail = limit - computed - hit, requested - limit
        outcomes = {"computed": computed, "hit": hit, "miss": miss, "tail": tail}
        assert min(outcomes.values()) >= 0
        assert sum(missed.values()) == miss
        for outcome, tokens in outcomes.items():
            if tokens:
                self.count(f"{prefix}tokens_total", tokens, outcome=outcome, **labels)
        if "namespace" not in labels:
            return
        self.count("lmcache_tokens_requested_total", requested, **labels)
        for reason, tokens in missed.items():
            self.count("lmcache_missed_tokens_total", tokens, reason=reason, **labels)

    def render(self) -> bytes:
        """The Prometheus text format."""
        return prometheus_client.generate_latest(self._registry)


def _key(name: str, labels: Mapping[str, str]) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())
