"""Connections as ZeroMQ gives them: in order, delayed, broken at any moment, replies dropped when full."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lmcache_client.contract import messages
from lmcache_client.contract.control import StatusReport
from lmcache_client.contract.messages import Found, Message, decode_reply, encode_reply
from lmcache_client.transport import ConnectionLostError
from simulation.world import Event, Lock, Process, Task, World

if TYPE_CHECKING:
    from simulation.machine import SimulatedServer

RECONNECT_S = 0.1


class Network:
    """Who listens on a host, and how badly messages travel to it."""

    def __init__(self, world: World, host: str = "simulated") -> None:
        self.world = world
        self.host = host
        self.listener: SimulatedServer | None = None
        self.links: list[Link] = []
        self.delay_s = 0.0002
        self.reply_loss = 0.0
        self.cut_off_until_s = 0.0
        self.nonsense = 0.0
        """How many replies are not what was asked for, or not even replies."""
        self._next_identity = 1

    def cut_off(self, seconds: float) -> None:
        """Nothing arrives at the host or comes from it for so long. Some connections break meanwhile."""
        self.cut_off_until_s = self.world.now_s + seconds
        for link in list(self.links):
            self.world.after(self.world.random.uniform(0, 2 * seconds), link.break_off)

    def identity(self) -> bytes:
        self._next_identity += 1
        return self._next_identity.to_bytes(5, "little")

    def travel_s(self) -> float:
        return max(self.world.random.expovariate(1 / self.delay_s), self.cut_off_until_s - self.world.now_s)


class Link:
    """One DEALER and the connection that it tries to have; the client's `Connection`."""

    def __init__(self, network: Network, process: Process) -> None:
        self.network = network
        self.refusal = ""
        self.world = network.world
        self.process = process
        self.identity = b""
        self.server: SimulatedServer | None = None
        """Whom it is connected to."""
        self._closed = False
        self._is_up = False
        self._inbox: deque[bytes] = deque()
        self._events: deque[bool] = deque()
        self._to_server_s = self._to_client_s = 0.0
        network.links.append(self)
        process.at_kill.append(self.break_off)
        self.world.after(network.travel_s(), self._try)

    # -- the client's side ------------------------------------------------------------------------

    def send(self, frame: bytes) -> None:
        if not self._is_up:
            raise ConnectionLostError("not connected")
        self._to_server_s = max(self._to_server_s, self.world.now_s + self.network.travel_s())
        self.world.after(self._to_server_s - self.world.now_s, self._arrive, self.server, frame)

    def receive(self) -> bytes | None:
        return self._inbox.popleft() if self._inbox else None

    def event(self) -> bool | None:
        return self._events.popleft() if self._events else None

    def wait(self, wait_s: float) -> None:
        limit_s = self.world.now_s + wait_s
        while not self._inbox and not self._closed and self.world.now_s < limit_s:
            self.world.sleep(0.0001)

    def peer_pid(self) -> int | None:
        return self.server.process.pid if self.server is not None else 0

    def close(self) -> None:
        self._closed = True
        self._inbox.clear()
        self._events.clear()
        self.break_off()
        if self in self.network.links:
            self.network.links.remove(self)

    # -- in between -------------------------------------------------------------------------------

    def _try(self) -> None:
        if self._closed or self._is_up or self.process.killed:
            return
        listener = self.network.listener
        if listener is None or listener.process.killed or self.world.now_s < self.network.cut_off_until_s:
            self.world.after(RECONNECT_S, self._try)
            return
        self.server, self._is_up = listener, True
        self.identity = self.network.identity()
        self._events.append(True)
        listener.accepted(self)

    def break_off(self) -> None:
        """The connection breaks; each side hears of it in its own time."""
        if not self._is_up:
            return
        server, identity = self.server, self.identity
        self._is_up, self.server = False, None
        self.world.after(self.network.travel_s(), self._tell_server, server, identity)
        self.world.after(self.network.travel_s(), self._tell_client)

    def _tell_client(self) -> None:
        if not self._closed:
            self._events.append(False)
            self.world.after(RECONNECT_S, self._try)

    def _tell_server(self, server: "SimulatedServer", identity: bytes) -> None:
        if not server.process.killed:
            server.ended(identity)

    def _arrive(self, server: "SimulatedServer", frame: bytes) -> None:
        # What was on its way when the connection broke is lost.
        if self._is_up and self.server is server and not server.process.killed:
            server.arrived(self, frame)

    # -- the server's side ------------------------------------------------------------------------

    def reply(self, frame: bytes) -> None:
        boot_id, _, reply = decode_reply(frame)
        assert len(boot_id) == messages.BOOT_ID_BYTES
        assert not (isinstance(reply, messages.Refused) and reply.code == messages.INTERNAL), (
            "the server failed on a request"
        )
        if self.world.chance(self.network.reply_loss):
            self.world.count("replies lost")
            return
        if self.world.chance(self.network.nonsense):
            self.world.count("replies of nonsense")
            frame = nonsense(frame, self.world.random)
        self._to_client_s = max(self._to_client_s, self.world.now_s + self.network.travel_s())
        self.world.after(self._to_client_s - self.world.now_s, self._deliver, self.identity, frame)

    def _deliver(self, identity: bytes, frame: bytes) -> None:
        if self._is_up and self.identity == identity:
            self._inbox.append(frame)


