"""Every metric of the server, in one table; `python -m lmcache_server.metrics` prints it as a document.

Every series exists, at zero, from the first scrape. Label values are those of the table and no others.
"""

import itertools
import time
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from lmcache_client.contract.version import VERSION

COUNTER = "counter"
GAUGE = "gauge"
HISTOGRAM = "histogram"

_COPY_BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_LOOKUP_BUCKETS = (0.00001, 0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.1)
_AGE_BUCKETS = (1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)


@dataclass(frozen=True)
class Metric:
    """`labels` are pairs of a label's name and all its values; `buckets` are upper bounds."""

    name: str
    kind: str
    help: str
    labels: tuple[tuple[str, tuple[str, ...]], ...] = ()
    buckets: tuple[float, ...] = ()


_DIRECTION = ("direction", ("store", "load"))

TABLE = (
    Metric(
        "lmcache_requests_total",
        COUNTER,
        "Requests of clients by what they asked (other: not understood) and how they ended.",
        (
            (
                "op",
                ("hello", "register", "join", "lookup", "end_request", "retrieve", "store", "clear")
                + ("status", "ping", "goodbye", "other"),
            ),
            ("outcome", ("ok", "refused", "failed")),
        ),
    ),
    Metric("lmcache_tokens_requested_total", COUNTER, "Tokens of the requests that were looked up."),
    Metric(
        "lmcache_tokens_total",
        COUNTER,
        "The same tokens, each in exactly one outcome: computed (the engine held them), hit (served), miss "
        "(not stored, or not restorable), tail (beyond the last whole chunk, or the last token, which the "
        "engine always computes). They add up to lmcache_tokens_requested_total.",
        (("outcome", ("computed", "hit", "miss", "tail")),),
    ),
    Metric(
        "lmcache_objects_total",
        COUNTER,
        "Objects that engines offered: stored, present (held or being written already), busy (too many "
        "copies were waiting), no_room (nothing could be evicted), failed (the copy failed).",
        (("outcome", ("stored", "present", "busy", "no_room", "failed")),),
    ),
    Metric(
        "lmcache_transfer_bytes_total",
        COUNTER,
        "Bytes copied out of engines (store) and into engines (load).",
        (_DIRECTION,),
    ),
    Metric(
        "lmcache_transfer_seconds",
        HISTOGRAM,
        "Time from a copy's request to its end, waiting included.",
        (_DIRECTION,),
        _COPY_BUCKETS,
    ),
    Metric("lmcache_copy_failures_total", COUNTER, "Copies that failed.", (_DIRECTION,)),
    Metric("lmcache_lookup_seconds", HISTOGRAM, "Time to answer a lookup.", (), _LOOKUP_BUCKETS),
    Metric("lmcache_evicted_chunks_total", COUNTER, "Chunks evicted to make room."),
    Metric("lmcache_evicted_bytes_total", COUNTER, "L1 bytes evicted to make room."),
    Metric(
        "lmcache_eviction_age_seconds",
        HISTOGRAM,
        "Time from a chunk's last use to its eviction; short times say that L1 is too small.",
        (),
        _AGE_BUCKETS,
    ),
    Metric("lmcache_l1_capacity_bytes", GAUGE, "Size of L1; the sum of ready, reserved and free."),
    Metric("lmcache_l1_ready_bytes", GAUGE, "L1 bytes in frames of stored objects."),
    Metric("lmcache_l1_reserved_bytes", GAUGE, "L1 bytes in frames of objects being written."),
    Metric("lmcache_l1_free_bytes", GAUGE, "L1 bytes in free frames."),
    Metric("lmcache_l1_largest_free_bytes", GAUGE, "The longest run of free frames."),
    Metric("lmcache_l1_populated_bytes", GAUGE, "L1 bytes that were given memory beforehand."),
    Metric("lmcache_chunks", GAUGE, "Chunks of which something is stored."),
    Metric("lmcache_leases", GAUGE, "Hits promised and not yet fetched, released or expired."),
    Metric("lmcache_sessions", GAUGE, "Connected clients."),
    Metric("lmcache_namespaces", GAUGE, "Namespaces that hold chunks or have an engine."),
    Metric("lmcache_build_info", GAUGE, "Always 1; the version is a label.", (("version", (VERSION,)),)),
    Metric("lmcache_start_time_seconds", GAUGE, "When the server started, in Unix time."),
)

