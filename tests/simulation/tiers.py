"""The tiers of this world: stores that outlive the server's lives, and threads that call them.

Only the threads and the store are simulated; records, fetches, spills and breakers are the real ones.
"""

import functools
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lmcache_server.core.pool import FRAME_BYTES
from lmcache_server.options.tiers.base import TierError
from lmcache_server.options.tiers.record_format import DamagedRecordError, Label
from lmcache_server.options.tiers.server import Server
from lmcache_server.options.tiers.tier_states import READS_AT_ONCE, TierState
from lmcache_server.options.tiers.tier_worker import STUCK_S, Payload, Rates, TierWorker
from lmcache_server.service.option import Base
from simulation.futures import Future, Semaphore
from simulation.world import World

if TYPE_CHECKING:
    from simulation.machine import SimulatedServer

FAULTS = (
    "failing", "lying", "hiding", "truncating", "swapping", "spoiling", "vanishing", "full", "tearing",
    "hanging", "slow",
)  # fmt: skip
RETURNED = 0.7
"""How many of the calls that hang return when everything else is well again."""


class Store:
    """What a tier keeps, by name: the life of the server that wrote it, and the record. `chances` says how
    often a call goes wrong, by fault."""

    def __init__(self, world: World, is_cold: bool, call_s: float) -> None:
        self.world = world
        self.is_cold = is_cold
        self.call_s = call_s
        self.chances: dict[str, float] = {}
        self.records: dict[str, tuple[int, bytes]] = {}
        self.hung: list[Callable[[], None]] = []
        """Lets calls return that hang."""
        self._away_until_s = 0.0

    def strikes(self, fault: str) -> bool:
        chance = self.chances.get(fault, 0.0)
        struck = chance > 0 and self.world.chance(chance)
        if struck:
            self.world.count("tier faults")
            self.world.count(f"tiers {fault}")
        return struck

    def lose(self) -> None:
        """It restarts, and keeps nothing."""
        self.world.count("tiers lost")
        self.records.clear()

    def go_away(self, seconds: float) -> None:
        self.world.count("tiers away")
        self._away_until_s = self.world.now_s + seconds

    def check(self) -> None:
        if self.world.now_s < self._away_until_s or self.strikes("failing"):
            raise TierError("nobody answers")

    def recover(self) -> None:
        """No more faults. Some of the calls that hang return, the others never do."""
        self.chances.clear()
        self._away_until_s = 0.0
        for let_return in list(self.hung):
            if self.world.chance(RETURNED):
                let_return()


class StoreClient:
    """`lmcache_server.options.tiers.base.Tier` of one life of the server."""

    def __init__(self, store: Store, life: int) -> None:
        self._store = store
        self._life = life
        store.check()

    def present(self, names: Sequence[str]) -> Sequence[bool]:
        self._store.check()
        if self._store.strikes("lying"):
            return [True] * len(names)
        if self._store.strikes("hiding"):
            return [False] * len(names)
        return [name in self._store.records for name in names]

    def read(self, name: str, pieces: Sequence[memoryview]) -> int:
        store, draw = self._store, self._store.world.random
        store.check()
        if store.strikes("vanishing"):
            store.records.pop(name, None)
        life, record = store.records.get(name, (0, b""))
        size = sum(map(len, pieces))
        if store.strikes("truncating"):
            # The end of the pieces stays as it was; some stores do not even say so.
            _fill(pieces, record[: draw.randrange(size)])
            return size if draw.random() < 0.5 else 0
        if others := store.strikes("swapping") and [*store.records]:
            life, record = store.records[draw.choice(others)]
        if len(record) != size:
            return 0
        if store.strikes("spoiling"):
            # Zeros would change nothing where a record is padded.
            at = draw.choice((draw.randrange(64), size - 1 - draw.randrange(64)))
            record = record[:at] + bytes([record[at] ^ 0xFF]) + record[at + 1 :]
        _fill(pieces, record)
        store.world.count("records read")
        store.world.count("records read in a later life", int(life < self._life))
        return size

    def write(self, name: str, pieces: Sequence[memoryview]) -> bool:
        self._store.check()
        if self._store.strikes("full"):
            return False
        record = b"".join(pieces)
        if self._store.strikes("tearing"):
            kept = self._store.world.random.randrange(len(record))
            padding = len(record) - kept if self._store.world.chance(0.5) else 0
            record = record[:kept] + bytes(padding)
        self._store.records[name] = self._life, record
        self._store.world.count("records written")
        return True

    def remove(self, names: Sequence[str]) -> None:
        self._store.check()
        for name in names:
            self._store.records.pop(name, None)

    def clear(self, prefix: str) -> None:
        self.remove([name for name in self._store.records if name.startswith(prefix)])

    def close(self) -> None:
        pass


def _fill(pieces: Sequence[memoryview], record: bytes) -> None:
    for piece in pieces:
        part, record = record[: len(piece)], record[len(piece) :]
        piece[: len(part)] = part


