"""Nothing waits for tiers that need not."""

import asyncio
import threading

import pytest
from harness.waiting import wait_until

from lmcache_client.contract.geometry import FULL, GroupSpec
from lmcache_server import app
from lmcache_server.config import Config
from lmcache_server.core.cache import Cache, Layout, Reservation
from lmcache_server.l1.memory import L1Memory
from lmcache_server.service.spills import SLICE_CHUNKS, Spills
from lmcache_server.service.system import System
from lmcache_server.service.tiers import Tiers, TierState
from lmcache_server.telemetry.failures import Failures
from lmcache_server.telemetry.metrics import Metrics
from lmcache_server.tiers.worker import Rates, TierWorker
from lmcache_server.transfer.gpus import Gpus
from lmcache_server.transfer.pins import Pins

CHUNKS = 4 * 2000
LAYOUT = Layout(b"n" * 32, 16, (GroupSpec(FULL, 16, 0, "", ()),), ((0,),))


def test_a_large_index_is_not_looked_through_at_once() -> None:
    """Once a second, 10,000 chunks stopped all lookups for up to 0.1 s."""
    loop, l1 = asyncio.new_event_loop(), L1Memory(1 << 16)
    cache, gpus = Cache(1, CHUNKS), Gpus()
    for number in range(CHUNKS):
        room = cache.reserve(LAYOUT, number.to_bytes(32, "big"), 0, 0, 1, 1)
        assert isinstance(room, Reservation)
        cache.commit(room)
    system = System(loop, gpus, Pins(gpus, l1.base_address, l1.num_bytes, 1 << 16))
    worker = TierWorker("tier", lambda: NotImplemented, loop, Rates())
    tier = TierState(0, "dir:///tier", True, worker)
    tier.breaker.open(system.now_s())  # so that all that is found waits
    tiers = Tiers([tier], l1, Metrics(), Failures(), system)
    spills = Spills(tiers, cache, system, lambda _namespace: False)

    def turn() -> int:
        loop.run_until_complete(asyncio.sleep(0))
        return len(tier.backlog)

    spills.tick()
    assert 0 < turn() <= SLICE_CHUNKS
    wait_until(lambda: turn() == CHUNKS // 4)
    spills.pause()
    assert loop.run_until_complete(system.all_ended(30))
    worker.close(1)
    loop.close()
    l1.close()


def test_tiers_are_opened_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, two stores that do not answer made the start wait twice."""
    both = threading.Barrier(2)
    monkeypatch.setattr(app, "OPEN_TIER_S", 60.0)
    monkeypatch.setattr(app.urls, "check_installed", lambda _: None)
    monkeypatch.setattr(app.urls, "open_tier", lambda *_: both.wait(10))

    async def opened() -> list[bool]:
        config = Config(tier=("valkey://one", "valkey://two"))
        tiers = await app.open_tiers(config, asyncio.get_running_loop())
        return [tier.breaker.is_open for tier in tiers]

    assert asyncio.run(opened()) == [False, False]
