"""A tier whose speed is unknown is tried by one fetch at a time, and one that hangs is not the last."""

import asyncio
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from lmcache_client.contract.geometry import FULL, Geometry, GroupSpec, Region
from lmcache_client.contract.messages import Lookup
from lmcache_server.core.cache import Cache, Layout
from lmcache_server.core.pool import FRAME_BYTES
from lmcache_server.l1.memory import L1Memory
from lmcache_server.service import tiers as tiers_module
from lmcache_server.service.fetches import Fetches
from lmcache_server.service.system import System
from lmcache_server.service.tiers import Tiers, TierState
from lmcache_server.telemetry.failures import Failures
from lmcache_server.telemetry.metrics import Metrics
from lmcache_server.tiers.record import Label
from lmcache_server.tiers.worker import Rates, TierWorker

GROUP = GroupSpec(FULL, 16, 0, "", (Region(0, 0, FRAME_BYTES, FRAME_BYTES),))
LAYOUT = Layout(bytes(32), 16, (GROUP,), ((0,),))
SHARDS: Any = {0: SimpleNamespace(geometry=Geometry((GROUP,), 10))}
BAD, GOOD = b"\x01" * 32, b"\x02" * 32


class OneReadHangs:
    """A tier in memory. A read of chunk BAD does not return before `released` is set."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.hangs = threading.Event()
        self.records: dict[str, bytes] = {}

    def present(self, names: Sequence[str]) -> Sequence[bool]:
        return [name in self.records for name in names]

    def read(self, name: str, pieces: Sequence[memoryview]) -> bool:
        if BAD.hex() in name:
            self.hangs.set()
            self.released.wait()
            return False
        record = memoryview(self.records[name])
        for piece in pieces:
            piece[:] = record[: piece.nbytes]
            record = record[piece.nbytes :]
        return True

    def write(self, name: str, pieces: Sequence[memoryview]) -> bool:
        self.records[name] = b"".join(pieces)
        return True

    def close(self) -> None:
        pass


def test_one_read_that_hangs_does_not_end_all_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers_module, "OLD_S", 0.2)
    store: Any = OneReadHangs()

    async def run() -> None:
        loop, nothing, l1 = asyncio.get_running_loop(), None, L1Memory(16 * FRAME_BYTES)
        cache, system = Cache(FRAME_BYTES, 16), System(loop, nothing, nothing)  # type: ignore[arg-type]
        worker = TierWorker("tier", lambda: store, loop, Rates())
        tier = TierState(0, "dir:///nowhere", False, worker)
        tiers = Tiers([tier], l1, Metrics(), Failures(), system)
        known: set[bytes] = set()
        fetches = Fetches(tiers, cache, l1, Metrics(), system, False, known.__contains__, lambda _rooms: None)
        for key in (BAD, GOOD):
            label = Label(LAYOUT.namespace, key, 0, 1, FRAME_BYTES)
            assert await worker.write(label, tiers.payload(((0, 1),), FRAME_BYTES)) == "written"

        async def fetched(key: bytes) -> bool:
            await fetches.fetch(LAYOUT, SHARDS, Lookup("", (key,), 0, 16, 17, 1000), 0, [tier])
            return cache.ready(LAYOUT, [key]) == [1]

        assert not await fetched(GOOD), "the engine that asked has ended meanwhile"
        assert await system.all_ended(30)
        assert cache.num_chunks == 0
        known.add(LAYOUT.namespace)
        assert not await fetched(BAD)
        assert await asyncio.to_thread(store.hangs.wait, 60)
        end_s = system.now_s() + 30
        while not await fetched(GOOD):
            assert system.now_s() < end_s, "nothing is fetched any more"
            await asyncio.sleep(0.02)
        assert cache.reserved_frames == 1, "what the read that hangs may still write to"
        store.released.set()
        assert await system.all_ended(30)
        assert cache.reserved_frames == 0
        cache.check_integrity()
        worker.close(5.0)
        l1.close()

    try:
        uvloop.run(run())
    finally:
        store.released.set()
