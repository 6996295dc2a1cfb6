"""The server's reports about itself: the status (JSON), its history, and the gauges of /metrics."""

import functools
import json
import socket
from collections.abc import Callable, Iterable
from typing import Any

from lmcache_client.contract.version import VERSION
from lmcache_server.config import values
from lmcache_server.core.pool import FRAME_BYTES
from lmcache_server.service.engines import Session
from lmcache_server.service.option import Base
from lmcache_server.telemetry.history import History
from lmcache_server.telemetry.metrics import TESTS

SHOWN_BYTES = 1 << 17
"""The namespaces of a report take at most so many bytes of JSON, and so do its sessions."""


class Report:
    """Reads the server's state. Only `tick` changes anything, however often somebody asks."""

    def __init__(self, base: Base) -> None:
        self.config, self.cache, self.l1, self.sessions = base.config, base.cache, base.l1, base.sessions
        self.options, self.failures = base.options, base.failures
        self.metrics, self.system = base.metrics, base.system
        self._started_s = self.system.now_s()
        self.history = History()
        gauge, figures = self.metrics.gauge, self._l1_figures()
        for name in ("ready_bytes", "reserved_bytes", "free_bytes", "populated_bytes", "pinned_bytes",
                     "largest_free_bytes"):  # fmt: skip
            gauge(f"lmcache_l1_{name}", figures[name])
        gauge("lmcache_l1_capacity_bytes", figures["total_bytes"])
        for name in ("chunks", "leases"):
            gauge(f"lmcache_{name}", figures[name])
        gauge("lmcache_sessions", lambda: len(self.sessions.by_identity))
        gauge("lmcache_namespaces", self._num_namespaces)
        for kind in ("host", "cuda"):
            gauge("lmcache_worker_memories", functools.partial(self._memories, kind == "cuda"), kind=kind)

    def tick(self) -> None:
        """Once a second: forget unused namespaces, count evictions, record the history."""
        self.sessions.forget_namespaces()
        cache, metrics = self.cache, self.metrics
        # Prometheus misses the first counts of a series that it has not seen at zero.
        for engine in self.sessions.engines:
            if engine.layout is not None and not engine.layout.ephemeral:
                metrics.traffic(engine.layout.namespace, engine.layout.model)
        for what in ("evicted_chunks", "evicted_bytes"):
            counter = f"lmcache_{what}_total"
            metrics.count(counter, getattr(cache, what) - metrics.value(counter))
        while cache.evicted_ages_s:
            metrics.observe("lmcache_eviction_age_seconds", cache.evicted_ages_s.pop())
        moved_by_tests = "lmcache_test_transfer_bytes_total"
        totals = {
            "hit_tokens": metrics.value("lmcache_tokens_total", outcome="hit"),
            "miss_tokens": metrics.value("lmcache_tokens_total", outcome="miss"),
            "store_bytes": metrics.value("lmcache_transfer_bytes_total", direction="store"),
            "load_bytes": metrics.value("lmcache_transfer_bytes_total", direction="load"),
            "test_bytes": sum(self._of_tests(moved_by_tests, direction=way) for way in ("store", "load")),
        }
        self.history.update(self.system.now_s(), totals)

    def _of_tests(self, name: str, **labels: str) -> float:
        return sum(self.metrics.value(name, test=test, **labels) for test in TESTS["test"])

    def selftest_ended(self, error: str) -> None:
        """Count a self-test that succeeded (an empty `error`) or failed."""
        self.metrics.count("lmcache_selftests_total", 1, outcome="failed" if error else "ok")
        if error:
            self.failures.add(self.system.now_s(), "self-test failed", "", error)

    def status(self, explain: bool = False) -> dict[str, Any]:
        """The data of `lmcache status` and /status, as JSON values; the names tell the units. With `explain`
        also what the namespaces of live engines are made of."""
        now_s = self.system.now_s()
        tokens = self.metrics.values("lmcache_tokens_total", "outcome")
        asked = tokens["hit"] + tokens["miss"]
        namespaces = _shown(self._namespaces())
        sessions = _shown(self._session(session, now_s) for session in self.sessions.by_identity.values())
        return {
            "version": VERSION,
            "host": socket.gethostname(),
            "boot_id": self.sessions.boot_id.hex(),
            "pid": self.system.pid,
            "uptime_s": round(now_s - self._started_s, 3),
            "config": values(self.config),
            "l1": {name: read() for name, read in self._l1_figures().items()},
            "namespaces": namespaces,
            "namespaces_left_out": self._num_namespaces() - len(namespaces),
            "sessions": sessions,
            "sessions_left_out": len(self.sessions.by_identity) - len(sessions),
            "tokens": tokens,
            "objects": self.metrics.values("lmcache_objects_total", "outcome"),
            "hit_rate": round(tokens["hit"] / asked, 4) if asked else 0.0,
            "test_hit_tokens": int(self._of_tests("lmcache_test_tokens_total", outcome="hit")),
            "failures": self.failures.report(now_s),
            "explained": _shown(self.sessions.engines.explained()) if explain else [],
            **{name: value for option in self.options for name, value in option.report(now_s).items()},
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
            {
                **summary,
                "chunks": len(chunks.get(namespace, ())),
                "engines": engines.get(namespace, []),
                "tokens": self.metrics.of_namespace("lmcache_tokens_total", "outcome", namespace),
                "missed": self.metrics.of_namespace("lmcache_missed_tokens_total", "reason", namespace),
            }
            for namespace, summary in self.sessions.known.items()
            if namespace in chunks or namespace in engines
        ]
        return sorted(known, key=lambda each: not each["engines"])

    def _num_namespaces(self) -> int:
        return len(self.cache.namespaces().keys() | self._engines().keys())

    def _engines(self) -> dict[bytes, list[str]]:
        """The ids of the engines of each namespace that has any."""
        engines: dict[bytes, list[str]] = {}
        for engine in self.sessions.engines:
            if engine.layout is not None:
                engines.setdefault(engine.layout.namespace, []).append(engine.engine_id)
        return engines

    def _memories(self, on_gpu: bool) -> int:
        shards = [session.shard for session in self.sessions.by_identity.values()]
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
