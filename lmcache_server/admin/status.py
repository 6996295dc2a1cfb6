"""The server's reports about itself: the status (JSON), its history, and the gauges of /metrics."""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from lmcache_client.contract.version import VERSION
from lmcache_server.config import Config
from lmcache_server.core.cache import Cache
from lmcache_server.core.pool import FRAME_BYTES
from lmcache_server.l1.memory import L1Memory
from lmcache_server.service.planner import SIZES, Planner
from lmcache_server.service.registry import Registry
from lmcache_server.service.sessions import Session
from lmcache_server.service.system import System
from lmcache_server.telemetry.failures import Failures
from lmcache_server.telemetry.history import History
from lmcache_server.telemetry.metrics import Metrics

SHOWN_BYTES = 1 << 17
"""The namespaces of a report take at most so many bytes of JSON, and so do its sessions."""


@dataclass
class Report:
    """Reads the server's state. Only `tick` changes anything, however often somebody asks."""

    config: Config
    cache: Cache
    l1: L1Memory
    registry: Registry
    planner: Planner
    failures: Failures
    metrics: Metrics
    system: System

    def __post_init__(self) -> None:
        self._started_s = self.system.now_s()
        self.history = History()
        self._declare_gauges()

    def tick(self) -> None:
        """Once a second: forget unused namespaces, count evictions, record the history and the lookups."""
        self.registry.forget_namespaces()
        self.planner.flush()
        cache, metrics = self.cache, self.metrics
        for what, total in (("chunks", cache.evicted_chunks), ("bytes", cache.evicted_bytes)):
            counter = f"lmcache_evicted_{what}_total"
            metrics.count(counter, total - metrics.value(counter))
        while cache.evicted_ages_s:
            metrics.observe("lmcache_eviction_age_seconds", cache.evicted_ages_s.pop())
        totals = {
            "hit_tokens": metrics.value("lmcache_tokens_total", outcome="hit"),
            "miss_tokens": metrics.value("lmcache_tokens_total", outcome="miss"),
            "store_bytes": metrics.value("lmcache_transfer_bytes_total", direction="store"),
            "load_bytes": metrics.value("lmcache_transfer_bytes_total", direction="load"),
        }
        self.history.update(self.system.now_s(), totals)

    def selftest_ended(self, error: str) -> None:
        """Count a self-test that succeeded (an empty `error`) or failed."""
        self.metrics.count("lmcache_selftests_total", 1, outcome="failed" if error else "ok")
        if error:
            self.failures.add(self.system.now_s(), "self-test failed", "", error)

    def unready(self) -> str:
        """Why the server has no memory to serve from yet; empty if it has."""
        if not self.cache.total_frames:
            return "L1 has no memory yet: the first part of its file is being allocated"
        pins = self.l1.pins
        return pins.failure if pins is not None and not pins.pinned_bytes else ""

    def status(self) -> dict[str, Any]:
        """The data of `lmcache status` and /status, as JSON values; the names tell the units."""
        now_s = self.system.now_s()
        tokens = {
            outcome: int(self.metrics.value("lmcache_tokens_total", outcome=outcome))
            for outcome in ("computed", "hit", "miss", "tail")
        }
        objects = {
            outcome: int(self.metrics.value("lmcache_objects_total", outcome=outcome))
            for outcome in ("stored", "present", "busy", "no_room", "once", "failed")
        }
        asked = tokens["hit"] + tokens["miss"]
        namespaces = _shown(self._namespaces())
        sessions = _shown(self._session(session, now_s) for session in self.registry.sessions.values())
        return {
            "version": VERSION,
            "boot_id": self.registry.boot_id.hex(),
            "pid": self.system.pid,
            "uptime_s": round(now_s - self._started_s, 3),
            "config": dataclasses.asdict(self.config),
            "l1": {name: read() for name, read in self._l1_figures().items()},
            "namespaces": namespaces,
            "namespaces_left_out": self._num_namespaces() - len(namespaces),
            "sessions": sessions,
            "sessions_left_out": len(self.registry.sessions) - len(sessions),
            "tokens": tokens,
            "objects": objects,
            "hit_rate": round(tokens["hit"] / asked, 4) if asked else 0.0,
            "demand": self.planner.report(now_s),
            "failures": self.failures.report(now_s),
        }

    @staticmethod
    def _session(session: Session, now_s: float) -> dict[str, Any]:
        names = ("session_id", "pid", "role", "engine_id", "client_version", "vllm_version")
        return {name: getattr(session, name) for name in names} | {
            "rank": session.shard.rank if session.shard is not None else 0,
            "not_cached": session.not_cached.reason if session.not_cached is not None else "",
            "age_s": round(now_s - session.started_s, 3),
        }

    def _l1_figures(self) -> dict[str, Callable[[], int]]:
        return {
            "total_bytes": lambda: self.cache.total_frames * FRAME_BYTES,
            "free_bytes": lambda: self.cache.free_frames * FRAME_BYTES,
            "ready_bytes": lambda: self.cache.used_frames * FRAME_BYTES,
            "stored_bytes": lambda: self.cache.stored_bytes,
            "reserved_bytes": lambda: self.cache.reserved_frames * FRAME_BYTES,
            "largest_free_bytes": lambda: self.cache.largest_free_run() * FRAME_BYTES,
            "populated_bytes": lambda: self.l1.populated_bytes, "pinned_bytes": lambda: self.l1.pinned_bytes,
            "chunks": lambda: self.cache.num_chunks, "leases": lambda: self.cache.num_leases,
            "readers": lambda: self.cache.num_readers,
        }  # fmt: skip

    def _namespaces(self) -> list[dict[str, Any]]:
        """Those with engines first."""
        chunks, engines = self.cache.namespaces(), self._engines()
        known = [
            {**summary, "chunks": len(chunks.get(namespace, ())), "engines": engines.get(namespace, [])}
            for namespace, summary in self.registry.known.items()
            if namespace in chunks or namespace in engines
        ]
        return sorted(known, key=lambda each: not each["engines"])

    def _num_namespaces(self) -> int:
        chunks = self.cache.namespaces()
        return len(chunks) + sum(namespace not in chunks for namespace in self._engines())

    def _engines(self) -> dict[bytes, list[str]]:
        """The ids of the engines of each namespace that has any."""
        engines: dict[bytes, list[str]] = {}
        for engine in self.registry.engines:
            if engine.layout is not None:
                engines.setdefault(engine.layout.namespace, []).append(engine.engine_id)
        return engines

    def _declare_gauges(self) -> None:
        gauge, figures = self.metrics.gauge, self._l1_figures()
        for name in ("ready_bytes", "reserved_bytes", "free_bytes", "populated_bytes", "pinned_bytes",
                     "largest_free_bytes"):  # fmt: skip
            gauge(f"lmcache_l1_{name}", figures[name])
        gauge("lmcache_l1_capacity_bytes", figures["total_bytes"])
        gauge("lmcache_chunks", figures["chunks"])
        gauge("lmcache_leases", figures["leases"])
        gauge("lmcache_sessions", lambda: len(self.registry.sessions))
        gauge("lmcache_namespaces", self._num_namespaces)
        for size in SIZES:
            gauge("lmcache_demand_hit_ratio", functools.partial(self.planner.hit_ratio, size), l1=size)
        for kind in ("host", "cuda"):
            gauge("lmcache_worker_memories", functools.partial(self._memories, kind == "cuda"), kind=kind)

    def _memories(self, on_gpu: bool) -> int:
        shards = [session.shard for session in self.registry.sessions.values()]
        proven = [bool(shard.memory.device) for shard in shards if shard is not None and shard.proven]
        return proven.count(on_gpu)


def _shown(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first entries, as many as fit into SHOWN_BYTES together."""
    shown: list[dict[str, Any]] = []
    left = SHOWN_BYTES
    for entry in entries:
        left -= len(json.dumps(entry))
        if left < 0:
            break
        shown.append(entry)
    return shown