class Lane:
    """As `lmcache_server.options.tiers.tier_worker.Lane`: a call takes its time, and then happens at once."""

    def __init__(self, store: Store, name: str, threads: int, server: "SimulatedServer") -> None:
        self._store = store
        self._threads = threads
        self.server = server
        self._waiting: deque[tuple[Callable[[], Any], Future]] = deque()
        self._running_since_s: dict[int, float] = {}
        self._numbers = itertools.count()

    def submit(self, call: Callable[[], Any]) -> Future:
        future = Future(self.server)
        self._waiting.append((call, future))
        self._go_on()
        return future

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running_since_s)

    @property
    def num_hanging(self) -> int:
        now_s = self.server.world.now_s
        return sum(now_s - since_s > STUCK_S for since_s in self._running_since_s.values())

    def is_stuck(self) -> bool:
        return self.num_hanging == self._threads

    def fail_waiting(self, reason: str) -> None:
        while self._waiting:
            self.server.run_soon(self._waiting.popleft()[1].set_exception, TierError(reason))

    def _go_on(self) -> None:
        while self._waiting and len(self._running_since_s) < self._threads:
            number = next(self._numbers)
            self._running_since_s[number] = self.server.world.now_s
            self._begin(functools.partial(self._end, number, *self._waiting.popleft()))

    def _begin(self, end: Callable[[], None]) -> None:
        world, store = self.server.world, self._store

        def once() -> None:
            if once in store.hung:
                store.hung.remove(once)
                end()

        if store.strikes("hanging"):
            store.hung.append(once)
            if world.chance(0.5):
                world.after(world.random.uniform(0.5, 30.0), once)
            return
        duration_s = world.random.uniform(0, store.call_s)
        world.after(duration_s * (300 if store.strikes("slow") else 1), end)

    def _end(self, number: int, call: Callable[[], Any], future: Future) -> None:
        if self.server.process.killed:
            return
        if (frozen_s := self.server.frozen_s()) > 0:
            self.server.world.after(frozen_s, self._end, number, call, future)
            return
        result, error = None, None
        try:
            result = call()
        except (TierError, DamagedRecordError) as failure:
            error = failure
        del self._running_since_s[number]
        if error is None:
            self.server.run_soon(future.set_result, result)
        else:
            self.server.run_soon(future.set_exception, error)
        self._go_on()


class Worker(TierWorker):
    """The real one, which must only touch frames that are still its call's own, however late that runs."""

    server: "SimulatedServer"

    def _read(self, label: Label, payload: Payload) -> bytes | None:
        mine = [
            each
            for each in self.server.cache._reservations
            if (each.chunk.namespace, each.chunk.key, each.bit) == (label.namespace, label.key, label.bit)
        ]
        # More than one, if an earlier read hangs whose chunk was forgotten meanwhile.
        assert self._frame(payload) in [each.runs[0][0] for each in mine], "a read writes to frames of others"
        found = super()._read(label, payload)
        if found is not None:
            self.server.fetched.add((label.namespace, label.key))
        return found

    def _write(self, label: Label, payload: Payload) -> str:
        cache = self.server.cache
        indexed = cache.chunk(label.namespace, label.key)
        chunks = [*cache._spilling, *([indexed] if indexed else [])]
        objects = [chunk.get(label.bit) for chunk in chunks if chunk.key == label.key]
        starts = [stored.runs[0][0] for stored in objects if stored]
        assert self._frame(payload) in starts, "a write reads frames of others"
        return super()._write(label, payload)

    def _frame(self, payload: Payload) -> int:
        return (payload[0][0] - self.server.l1.base_address) // FRAME_BYTES


class Simulated(Server):
    async def close(self) -> None:
        """Its threads end with the server's life."""
        await self.spills.flush()


def option(stores: Sequence[Store], server: "SimulatedServer", life: int, base: Base) -> Server:
    """The option of a server that has these stores."""
    tiers = []
    for number, store in enumerate(stores):
        open_tier = functools.partial(StoreClient, store, life)
        lane = functools.partial(Lane, store)
        worker = Worker(f"tier-{number + 1}", open_tier, server, Rates(), lane=lane)  # type: ignore[arg-type]
        worker.server = server
        reads = Semaphore(server, READS_AT_ONCE)
        tiers.append(TierState(number, "simulated", store.is_cold, worker, reads=reads))  # type: ignore[arg-type]
    return Simulated(base, tiers)


def unrest(server: "SimulatedServer") -> list[str]:
    """What tiers hold though nobody asks for anything. Calls that never return may hold their frames."""
    (tiers,) = (each for each in server.router.options if isinstance(each, Server))
    fetches, spills, cache = tiers.fetches, tiers.spills, server.cache
    wrong, reads_lost, writes_lost = list[str](), 0, 0
    for tier in tiers.tiers:
        reads, writes = tier.worker._reads.num_running, tier.worker._writes.num_running  # type: ignore[attr-defined]
        reads_lost, writes_lost = reads_lost + reads, writes_lost + writes
        if tier.breaker.is_open != tier.worker.is_stuck():
            wrong.append(f"tier {tier.label} is left alone: {tier.breaker.is_open}")
        if len(tier.writing) > writes:
            wrong.append(f"{len(tier.writing)} objects are being written")
        if tier.worker.reads_waiting or tier.worker._writes.num_waiting:
            wrong.append("calls wait for a thread")
        if tier.backlog and not tier.breaker.is_open:
            wrong.append(f"{len(tier.backlog)} objects wait to be written")
    if max(fetches._fetching_frames, len(fetches._arriving), cache.reserved_frames) > reads_lost:
        wrong.append(f"fetches hold {fetches._fetching_frames} frames of {cache.reserved_frames}")
    if max(spills._spilling_frames, cache._spilling.total()) > writes_lost:
        wrong.append(f"spills hold {spills._spilling_frames} frames, {cache._spilling.total()} objects")
    return wrong
