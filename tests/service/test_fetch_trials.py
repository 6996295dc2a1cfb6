"""A tier whose speed is unknown is tried by one fetch at a time, and one that hangs is not the last. One that
seemed slow is soon tried again."""

import asyncio
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from lmcache_client.contract.geometry import FULL, RECURRENT, Geometry, GroupSpec, Region
from lmcache_client.contract.messages import Lookup
from lmcache_server.core.cache import Cache, Layout
from lmcache_server.core.limits import Limits
from lmcache_server.core.pool import FRAME_BYTES
from lmcache_server.core.tiering import SLOW_OLD_S
from lmcache_server.host.units import GB_BYTES
from lmcache_server.l1.memory import L1Memory
from lmcache_server.service import fetches as fetches_module
from lmcache_server.service import tiers as tiers_module
from lmcache_server.service.fetches import Fetches
from lmcache_server.service.spills import Spills
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


class AllReadsWait(OneReadHangs):
    """No read returns before `released` is set."""

    def read(self, name: str, pieces: Sequence[memoryview]) -> bool:
        self.released.wait()
        return super().read(name, pieces)


class CountsQuestions(OneReadHangs):
    """Counts how often it is asked what it has."""

    asked = 0

    def present(self, names: Sequence[str]) -> Sequence[bool]:
        self.asked += 1
        return super().present(names)


class Setting:
    """Fetches from `store`, which has BAD and GOOD; of L1 and the tier, nothing else is there."""

    def __init__(
        self, store: Any, loop: asyncio.AbstractEventLoop, quota_frames: float = float("inf")
    ) -> None:
        nothing: Any = None
        quotas = Limits(quota_frames * FRAME_BYTES / GB_BYTES)
        self.l1, self.cache = L1Memory(16 * FRAME_BYTES), Cache(FRAME_BYTES, 16, quotas_gb=quotas)
        self.system = System(loop, nothing, nothing)
        self.worker = TierWorker("tier", lambda: store, loop, Rates())
        self.tier = TierState(0, "dir:///nowhere", False, self.worker)
        self.known: set[bytes] = set()
        self.tiers = Tiers([self.tier], self.l1, Metrics(), Failures(), self.system)
        settings = Metrics(), self.system, False, self.known.__contains__, lambda _rooms: None
        self.fetches = Fetches(self.tiers, self.cache, self.l1, *settings)

    async def write(self, keys: Sequence[bytes] = (BAD, GOOD), bit: int = 0) -> None:
        for key in keys:
            label = Label(LAYOUT.namespace, key, bit, 1, FRAME_BYTES)
            payload = self.tiers.payload(((0, 1),), FRAME_BYTES)
            assert await self.worker.write(label, payload) == "written"

    def has(self, key: bytes) -> bool:
        return self.cache.ready(LAYOUT, [key]) == [1]

    async def fetched(self, key: bytes) -> bool:
        """Whether a lookup has waited for the chunk, which takes an engine 16 ms."""
        await self.fetches.fetch(LAYOUT, SHARDS, Lookup("", (key,), 0, 16, 17, 1000), 0, [self.tier])
        return self.has(key)

    def fetching(self, keys: Sequence[bytes]) -> "asyncio.Task[int]":
        """A lookup of a chain that would take an engine a minute."""
        tokens = 16 * len(keys)
        message = Lookup("", tuple(keys), 0, tokens, tokens + 1, 1)
        return asyncio.create_task(self.fetches.fetch(LAYOUT, SHARDS, message, 0, [self.tier]))

    async def reserved(self, frames: int) -> None:
        """Waits until so many frames are reserved, and sees that they stay so."""
        end_s = self.system.now_s() + 30
        while self.cache.reserved_frames < frames and self.system.now_s() < end_s:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert self.cache.reserved_frames == frames

    def close(self) -> None:
        self.cache.check_integrity()
        self.worker.close(5.0)
        self.l1.close()


def test_one_read_that_hangs_does_not_end_all_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers_module, "OLD_S", 0.2)
    store: Any = OneReadHangs()

    async def run() -> None:
        it = Setting(store, asyncio.get_running_loop())
        await it.write()
        assert not await it.fetched(GOOD), "the engine that asked has ended meanwhile"
        assert await it.system.all_ended(30)
        assert it.cache.num_chunks == 0
        it.known.add(LAYOUT.namespace)
        assert not await it.fetched(BAD)
        assert await asyncio.to_thread(store.hangs.wait, 60)
        end_s = it.system.now_s() + 30
        while not await it.fetched(GOOD):
            assert it.system.now_s() < end_s, "nothing is fetched any more"
            await asyncio.sleep(0.02)
        assert it.cache.reserved_frames == 1, "what the read that hangs may still write to"
        store.released.set()
        assert await it.system.all_ended(30)
        assert it.cache.reserved_frames == 0
        it.close()

    try:
        uvloop.run(run())
    finally:
        store.released.set()


