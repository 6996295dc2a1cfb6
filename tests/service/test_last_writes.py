"""What a clean stop still writes to a tier."""

import asyncio
from collections.abc import Sequence
from typing import Any

from lmcache_client.contract.geometry import FULL, GroupSpec
from lmcache_server.core.cache import Cache, Layout, Reservation
from lmcache_server.core.pool import FRAME_BYTES
from lmcache_server.l1.memory import L1Memory
from lmcache_server.service import spills as spills_module
from lmcache_server.service.spills import Spills
from lmcache_server.service.system import System
from lmcache_server.service.tiers import Tiers, TierState
from lmcache_server.telemetry.failures import Failures
from lmcache_server.telemetry.metrics import Metrics
from lmcache_server.tiers.worker import Rates, TierWorker

LAYOUT = Layout(b"n" * 32, 16, (GroupSpec(FULL, 16, 0, "", ()),), ((0,),))
CHUNKS = 8


class Counting:
    """A tier that keeps nothing."""

    written = 0

    def present(self, names: Sequence[str]) -> Sequence[bool]:
        return [False] * len(names)

    def write(self, name: str, pieces: Sequence[memoryview]) -> bool:
        self.written += 1
        return True

    def close(self) -> None:
        pass


def test_what_waits_behind_many_evicted_objects_is_written(monkeypatch: Any) -> None:
    monkeypatch.setattr(spills_module, "MAX_GONE", CHUNKS // 2)
    store: Any = Counting()

    async def run() -> None:
        loop, nothing, l1 = asyncio.get_running_loop(), None, L1Memory(CHUNKS * FRAME_BYTES)
        cache, system = Cache(FRAME_BYTES, CHUNKS), System(loop, nothing, nothing)  # type: ignore[arg-type]
        tier = TierState(0, "tier", False, TierWorker("tier", lambda: store, loop, Rates()))
        tiers = Tiers([tier], l1, Metrics(), Failures(), system)
        spills = Spills(tiers, cache, system, lambda _namespace: False)
        spills.pause()
        for number in range(2 * CHUNKS):
            room = cache.reserve(LAYOUT, number.to_bytes(32, "big"), 0, 0, 1, FRAME_BYTES)
            assert isinstance(room, Reservation)
            cache.commit(room)
            spills.stored(LAYOUT, [room])
        await spills.flush()
        assert (store.written, len(tier.backlog)) == (CHUNKS, 0)
        await spills.close()
        l1.close()

    asyncio.run(run())
