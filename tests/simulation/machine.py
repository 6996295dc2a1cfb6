"""The server of this world: the real cache, router, sessions and copy planning, on a fake system.

Copies move real bytes between real buffers, a few pieces at a time, while everything else goes on.
"""

import ctypes
import functools
import math
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from lmcache_client.contract.hits import fetch_patience_s
from lmcache_client.contract.messages import NONCE_BYTES, Lookup, Memory, Message, Pin, Register, Unpin
from lmcache_server.app import END_S, assemble
from lmcache_server.config import Config
from lmcache_server.core.cache import Cache
from lmcache_server.core.index import Chunk
from lmcache_server.core.pool import FRAME_BYTES
from lmcache_server.options import NAMES, parts
from lmcache_server.service.engines import Session
from lmcache_server.service.refusals import Refusal
from lmcache_server.service.router import Reply
from lmcache_server.telemetry.metrics import Metrics
from lmcache_server.transfer.base import CopyError, Opened, Outcome
from lmcache_server.transfer.digest import DamagedError
from lmcache_server.transfer.jobs import CopyJob
from simulation.futures import Future
from simulation.network import Link, Network
from simulation.world import Process, World

if "tiers" in NAMES:
    from lmcache_server.options.tiers.server import Server as TiersServer
    from simulation import tiers

TICK_S = 1.0
OVER = CopyError("the session of this memory has ended")
CHECKED = 4
"""After so many turns of the server's loop everything is counted again: that takes long."""


class Faults:
    """How badly copies go."""

    copy_failure = 0.0
    slow_copy = 0.0
    hung_copy = 0.0
    piece_s = 0.0005

    def __init__(self) -> None:
        self.hung: list[Callable[[], None]] = []
        """Lets copies return that hang in the kernel, each at most once."""

    def return_all(self) -> None:
        """What the copies waited for has come."""
        while self.hung:
            self.hung[0]()


class Setup(NamedTuple):
    """What every life of a server is started with. Engines of the model `ephemeral` register as such."""

    num_frames: int
    chunk_size: int
    lease_s: float
    faults: Faults
    ephemeral: str
    max_age_s: float
    stores: Sequence[Any]
    """Its tiers."""


class L1:
    """L1 of one life of the server."""

    def __init__(self, num_frames: int) -> None:
        self.num_frames = num_frames
        self.memory = np.zeros(num_frames * FRAME_BYTES, dtype=np.uint8)
        self.base_address = int(self.memory.ctypes.data)
        self.populated_bytes = self.pinned_bytes = 0
        self.backing = None

    def check(self) -> None:
        """It never loses memory."""


class Watch:
    """A process as the server sees it through a descriptor."""

    def __init__(self, process: Process, server: "SimulatedServer") -> None:
        self.process = process
        self._server = server
        self._closed = False

    def alive(self) -> bool:
        return not self._closed and not self.process.exited

    def when_ended(self, function: Callable[..., object], *arguments: object) -> None:
        def ended() -> None:
            if not self._closed:
                function(*arguments)

        def soon() -> None:
            self._server.run_soon(ended)

        self.process.at_exit.append(soon)

    def close(self) -> None:
        self._closed = True