def test_a_lookup_waits_no_longer_than_its_patience_and_what_comes_later_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if the engine does not say how fast it computes, so that nobody knows what waiting saves."""
    monkeypatch.setattr(fetches_module, "fetch_patience_s", lambda _num_tokens: 0.1)
    store: Any = AllReadsWait()

    async def run() -> None:
        it = Setting(store, asyncio.get_running_loop())
        await it.write([GOOD])
        it.known.add(LAYOUT.namespace)
        fetch = it.fetches.fetch(LAYOUT, SHARDS, Lookup("", (GOOD,), 0, 16, 17), 0, [it.tier])
        await asyncio.wait_for(fetch, 30)
        assert not it.has(GOOD)
        store.released.set()
        assert await it.system.all_ended(30)
        assert it.has(GOOD), "for the next request"
        it.close()

    try:
        uvloop.run(run())
    finally:
        store.released.set()


def test_a_tier_that_seemed_slow_is_tried_again_by_a_fetch_that_nobody_waits_for() -> None:
    """Its only measure may be of a moment in which the machine was busy."""
    store: Any = OneReadHangs()

    async def run() -> None:
        it = Setting(store, asyncio.get_running_loop())
        await it.write()
        it.known.add(LAYOUT.namespace)
        speed = it.tier.speed
        speed.add(10**6, 1.0, it.system.now_s())
        assert not await it.fetched(GOOD)
        assert await it.system.all_ended(30)
        assert not it.has(GOOD), "it has just been seen to be slow"
        speed.bytes_per_s = 0.0
        speed.add(10**6, 1.0, it.system.now_s() - SLOW_OLD_S - 1)
        assert not await it.fetched(GOOD), "nobody waits"
        assert await it.system.all_ended(30)
        assert it.has(GOOD)
        assert speed.bytes_per_s > 2e6, "this fetch has told how fast it is now"
        it.close()

    uvloop.run(run())


def test_lookups_that_plan_at_the_same_time_fetch_a_quarter_of_l1_together() -> None:
    """Their questions may be answered in one turn of a busy loop."""
    store: Any = AllReadsWait()

    async def run() -> None:
        it = Setting(store, asyncio.get_running_loop())
        chains = [[bytes([number]) * 32 for number in range(first, first + 4)] for first in (10, 20, 30)]
        await it.write([key for chain in chains for key in chain])
        it.known.add(LAYOUT.namespace)
        it.tier.speed.add(10**9, 1.0, it.system.now_s())
        tasks = [it.fetching(chain) for chain in chains]
        await asyncio.sleep(0)
        time.sleep(0.1)  # the loop is busy while the tier answers
        await it.reserved(4)  # a quarter of 16
        store.released.set()
        await asyncio.gather(*tasks)
        assert await it.system.all_ended(30)
        it.close()

    try:
        uvloop.run(run())
    finally:
        store.released.set()


def test_a_fetch_brings_what_can_be_resumed_within_the_quota_of_its_salt() -> None:
    """All of the chain would be too much: then its beginning, with the state that it ends with."""
    store: Any = OneReadHangs()
    state = GroupSpec(RECURRENT, 16, 0, "", (Region(0, 0, FRAME_BYTES, FRAME_BYTES),))
    layout = Layout(LAYOUT.namespace, 16, (GROUP, state), ((0,), (0,)))
    shards: Any = {0: SimpleNamespace(geometry=Geometry(layout.groups, 10))}

    async def run() -> None:
        it = Setting(store, asyncio.get_running_loop(), quota_frames=3)
        chain = [bytes([number]) * 32 for number in range(10, 13)]
        for bit in range(2):
            await it.write(chain, bit)
        it.known.add(layout.namespace)
        it.tier.speed.add(10**9, 1.0, it.system.now_s())
        lookup = Lookup("", tuple(chain), 0, 48, 49, 1, tenant=b"t" * 16)
        await it.fetches.fetch(layout, shards, lookup, 0, [it.tier])
        assert await it.system.all_ended(30)
        assert it.cache.lookup(layout, chain, 0, 48, 1, it.system.now_s()).resume_tokens == 16
        it.close()

    uvloop.run(run())


def test_a_fetch_that_waits_for_anothers_objects_is_not_taken_for_a_slow_tier() -> None:
    """It brings one object itself, and ends when the other's have come."""
    store: Any = AllReadsWait()

    async def run() -> None:
        it = Setting(store, asyncio.get_running_loop())
        chain = [bytes([number]) * 32 for number in range(10, 14)]
        await it.write(chain)
        it.known.add(LAYOUT.namespace)
        it.tier.speed.add(10**9, 1.0, it.system.now_s())
        first = it.fetching(chain[:3])
        await it.reserved(3)
        second = it.fetching(chain)
        await it.reserved(4)  # what already comes does not count twice
        began_s = it.system.now_s()
        store.released.set()
        await asyncio.gather(first, second)
        # Four objects in the time that has passed, not one.
        assert it.tier.read_bytes == 4 * FRAME_BYTES
        least = 4 * FRAME_BYTES / (it.system.now_s() - began_s + 0.2)
        assert it.tier.speed.bytes_per_s > least / 2
        it.close()

    try:
        uvloop.run(run())
    finally:
        store.released.set()


def test_what_a_tier_has_given_is_not_offered_to_it_again() -> None:
    store: Any = CountsQuestions()

    async def run() -> None:
        it = Setting(store, asyncio.get_running_loop())
        it.tier.cold = True  # which is offered all of L1 at a clean stop
        await it.write([GOOD])
        it.known.add(LAYOUT.namespace)
        await it.fetching([GOOD])
        assert await it.system.all_ended(30)
        assert it.has(GOOD)
        asked = store.asked
        await Spills(it.tiers, it.cache, it.system, lambda _namespace: False).flush()
        assert store.asked == asked
        it.close()

    uvloop.run(run())
