"""Tiers that were left alone, and how the server finds out that they are well again."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import uvloop

from lmcache_server.service import tiers as tiers_module
from lmcache_server.service.system import System
from lmcache_server.service.tiers import Tiers, TierState
from lmcache_server.telemetry.failures import Failures
from lmcache_server.telemetry.metrics import Metrics
from lmcache_server.tiers.worker import Rates, TierWorker


class FirstCallHangs:
    """A tier whose first call does not return before `released` is set."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.calls = 0

    def present(self, names: Sequence[str]) -> Sequence[bool]:
        self.calls += 1
        if self.calls == 1:
            self.released.wait()
        return [False] * len(names)

    def close(self) -> None:
        pass


def test_a_try_that_hangs_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers_module, "STUCK_S", 0.05)
    store: Any = FirstCallHangs()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        nothing: Any = None
        system = System(loop, nothing, nothing)
        worker = TierWorker("tier", lambda: store, loop, Rates())
        tier = TierState(0, "dir:///nowhere", False, worker)
        tiers = Tiers([tier], nothing, Metrics(), Failures(), system)
        tier.breaker.open(system.now_s())
        end_s = system.now_s() + 60
        while tier.breaker.is_open and system.now_s() < end_s:
            tier.breaker._retry_s = 0.0  # nobody waits for the next try
            tiers.tick()
            await asyncio.sleep(0.02)
        assert not tier.breaker.is_open
        store.released.set()
        worker.close(5.0)

    try:
        uvloop.run(run())
    finally:
        store.released.set()