def nonsense(frame: bytes, draw: random.Random) -> bytes:
    """Anything but this reply: noise, a part of it, another answer; but never that a copy succeeded, because
    whoever believes a server that lies about that has wrong bytes."""
    boot_id, request_id, reply = decode_reply(frame)
    if (how := draw.randrange(6)) < 2:
        return frame[: draw.randrange(len(frame))] if how else draw.randbytes(30)
    many = draw.choice((0, 3, 8, 16, 1 << 40))
    held = tuple(draw.randbytes(draw.randrange(3)) for _ in range(2))
    found = Found(many, draw.randrange(9), 1, held[: draw.randrange(3)])
    if isinstance(reply, Found) and draw.random() < 0.5:
        return encode_reply(boot_id, request_id, found)
    answers: tuple[Message, ...] = (
        found, messages.Joined(draw.random() < 0.5, many),
        messages.Registered(many, "nonsense"), messages.Challenge(draw.randbytes(draw.randrange(40))),
        messages.Cleared(many), StatusReport(("nonsense",)),
        messages.Refused(draw.choice(("overloaded", "copy_failed", "?")), "nonsense"),
    )  # fmt: skip
    return encode_reply(boot_id, request_id, draw.choice(answers))


class Watched:
    """A process as the client sees it through a descriptor."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def ended(self) -> bool:
        return self._process.exited

    def close(self) -> None:
        pass


class ClientSystem:
    """`lmcache_client.transport.System` of one process of this world."""

    def __init__(self, networks: Sequence[Network], process: Process) -> None:
        self.networks = {f"tcp://{network.host}:5555": network for network in networks}
        self.world = networks[0].world
        self.process = process
        self.is_blind = self.world.chance(0.1)
        """It has no descriptor of the server's process: another process namespace, or none to spare."""

    def pid(self) -> int:
        return self.process.pid

    def now_s(self) -> float:
        return self.world.now_s

    def sleep(self, seconds: float) -> None:
        self.world.sleep(seconds * self.world.random.uniform(1, 5))

    def random_bytes(self, count: int) -> bytes:
        return self.world.random.randbytes(count)

    def lock(self) -> Lock:
        return Lock(self.world)

    def event(self) -> Event:
        return Event(self.world)

    def start_thread(self, target: Callable[[], None], name: str) -> Task:
        return self.world.spawn(target, self.process)

    def connect(self, address: str) -> Link:
        return Link(self.networks[address], self.process)

    def open_process(self, pid: int) -> Watched | None:
        process = self.world.processes.get(pid)
        return None if self.is_blind or process is None or process.exited else Watched(process)

    def nobody_listens(self, address: str) -> bool:
        listener = self.networks[address].listener
        return listener is None or listener.process.exited

    def allow_tracer(self, pid: int) -> None:
        pass
