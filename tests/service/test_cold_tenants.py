"""Tiers that are written only with what L1 evicts next also get what a salt at its quota evicts."""

import asyncio

import pytest

from lmcache_client.contract.geometry import FULL, GroupSpec
from lmcache_server.core.cache import Cache, Layout, Reservation
from lmcache_server.core.limits import Limits
from lmcache_server.host.units import GB_BYTES
from lmcache_server.l1.memory import L1Memory
from lmcache_server.service.spills import Spills
from lmcache_server.service.system import System
from lmcache_server.service.tiers import Tiers, TierState
from lmcache_server.telemetry.failures import Failures
from lmcache_server.telemetry.metrics import Metrics
from lmcache_server.tiers.worker import Rates, TierWorker

LAYOUT = Layout(b"n" * 32, 16, (GroupSpec(FULL, 16, 0, "", ()),), ((0,),))
TENANT, QUOTA = b"t" * 16, 8


@pytest.mark.parametrize(("chunks", "written"), [(4, False), (QUOTA, True)])
def test_what_a_full_salt_evicts_next_is_written_before(chunks: int, written: bool) -> None:
    """Most of L1 is colder than its chunks, so they are not in the coldest quarter."""
    loop, l1 = asyncio.new_event_loop(), L1Memory(1 << 16)
    nothing, cache = None, Cache(1, 100, quotas_gb=Limits(QUOTA / GB_BYTES))
    worker = TierWorker("tier", lambda: NotImplemented, loop, Rates())
    system = System(loop, nothing, nothing)  # type: ignore[arg-type]
    tier = TierState(0, "dir:///tier", True, worker)
    tier.breaker.open(system.now_s())  # so that all that is found waits
    tiers = Tiers([tier], l1, Metrics(), Failures(), system)
    spills = Spills(tiers, cache, system, lambda _namespace: False)

    def stored(number: int, tenant: bytes) -> None:
        room = cache.reserve(LAYOUT, number.to_bytes(32, "big"), 0, 0, 1, 1, tenant=tenant)
        assert isinstance(room, Reservation)
        cache.commit(room)
        spills.stored(LAYOUT, [room])

    try:
        for number in range(50):
            stored(number, b"")
        for number in range(chunks):
            stored(100 + number, TENANT)
        waiting = {chunk for chunk, _ in tier.backlog}
        own = [chunk for tenant in cache.tenants for chunk in tenant.line()]
        assert (own[0] in waiting) is written
    finally:
        worker.close(1)
        loop.close()
        l1.close()
