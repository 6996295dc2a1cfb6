"""What the server says of itself: the status report (JSON), its history, and the gauges of /metrics."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

from lmcache_client.contract.version import VERSION
from lmcache_server.config import Config
from lmcache_server.core.cache import Cache
from lmcache_server.core.pool import FRAME_BYTES
from lmcache_server.l1.memory import L1Memory
from lmcache_server.service.registry import Registry
from lmcache_server.service.sessions import Session
from lmcache_server.service.system import System
from lmcache_server.telemetry.failures import Failures
from lmcache_server.telemetry.history import History
from lmcache_server.telemetry.metrics import Metrics


@dataclass
class Report:
    """Reads the state of the server. Nothing but `tick` changes anything, however often somebody asks."""

    config: Config
    cache: Cache
    l1: L1Memory
    registry: Registry
    failures: Failures
    metrics: Metrics
    system: System

    def __post_init__(self) -> None:
        self._started_s = self.system.now_s()
        self.history = History()
        self._declare_gauges()

    def tick(self) -> None:
        """Once a second: forget namespaces that are of no use any more, count what was evicted."""
        self.registry.forget_namespaces()
        evicted = {"chunks": self.cache.evicted_chunks, "bytes": self.cache.evicted_bytes}
        for name, total in evicted.items():
            counter = f"lmcache_evicted_{name}_total"
            self.metrics.count(counter, total - self.metrics.value(counter))
        while self.cache.evicted_ages_s:
            self.metrics.observe("lmcache_eviction_age_seconds", self.cache.evicted_ages_s.pop())
        value = self.metrics.value
        tokens = {each: value("lmcache_tokens_total", outcome=each) for each in ("hit", "miss")}
        copied = {each: value("lmcache_transfer_bytes_total", direction=each) for each in ("store", "load")}
        totals = {f"{each}_tokens": count for each, count in tokens.items()}
        totals |= {f"{each}_bytes": count for each, count in copied.items()}
        self.history.update(self.system.now_s(), totals)

    def selftest_ended(self, error: str) -> None:
        """A self-test has ended: well, or with this error."""
        self.metrics.count("lmcache_selftests_total", 1, outcome="failed" if error else "ok")
        if error:
            self.failures.add(self.system.now_s(), "self-test failed", "", error)

    def unready(self) -> str:
        """Why there is no memory to serve from, in a sentence; empty if there is."""
        if not self.cache.total_frames:
            return "L1 has no memory yet: its file is taking the first of its space"
        pins = self.l1.pins
        return pins.failure if pins is not None and not pins.pinned_bytes else ""

    def status(self) -> dict[str, Any]:
        """Everything that `lmcache status` and /status show. Bytes, tokens and seconds as the names say."""
        now_s = self.system.now_s()
        tokens = {
            outcome: int(self.metrics.value("lmcache_tokens_total", outcome=outcome))
            for outcome in ("computed", "hit", "miss", "tail")
        }
        asked = tokens["hit"] + tokens["miss"]
        return {
            "version": VERSION,
            "boot_id": self.registry.boot_id.hex(),
            "pid": self.system.pid,
            "uptime_s": round(now_s - self._started_s, 3),
            "config": dataclasses.asdict(self.config),
            "l1": self._l1(),
            "namespaces": self._namespaces(),
            "sessions": [self._session(session, now_s) for session in self.registry.sessions.values()],
            "tokens": tokens,
            "hit_rate": round(tokens["hit"] / asked, 4) if asked else 0.0,
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

    def _l1(self) -> dict[str, int]:
        cache = self.cache
        return {
            "total_bytes": cache.total_frames * FRAME_BYTES, "free_bytes": cache.free_frames * FRAME_BYTES,
            "ready_bytes": cache.used_frames * FRAME_BYTES, "stored_bytes": cache.stored_bytes,
            "reserved_bytes": cache.reserved_frames * FRAME_BYTES,
            "largest_free_bytes": cache.largest_free_run() * FRAME_BYTES,
            "populated_bytes": self.l1.populated_bytes, "pinned_bytes": self.l1.pinned_bytes,
            "chunks": cache.num_chunks, "leases": cache.num_leases, "readers": cache.num_readers,
        }  # fmt: skip

    def _namespaces(self) -> list[dict[str, Any]]:
        chunks = self.cache.namespaces()
        engines: dict[bytes, list[str]] = {}
        for engine in self.registry.engines:
            if engine.layout is not None:
                engines.setdefault(engine.layout.namespace, []).append(engine.engine_id)
        return [
            {**summary, "chunks": chunks.get(namespace, 0), "engines": engines.get(namespace, [])}
            for namespace, summary in self.registry.known.items()
            if namespace in chunks or namespace in engines
        ]

    def _declare_gauges(self) -> None:
        gauge = self.metrics.gauge
        for name in ("ready", "reserved", "free", "populated", "pinned", "largest_free"):
            gauge(f"lmcache_l1_{name}_bytes", functools.partial(lambda key: self._l1()[key], f"{name}_bytes"))
        gauge("lmcache_l1_capacity_bytes", lambda: self._l1()["total_bytes"])
        gauge("lmcache_chunks", lambda: self.cache.num_chunks)
        gauge("lmcache_leases", lambda: self.cache.num_leases)
        gauge("lmcache_sessions", lambda: len(self.registry.sessions))
        gauge("lmcache_namespaces", lambda: len(self._namespaces()))
        for kind in ("host", "cuda"):
            gauge("lmcache_worker_memories", functools.partial(self._memories, kind == "cuda"), kind=kind)

    def _memories(self, on_gpu: bool) -> int:
        shards = [session.shard for session in self.registry.sessions.values()]
        proven = [bool(shard.memory.device) for shard in shards if shard is not None and shard.proven]
        return proven.count(on_gpu)
