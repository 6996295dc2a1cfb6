"""What is written to a tier: how much at a time, what is left out, and what a clear forgets."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from test_last_writes import LAYOUT

from lmcache_server.core.cache import Cache, Reservation
from lmcache_server.core.pool import FRAME_BYTES
from lmcache_server.l1.memory import L1Memory
from lmcache_server.service import spills as spills_module
from lmcache_server.service.spills import SPILL_SHARE, Spills
from lmcache_server.service.system import System
from lmcache_server.service.tiers import Tiers, TierState
from lmcache_server.telemetry.failures import Failures
from lmcache_server.telemetry.metrics import Metrics
from lmcache_server.tiers.worker import Rates, TierWorker

FRAMES = 40


class Gate:
    """A tier that keeps names, and writes nothing while it is shut."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.waiting = threading.Semaphore(0)
        self.opened = threading.Event()
        self.has_room = True

    def present(self, names: Sequence[str]) -> Sequence[bool]:
        return [name in self.names for name in names]

    def write(self, name: str, pieces: Sequence[memoryview]) -> bool:
        self.waiting.release()
        assert self.opened.wait(60)
        if self.has_room:
            self.names.add(name)
        return self.has_room

    def remove(self, names: Sequence[str]) -> None:
        self.names -= set(names)

    def clear(self, prefix: str) -> None:
        self.names = {name for name in self.names if not name.startswith(prefix)}

    def close(self) -> None:
        pass


class Rig:
    """The spills of an L1 of FRAMES frames, with one tier that is a Gate."""

    def __init__(self, l1: L1Memory) -> None:
        self.store: Any = Gate()
        loop, nothing = asyncio.get_running_loop(), None
        self.cache, self.system = Cache(FRAME_BYTES, FRAMES), System(loop, nothing, nothing)  # type: ignore[arg-type]
        self.tier = TierState(0, "tier", False, TierWorker("tier", lambda: self.store, loop, Rates()))
        self.metrics = Metrics()
        tiers = Tiers([self.tier], l1, self.metrics, Failures(), self.system)
        self.spills = Spills(tiers, self.cache, self.system, lambda _namespace: False)

    def keep(self, *numbers: int) -> None:
        """Engines have stored objects of one frame, each in a chunk of its own."""
        rooms = []
        for number in numbers:
            room = self.cache.reserve(LAYOUT, number.to_bytes(32, "big"), 0, 0, 1, FRAME_BYTES)
            assert isinstance(room, Reservation)
            self.cache.commit(room)
            rooms.append(room)
        self.spills.stored(LAYOUT, rooms)

    async def one_writes(self) -> None:
        assert await asyncio.to_thread(self.store.waiting.acquire, True, 60)

    async def rest(self) -> None:
        self.store.opened.set()
        await self.spills.flush()
        assert await self.system.all_ended(60)

    def written(self, outcome: str) -> int:
        labels = {"tier": "1", "direction": "write", "outcome": outcome}
        return int(self.metrics.value("lmcache_tier_objects_total", **labels))


@contextmanager
def _l1() -> Iterator[L1Memory]:
    l1 = L1Memory(FRAMES * FRAME_BYTES)
    try:
        yield l1
    finally:
        l1.close()


def run(test: Callable[[Rig], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        with _l1() as l1:
            rig = Rig(l1)
            try:
                await test(rig)
            finally:
                rig.store.opened.set()
                await rig.spills.close()

    asyncio.run(whole())


def test_what_is_being_written_takes_a_twentieth_of_l1() -> None:
    async def test(rig: Rig) -> None:
        rig.keep(*range(10))
        await rig.one_writes()
        share = FRAMES // SPILL_SHARE
        assert rig.tier.writing == rig.spills._spilling_frames == share + 1, "the last one began below it"
        await rig.rest()
        assert rig.written("written") == 10
        assert rig.spills._spilling_frames == 0

    run(test)


def test_what_finds_no_place_in_the_queue_is_dropped_and_nobody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spills_module, "MAX_BACKLOG", 4)

    async def test(rig: Rig) -> None:
        rig.keep(*range(10))  # returns though nothing can be written
        assert rig.written("dropped") == 6
        await rig.rest()
        assert rig.written("written") == len(rig.store.names) == 4
        rig.keep(20)
        await rig.rest()
        assert rig.written("written") == 5, "then there is room again"

    run(test)


@pytest.mark.parametrize("namespace", [None, LAYOUT.namespace])
def test_a_write_in_flight_during_a_clear_leaves_no_record(namespace: bytes | None) -> None:
    async def test(rig: Rig) -> None:
        rig.keep(1, 2, 3, 4, 5, 6)
        await rig.one_writes()
        rig.cache.clear(namespace)  # as the router does, first
        assert await rig.spills.clear([namespace]) == []
        await rig.rest()
        assert rig.written("written") > 0
        assert rig.store.names == set(), "what was being written was removed"
        rig.keep(7)
        await rig.rest()
        assert len(rig.store.names) == 1, "what is stored after the clear stays"

    run(test)


def test_what_a_tier_had_no_room_for_is_offered_to_it_again() -> None:
    async def test(rig: Rig) -> None:
        rig.tier.cold, rig.store.has_room = True, False
        rig.store.opened.set()
        rig.keep(1)
        assert await rig.system.all_ended(60)
        assert (rig.written("full"), rig.store.names) == (1, set())
        rig.store.has_room = True
        rig.spills.tick()
        assert await rig.system.all_ended(60)
        assert (rig.written("written"), len(rig.store.names)) == (1, 1)
        rig.spills.tick()
        assert await rig.system.all_ended(60)
        assert rig.written("written") == 1, "what is there is not written again"

    run(test)


def test_a_write_in_flight_of_a_damaged_chunk_leaves_no_record() -> None:
    async def test(rig: Rig) -> None:
        rig.keep(1, 2)
        await rig.one_writes()
        chunk = rig.cache.chunk(LAYOUT.namespace, (1).to_bytes(32, "big"))
        assert chunk is not None
        rig.spills.forget(chunk)
        rig.cache.forget(chunk)
        await rig.rest()
        assert rig.written("written") == 2
        (name,) = rig.store.names
        assert name.endswith("2.0"), "the other chunk's record stays"

    run(test)