class Copier:
    """The hands for one registered memory: loads overtake stores between slices, as in the real one."""

    lost = False

    def __init__(self, server: "SimulatedServer", memory: Memory, alive: Callable[[], bool]) -> None:
        self._server = server
        self._world = server.world
        self._process = server.world.processes[memory.pid]
        self._memory = memory
        self._alive = alive
        self.opened, self.ended = Future(server), Future(server)
        self.bases = [start for start, _ in memory.buffers]
        self._waiting: dict[bool, deque[tuple[CopyJob, Future]]] = {True: deque(), False: deque()}
        self._running: list[tuple[CopyJob, Future, Any, int]] = []
        """Jobs under way, the inner one last: (job, its end, its pieces, how many are done)."""
        self.closed = self._busy = False
        server.copiers.append(self)
        self._world.after(self._world.random.uniform(0, 0.005), self._open)

    def _open(self) -> None:
        if self._server.process.exited:
            return
        if self._process.exited:
            self._server.run_soon(self.opened.set_result, Opened(CopyError("no such process"), []))
            return
        found = ctypes.string_at(self._memory.proof_address, NONCE_BYTES)
        self._server.run_soon(self.opened.set_result, Opened(None, [found]))

    def submit(self, job: CopyJob) -> Future:
        end = Future(self._server)
        if self.closed:
            self._end(end, OVER, 0)
        else:
            self._waiting[job.load].append((job, end))
            self._go_on()
        return end

    def close(self) -> Future:
        """What runs in the kernel ends when it ends; until then the server waits, and does other things."""
        if not self.closed:
            self.closed = True
            for queue in self._waiting.values():
                while queue:
                    self._end(queue.popleft()[1], OVER, 0)
            if not self._busy:
                self._give_up()
        return self.ended

    def _give_up(self) -> None:
        for _, end, _, _ in self._running:
            self._end(end, OVER, 0)
        self._running.clear()
        self._server.run_soon(self.ended.set_result, None)

    def _go_on(self) -> None:
        if self._busy or self.closed:
            return
        if self._waiting[True] and not (self._running and self._running[-1][0].load):
            self._begin(*self._waiting[True].popleft())
        elif not self._running and self._waiting[False]:
            self._begin(*self._waiting[False].popleft())
        if self._running:
            self._busy = True
            slow = self._world.chance(self._server.faults.slow_copy)
            duration_s = self._world.random.uniform(0, self._server.faults.piece_s)
            if self._server.process.killed:
                # What runs in the kernel ends when it ends.
                duration_s = self._world.random.uniform(0, 1)
            elif self._world.chance(self._server.faults.hung_copy):
                self._hang()
                return
            elif slow:
                self._cut_off_sometimes()
            self._world.after(duration_s * (2000 if slow else 1), self._slice)

    def _hang(self) -> None:
        """The slice does not return before its client's process ends, or whatever it waits for comes."""
        self._world.count("copies hung")
        faults, world = self._server.faults, self._world

        def once() -> None:
            if once in faults.hung:
                faults.hung.remove(once)
                world.after(0.0, self._slice)

        faults.hung.append(once)
        self._process.at_exit.append(once)
        self._cut_off_sometimes()

    def _cut_off_sometimes(self) -> None:
        """Clients that connect anew while a copy of theirs runs are rare otherwise."""
        if self._world.chance(0.5):
            self._world.after(self._world.random.uniform(0, 1), self._cut_off)

    def _cut_off(self) -> None:
        for link in list(self._server.network.links):
            if link.process is self._process:
                self._world.count("connections broken in a copy")
                link.break_off()

    def _begin(self, job: CopyJob, end: Future) -> None:
        try:
            pieces = job.build()
        except CopyError as error:
            if isinstance(error, DamagedError):
                raise AssertionError("something else wrote to these frames") from error
            self._end(end, error, 0)
            return
        self._running.append((job, end, pieces, 0))
        if job.load and (happens := self._server.at_next_load) is not None:
            self._server.at_next_load = None
            happens()

    def _slice(self) -> None:
        if self._server.process.exited:
            return
        if (frozen_s := self._server.frozen_s()) > 0:
            self._world.after(frozen_s, self._slice)
            return
        self._busy = False
        job, end, pieces, done = self._running.pop()
        stop = min(done + self._world.random.randint(1, 4), len(pieces.length))
        if not self._alive():
            self._end(end, CopyError("the process has ended"), 0)
        elif self._world.chance(self._server.faults.copy_failure):
            self._world.count("copies failed")
            self._move(job, pieces, done, (done + stop) // 2)
            self._end(end, CopyError("the kernel had enough"), 0)
        else:
            self._move(job, pieces, done, stop)
            if stop == len(pieces.length):
                job.after()
                self._end(end, None, pieces.num_bytes)
            else:
                self._running.append((job, end, pieces, stop))
        if self.closed:
            self._give_up()
        self._go_on()

    def _move(self, job: CopyJob, pieces: Any, first: int, stop: int) -> None:
        assert self._world.processes[self._memory.pid] is self._process, "copies memory of a stranger"
        for index in range(first, stop):
            ends = int(pieces.local[index]), int(pieces.remote[index])
            target, source = reversed(ends) if job.load else ends
            ctypes.memmove(target, source, int(pieces.length[index]))

    def _end(self, end: Future, error: Exception | None, num_bytes: int) -> None:
        self._server.run_soon(end.set_result, Outcome(error, num_bytes))


class SimulatedServer:
    """One life of the server, from its start to its kill; its own `lmcache_server.service.system.System`."""

    def __init__(self, network: Network, process: Process, setup: Setup, life: int) -> None:
        self.network = network
        self.world: World = network.world
        self.process = process
        self.pid = process.pid
        self.faults = setup.faults
        self.hidden: set[int] = set()
        """Process ids that mean nothing to the server."""
        self.copiers: list[Copier] = []
        self.fetched: set[tuple[bytes, bytes]] = set()
        """Namespaces and keys of chunks that came from a tier."""
        self._links: dict[bytes, Link] = {}
        self._frozen_until_s = self._frozen_s = 0.0
        self._turns = 0
        self.at_next_load: Callable[[], object] | None = None
        self.is_ending = False
        self.cache = Cache(FRAME_BYTES, setup.num_frames, setup.lease_s)
        self.l1 = L1(setup.num_frames)
        self.max_age_s = setup.max_age_s if "max_age" in NAMES else math.inf
        max_age = f"{setup.max_age_s:g}s" if setup.max_age_s < math.inf else ""
        of_options = {"max_age": max_age} if "max_age" in NAMES else {}
        config = Config(
            chunk_size=setup.chunk_size, lease_s=setup.lease_s, checksums=True, of_options=of_options
        )
        makers: list[Any] = parts("server", "Server")
        if "tiers" in NAMES:
            makers[makers.index(TiersServer)] = functools.partial(tiers.option, setup.stores, self, life)
        system: Any = self
        self._metrics, self._brought = Metrics(), 0
        self.router, _ = assemble(
            config, self.cache, self.l1, self._metrics, self._send, system, makers=makers
        )
        self.router._for_sessions[Lookup] = self._timed(self.router.lookups.lookup)
        register = self.router.sessions.register
        self.router._for_sessions[Register] = lambda session, message, _bytes: register(
            session, replace(message, ephemeral=message.model.model == setup.ephemeral)
        )
        self._pins: Any = next((each.pins for each in self.router.options if hasattr(each, "pins")), None)
        if self._pins is not None:
            ends = self._pins.unpin_excess
            self._pins.unpin_excess = lambda: self._noted(ends())
        self.pinned: dict[str, dict[Chunk, int]] = {}
        """What was pinned under each name and must still be there: chunks, and the bits of their objects."""
        self._forget, self.cache.forget = self.cache.forget, self._forgotten  # type: ignore[method-assign]
        network.listener = self
        process.at_kill.append(self.stop_listening)
        self._tick()

    # -- the system that the server sees ----------------------------------------------------------

    def now_s(self) -> float:
        return self.world.now_s

    def random_bytes(self, count: int) -> bytes:
        return self.world.random.randbytes(count)

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> Future:
        ended = Future(self)
        self.run_soon(self.resume, coroutine, ended)
        return ended

    def resume(self, coroutine: Coroutine[Any, Any, Any], ended: Future) -> None:
        """Run a coroutine up to the next thing that it waits for."""
        try:
            future = coroutine.send(None)
        except StopIteration:
            ended.set_result(None)
            return
        assert isinstance(future, Future)
        assert not future.done()
        future.when_done(self.resume, coroutine, ended)

    def future(self) -> Future:
        return Future(self)

    async def wait(self, futures: Sequence[Future], timeout_s: float | None) -> None:
        waited, missing = Future(self), len(futures)

        def one_more() -> None:
            nonlocal missing
            missing -= 1
            if not missing:
                waited.set_result(None)

        for future in futures:
            if future.done():
                self.run_soon(one_more)
            else:
                future.when_done(one_more)
        if timeout_s is not None:
            self.run_soon(waited.set_result, None, delay_s=timeout_s)
        await waited

    def open_process(self, pid: int) -> Watch | None:
        process = self.world.processes.get(pid)
        if process is None or process.exited or pid in self.hidden:
            return None
        return Watch(process, self)

    def copier(self, name: str, memory: Memory, alive: Callable[[], bool]) -> Copier:
        return Copier(self, memory, alive)

    def _timed(self, lookup: Callable[[Session, Lookup, int], Reply]) -> Callable[..., Reply]:
        """Lookups, each of which must be answered in its time."""

        async def answered(message: Lookup, later: Coroutine[Any, Any, Message]) -> Message:
            began_s = self._own_s()
            self.world.count("lookups that wait for tiers")
            try:
                return await later
            finally:
                waited_s = self._own_s() - began_s
                limit_s = fetch_patience_s(message.num_tokens) + 0.001
                assert self.process.killed or waited_s <= limit_s, f"a lookup waited {waited_s} s for tiers"

        def begin(session: Session, message: Lookup, num_bytes: int) -> Reply:
            reply = lookup(session, message, num_bytes)
            return answered(message, reply) if isinstance(reply, Coroutine) else reply

        return begin

    # -- what a user asks -------------------------------------------------------------------------

    def pin(self, name: str, request: str) -> bool:
        """Whether chunks of this request are pinned now; with an empty name the server begins to watch."""
        try:
            self.router._for_sessions[Pin](None, Pin(name, request), 0)  # type: ignore[arg-type]
        except Refusal:
            return False
        chunks = self._pins.names.get(name, {})
        self.pinned[name] = {chunk: chunk.ready for chunk in chunks.values()}
        return bool(chunks)

    def _noted(self, ended: list[str]) -> list[str]:
        for name in ended:
            self.world.count("pins that ended because chunks had grown")
            self.pinned.pop(name, None)
        return ended

    def unpin(self, name: str) -> None:
        self.pinned.pop(name, None)
        if name in self._pins.names:
            self.router._for_sessions[Unpin](None, Unpin(name), 0)  # type: ignore[arg-type]

    def _forgotten(self, chunk: Chunk) -> None:
        """What is cleared is not pinned any more."""
        for chunks in self.pinned.values():
            chunks.pop(chunk, None)
        self._forget(chunk)

    # -- events -----------------------------------------------------------------------------------

    def run_soon(self, function: Callable[..., object], *arguments: Any, delay_s: float = 0.0) -> None:
        """On the event loop, in the order of these calls unless the loop is frozen or delayed."""
        # What is thrown away of a killed server must not begin anything.
        if not (self.process.killed or self.world.is_over):
            self.world.after(delay_s, self._run, function, arguments)

    def _run(self, function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        if self.process.killed:
            return
        if (frozen_s := self.frozen_s()) > 0:
            self.run_soon(function, *arguments, delay_s=frozen_s)
            return
        function(*arguments)
        self._turns += 1
        if not self._turns % CHECKED:
            self.cache.check_integrity()
        if self._pins is not None:
            self._pins.check_integrity()
            assert len(self._pins) == len(self.cache.protected), "a chunk is protected that nobody has pinned"
        for chunks in self.pinned.values():
            for chunk, ready in chunks.items():
                assert chunk in self.cache._index, "a pinned chunk was evicted"
                assert chunk in self._pins, "a pin has ended by itself"
                assert chunk.ready & ready == ready, "a pinned chunk has lost an object"
        owners = {session.session_id for session in self.router.sessions.by_identity.values()}
        assert all(lease.owner in owners for lease in self.cache._leases), "a lease outlives its session"
        sessions = self.router.sessions
        live = {engine.layout.namespace for engine in sessions.engines if engine.layout is not None}
        for namespace in self.cache.namespaces().keys() - live:
            assert not sessions.known[namespace]["ephemeral"], "what is ephemeral outlives its engines"

    def freeze(self, seconds: float) -> None:
        until_s = max(self._frozen_until_s, self.world.now_s + seconds)
        self._frozen_s += until_s - max(self._frozen_until_s, self.world.now_s)
        self._frozen_until_s = until_s

    def _own_s(self) -> float:
        """The time in which it could run."""
        return self.world.now_s - self.world.jumped_s - self._frozen_s

    def frozen_s(self) -> float:
        """For how long none of its threads will run."""
        return max(0.0, self._frozen_until_s - self.world.now_s)

    def stop(self) -> None:
        """SIGTERM: no new session, and the end once the copies have ended, or END_S later. Then the tiers
        get what they lack."""
        self.is_ending = True
        limit_s = self.world.now_s + END_S

        def begin() -> None:
            self.router.sessions.close()
            for option in self.router.options:
                option.stop()
            self.run_soon(end, delay_s=0.01)

        def end() -> None:
            if self.world.now_s < limit_s and not all(copier.ended.done() for copier in self.copiers):
                self.run_soon(end, delay_s=0.05)
                return
            assert not self.router.sessions.by_identity, "a session began after the server had stopped"
            self.stop_listening()
            self.spawn(last())

        async def last() -> None:
            for option in self.router.options:
                await option.close()
            self.process.kill()

        self.run_soon(begin)

    def _tick(self) -> None:
        self.router.tick()
        if "retention" in NAMES:
            brought = int(self._metrics.value("lmcache_prefetches_total", outcome="brought"))
            self.world.count("prompts brought back", brought - self._brought)
            self._brought = brought
        overdue = self.cache._leases.overdue(self.world.now_s)
        assert not overdue, "a lease outlives its deadline"
        oldest_s = min((chunk.stored_s for chunk in self.cache._index), default=self.world.now_s)
        assert self.world.now_s - oldest_s <= self.max_age_s, "a chunk outlives its age"
        self.run_soon(self._tick, delay_s=TICK_S)

    def stop_listening(self) -> None:
        if self.network.listener is self:
            self.network.listener = None
        for link in list(self.network.links):
            if link.server is self:
                self.world.after(self.world.random.uniform(0, 0.02), link.break_off)

    # -- connections ------------------------------------------------------------------------------

    def accepted(self, link: Link) -> None:
        self._links[link.identity] = link

    def arrived(self, link: Link, frame: bytes) -> None:
        self.run_soon(self._receive, link.identity, frame)

    def ended(self, identity: bytes) -> None:
        self.run_soon(self._disconnected, identity)

    def _receive(self, identity: bytes, frame: bytes) -> None:
        # The listener drops what a new client sent whose connection has ended.
        if identity in self._links:
            self.router.receive(identity, frame)

    def _disconnected(self, identity: bytes) -> None:
        self._links.pop(identity, None)
        self.router.disconnected(identity)

    def _send(self, identity: bytes, frame: bytes) -> None:
        link = self._links.get(identity)
        # A coroutine of a killed server, or of a world that is over, still answers when it is thrown away.
        is_alive = not (self.process.killed or self.world.is_over)
        if is_alive and link is not None and link.identity == identity:
            link.reply(frame)
