"""What the server says of itself: the status report (JSON), its history, and the gauges of /metrics."""

import dataclasses
import functools
from typing import Any

from lmcache_client.contract.version import VERSION
from lmcache_server.config import Config
from lmcache_server.core.cache import Cache
from lmcache_server.core.pool import FRAME_BYTES
from lmcache_server.l1.memory import L1Memory
from lmcache_server.service.registry import Registry
from lmcache_server.service.system import System
from lmcache_server.telemetry.failures import Failures
from lmcache_server.telemetry.history import History
from lmcache_server.telemetry.metrics import Metrics


class Report:
    """Reads the state of the server. Nothing but `tick` changes anything, however often somebody asks."""

    def __init__(
        self,
        config: Config,
        cache: Cache,
        l1: L1Memory,
        registry: Registry,
        failures: Failures,
        metrics: Metrics,
        system: System,
    ) -> None:
        self._config = config
        self._cache = cache
        self._memory = l1
        self._failures = failures
        self._registry = registry
        self._metrics = metrics
        self._system = system
        self._started_s = system.now_s()
        self._history = History()
        self._declare_gauges()

    def tick(self) -> None:
        """Once a second: forget namespaces that are of no use any more, count what was evicted."""
        self._registry.forget_namespaces()
        evicted = {"chunks": self._cache.evicted_chunks, "bytes": self._cache.evicted_bytes}
        for name, total in evicted.items():
            counter = f"lmcache_evicted_{name}_total"
            self._metrics.count(counter, total - self._metrics.value(counter))
        while self._cache.evicted_ages_s:
            self._metrics.observe("lmcache_eviction_age_seconds", self._cache.evicted_ages_s.pop())
        value = self._metrics.value
        totals = {
            "hit_tokens": value("lmcache_tokens_total", outcome="hit"),
            "miss_tokens": value("lmcache_tokens_total", outcome="miss"),
            "store_bytes": value("lmcache_transfer_bytes_total", direction="store"),
            "load_bytes": value("lmcache_transfer_bytes_total", direction="load"),
        }
        self._history.update(self._system.now_s(), totals)

    def history(self) -> dict[str, Any]:
        """What /history shows."""
        return self._history.report()

    def unready(self) -> str:
        """Why there is no memory to serve from, in a sentence; empty if there is."""
        if not self._cache.total_frames:
            return "L1 has no memory yet: its file is taking the first of its space"
        pins = self._memory.pins
        return pins.failure if pins is not None and not pins.pinned_bytes else ""

    def status(self) -> dict[str, Any]:
        """Everything that `lmcache status` and /status show. Bytes, tokens and seconds as the names say."""
        now_s = self._system.now_s()
        tokens = {
            outcome: int(self._metrics.value("lmcache_tokens_total", outcome=outcome))
            for outcome in ("computed", "hit", "miss", "tail")
        }
        asked = tokens["hit"] + tokens["miss"]
        return {
            "version": VERSION,
            "boot_id": self._registry.boot_id.hex(),
            "pid": self._system.pid,
            "uptime_s": round(now_s - self._started_s, 3),
            "config": dataclasses.asdict(self._config),
            "l1": self._l1(),
            "namespaces": self._namespaces(),
            "sessions": [
                {
                    "session_id": session.session_id,
                    "pid": session.pid,
                    "role": session.role,
                    "engine_id": session.engine_id,
                    "rank": session.shard.rank if session.shard is not None else 0,
                    "client_version": session.client_version,
                    "vllm_version": session.vllm_version,
                    "not_cached": session.not_cached.reason if session.not_cached is not None else "",
                    "age_s": round(now_s - session.started_s, 3),
                }
                for session in self._registry.sessions.values()
            ],
            "tokens": tokens,
            "hit_rate": round(tokens["hit"] / asked, 4) if asked else 0.0,
            "failures": self._failures.report(now_s),
        }

    def _l1(self) -> dict[str, int]:
        cache = self._cache
        return {
            "total_bytes": cache.total_frames * FRAME_BYTES,
            "free_bytes": cache.free_frames * FRAME_BYTES,
            "ready_bytes": cache.used_frames * FRAME_BYTES,
            "reserved_bytes": cache.reserved_frames * FRAME_BYTES,
            "stored_bytes": cache.stored_bytes,
            "populated_bytes": self._memory.populated_bytes,
            "pinned_bytes": self._memory.pinned_bytes,
            "largest_free_bytes": cache.largest_free_run() * FRAME_BYTES,
            "chunks": cache.num_chunks,
            "leases": cache.num_leases,
            "readers": cache.num_readers,
        }

    def _namespaces(self) -> list[dict[str, Any]]:
        chunks = self._cache.namespaces()
        engines: dict[bytes, list[str]] = {}
        for engine in self._registry.engines:
            if engine.layout is not None:
                engines.setdefault(engine.layout.namespace, []).append(engine.engine_id)
        return [
            {**summary, "chunks": chunks.get(namespace, 0), "engines": engines.get(namespace, [])}
            for namespace, summary in self._registry.known.items()
            if namespace in chunks or namespace in engines
        ]

    def _declare_gauges(self) -> None:
        gauge = self._metrics.gauge
        gauge("lmcache_l1_capacity_bytes", lambda: self._l1()["total_bytes"])
        for name in ("ready", "reserved", "free", "populated", "pinned", "largest_free"):
            gauge(f"lmcache_l1_{name}_bytes", functools.partial(lambda key: self._l1()[key], f"{name}_bytes"))
        gauge("lmcache_chunks", lambda: self._cache.num_chunks)
        gauge("lmcache_leases", lambda: self._cache.num_leases)
        gauge("lmcache_sessions", lambda: len(self._registry.sessions))
        gauge("lmcache_namespaces", lambda: len(self._namespaces()))
        gauge("lmcache_worker_memories", lambda: self._memories(False), kind="host")
        gauge("lmcache_worker_memories", lambda: self._memories(True), kind="cuda")

    def _memories(self, on_gpu: bool) -> int:
        shards = [session.shard for session in self._registry.sessions.values()]
        proven = [bool(shard.memory.device) for shard in shards if shard is not None and shard.proven]
        return proven.count(on_gpu)
