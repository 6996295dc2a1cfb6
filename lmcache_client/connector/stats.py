"""Counts the loads and stores of an engine for vLLM's own log line and its /metrics.

Interfaces: vLLM 0.32, distributed/kv_transfer/kv_connector/v1/metrics.py. Both sides of the connector count
into a `TransferStats`. After each step vLLM takes it, adds up the workers and the scheduler side, and passes
the numbers as a plain dict to its logger and to `PromMetrics` in the frontend.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric

LOADS, FAILED_LOADS, LOADED_TOKENS = "loads", "failed_loads", "loaded_tokens"
LOADED_BYTES, LOAD_SECONDS = "loaded_bytes", "load_seconds"
STORED, PRESENT, DROPPED = "stored_objects", "present_objects", "dropped_objects"
FAILED_STORES, LATE_LOOKUPS, IGNORED_HINTS = "failed_stores", "late_lookups", "ignored_hints"
CONNECTED = "connected"

COUNTERS = {
    LOADS: "Requests whose load from the lmcache server succeeded",
    FAILED_LOADS: "Requests that were recomputed because their load from the lmcache server failed",
    LOADED_TOKENS: "Tokens that were loaded from the lmcache server instead of computed",
    LOADED_BYTES: "Bytes loaded from the lmcache server, over all workers",
    STORED: "Objects (one chunk of one group of one worker) that the lmcache server stored",
    PRESENT: "Objects offered to the lmcache server that it already had or was already storing",
    DROPPED: "Objects offered to the lmcache server that it did not store",
    FAILED_STORES: "Store requests, one per step and worker, that the lmcache server did not fulfil",
    LATE_LOOKUPS: "Lookups that the lmcache server did not answer in time, so that they found nothing",
    IGNORED_HINTS: "Hints of requests that are unknown or have a value that is not valid",
}
PREFIX = "vllm:lmcache_mp_"
LOAD_SECONDS_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


@dataclass
class TransferStats(KVConnectorStats):
    """`data` has the counters above that are not zero and, under LOAD_SECONDS, the duration of every load of
    every worker, failed ones included, from the request to the reply. The scheduler side adds CONNECTED, 0 or
    1: whether the server serves this engine."""

    def count(self, name: str, amount: int = 1) -> None:
        if amount:
            self.data[name] = self.data.get(name, 0) + amount

    def observe_load(self, seconds: float) -> None:
        self.data.setdefault(LOAD_SECONDS, []).append(seconds)

    def take(self) -> "TransferStats | None":
        """Returns and resets the counts since the last call; None if there are none."""
        if self.is_empty():
            return None
        taken = TransferStats(self.data)
        self.reset()
        return taken

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> "TransferStats":
        """Returns the sum and changes neither operand."""
        total = TransferStats(dict(self.data))
        for name, value in other.data.items():
            adds_up = name in total.data and name != CONNECTED
            total.data[name] = total.data[name] + value if adds_up else value
        return total

    def reduce(self) -> dict[str, int | float]:
        """The numbers for vLLM's log line; times are in milliseconds."""
        numbers = {name: self.data[name] for name in COUNTERS if name in self.data}
        seconds = self.data.get(LOAD_SECONDS)
        if seconds:
            numbers["mean_load_ms"] = round(1e3 * sum(seconds) / len(seconds), 3)
            numbers["max_load_ms"] = round(1e3 * max(seconds), 3)
        if CONNECTED in self.data:
            numbers[CONNECTED] = self.data[CONNECTED]
        return numbers


class PromMetrics(KVConnectorPromMetrics):
    """The time series of all engines of a frontend, which exist, at zero, from the start. Only the series of
    CONNECTED begins with the engine's first step, because nobody knows it earlier."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        metric_types: "dict[type[PromMetric], Any]",
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter, histogram = metric_types[Counter], metric_types[Histogram]
        self._counters = {
            name: create_metric_per_engine(
                counter(name=PREFIX + name, documentation=f"{text}.", labelnames=labelnames),
                per_engine_labelvalues,
            )
            for name, text in COUNTERS.items()
        }
        self._load_seconds = create_metric_per_engine(
            histogram(
                name=PREFIX + LOAD_SECONDS,
                documentation="Histogram of the duration of one worker's load from the lmcache server.",
                buckets=LOAD_SECONDS_BUCKETS,
                labelnames=labelnames,
            ),
            per_engine_labelvalues,
        )
        self._connected = metric_types[Gauge](
            name=PREFIX + CONNECTED,
            documentation="Whether the lmcache server served this engine at its last step (1) or not (0).",
            labelnames=labelnames,
            multiprocess_mode="mostrecent",
        )
        self._labels = per_engine_labelvalues

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, counters in self._counters.items():
            amount = transfer_stats_data.get(name)
            if amount:
                counters[engine_idx].inc(amount)
        for seconds in transfer_stats_data.get(LOAD_SECONDS, ()):
            self._load_seconds[engine_idx].observe(seconds)
        if CONNECTED in transfer_stats_data:
            self._connected.labels(*self._labels[engine_idx]).set(transfer_stats_data[CONNECTED])