_KINDS: dict[str, type[Counter] | type[Gauge]] = {COUNTER: Counter, GAUGE: Gauge}
Series = Counter | Gauge | Histogram


class Metrics:
    """The metrics of one server. Every method raises KeyError for a name or label not in the table."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._series: dict[tuple[str, ...], Series] = {}
        for metric in TABLE:
            self._declare(metric)
        self.set("lmcache_build_info", 1, version=VERSION)
        self.set("lmcache_start_time_seconds", time.time())

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        """Adds to a counter."""
        series = self._series[_key(name, labels)]
        if not isinstance(series, Counter):
            raise KeyError(f"{name} is not a counter")
        series.inc(amount)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Sets a gauge."""
        series = self._series[_key(name, labels)]
        if not isinstance(series, Gauge):
            raise KeyError(f"{name} is not a gauge")
        series.set(value)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Adds one observation to a histogram."""
        series = self._series[_key(name, labels)]
        if not isinstance(series, Histogram):
            raise KeyError(f"{name} is not a histogram")
        series.observe(value)

    def count_tokens(self, num_tokens: int, *, computed: int, hit: int, limit: int) -> None:
        """Counts each token of one lookup once. Of `num_tokens`, the engine held `computed`, `hit` more
        can be restored, and none beyond `limit` could have been."""
        miss, tail = limit - computed - hit, num_tokens - limit
        if min(computed, hit, miss, tail) < 0:
            raise ValueError(f"{computed} computed and {hit} hit tokens do not fit {limit} of {num_tokens}")
        self.count("lmcache_tokens_requested_total", num_tokens)
        for outcome, amount in (("computed", computed), ("hit", hit), ("miss", miss), ("tail", tail)):
            self.count("lmcache_tokens_total", amount, outcome=outcome)

    def value(self, name: str, **labels: str) -> float:
        """The value of a counter or a gauge."""
        self._series[_key(name, labels)]
        return self._registry.get_sample_value(name, labels) or 0.0

    def render(self) -> bytes:
        """Everything in Prometheus' text format, version 0.0.4."""
        return generate_latest(self._registry)

    def _declare(self, metric: Metric) -> None:
        names = [name for name, _ in metric.labels]
        parent: Series
        if metric.kind == HISTOGRAM:
            parent = Histogram(
                metric.name, metric.help, names, registry=self._registry, buckets=metric.buckets
            )
        else:
            parent = _KINDS[metric.kind](metric.name, metric.help, names, registry=self._registry)
        for values in itertools.product(*(values for _, values in metric.labels)):
            labels = dict(zip(names, values, strict=True))
            self._series[_key(metric.name, labels)] = parent.labels(**labels) if labels else parent


def _key(name: str, labels: dict[str, str]) -> tuple[str, ...]:
    if len(labels) < 2:
        return (name, *labels, *labels.values())
    return (name, *itertools.chain.from_iterable(sorted(labels.items())))


def document() -> str:
    """docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Served at `/metrics` of `--http-host` and `--http-port`. Generated by",
        "`python -m lmcache_server.metrics > docs/metrics.md`; a test compares.",
        "",
        "Every series exists from the first scrape, at zero. Labels take the values listed and no others.",
        "The share of tokens that the server served, of those that it could have:",
        "",
        "```",
        'rate(lmcache_tokens_total{outcome="hit"}[5m])',
        '  / ignoring(outcome) sum without(outcome) (rate(lmcache_tokens_total{outcome=~"hit|miss"}[5m]))',
        "```",
        "",
        "| metric | kind | labels | meaning |",
        "|---|---|---|---|",
    ]
    for metric in TABLE:
        labels = "; ".join(
            f"`{name}`: {'the version' if name == 'version' else ', '.join(values)}"
            for name, values in metric.labels
        )
        lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    lines += ["", "Buckets of the histograms, in seconds:", ""]
    for metric in TABLE:
        if metric.buckets:
            bounds = ", ".join(f"{bound:f}".rstrip("0").rstrip(".") for bound in metric.buckets)
            lines.append(f"* `{metric.name}`: {bounds}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(document(), end="")
