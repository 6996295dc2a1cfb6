"""The real router in this process, with copies that end when the test says so."""

import asyncio
from collections.abc import Iterator

import pytest
from fuzz.messages import CHUNK_SIZE, geometry
from fuzz.targets import RouterTarget, owner
from msgspec.structs import replace

from lmcache_client.contract import messages
from lmcache_client.contract.codec import packed
from lmcache_client.contract.control import Inspect
from lmcache_client.contract.keys import ROOT_KEY, ModelTag
from lmcache_client.contract.messages import Found, Hello, Load, Lookup, Memory, Message, Store, StoreObject
from lmcache_server.core.pool import FRAME_BYTES
from lmcache_server.transfer.base import CopyError, Opened, Outcome
from lmcache_server.transfer.host import HostMapping
from lmcache_server.transfer.jobs import CopyJob

SETTLED_TURNS = 6
"""Turns of the loop after which a coroutine has come as far as it can."""
NOBODY = 1 << 30
"""A process id that means nothing."""
TIMEOUT_S = 60.0
USER = 5
"""The client that is no engine."""
IDS = tuple(range(1, 17))
"""Blocks of one chunk."""


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def store(*numbers: int, ids: tuple[int, ...] = IDS) -> Store:
    """One object of each of these chunks, which are all first chunks."""
    return Store(tuple(StoreObject(key(number), ROOT_KEY, 0, 0, packed(ids)) for number in numbers))


def question(number: int) -> Lookup:
    return Lookup("r", (key(number),), 0, CHUNK_SIZE, CHUNK_SIZE + 1)


def load(found: Found, number: int, ids: tuple[int, ...] = IDS) -> Load:
    return Load("r", found.lease_id, key(number), CHUNK_SIZE, 0, (packed(ids),))


def is_refused(reply: Message | None, code: str) -> bool:
    return isinstance(reply, messages.Refused) and reply.code == code


class HeldCopies:
    """A copy thread that waits for `end`."""

    lost = False

    def __init__(self, opened: Opened, loop: asyncio.AbstractEventLoop) -> None:
        self.bases: tuple[int, ...] = (0,)
        self.jobs: list[asyncio.Future[Outcome]] = []
        self._loop = loop
        self.opened, self.ended = loop.create_future(), loop.create_future()
        self.opened.set_result(opened)

    def submit(self, job: CopyJob) -> "asyncio.Future[Outcome]":
        self.jobs.append(self._loop.create_future())
        return self.jobs[-1]

    def end(self, error: CopyError | None = None) -> None:
        jobs, self.jobs = self.jobs, []
        for job in jobs:
            job.set_result(Outcome(error, 0))

    def close(self) -> "asyncio.Future[None]":
        self.end()
        if not self.ended.done():
            self.ended.set_result(None)
        return self.ended


class Desk:
    """Speaks to the router as client `who`."""

    def __init__(self, pid: int, address: int) -> None:
        self.copies: list[HeldCopies] = []
        self.target = RouterTarget(pid, address)
        self.memory = self.target.memory_of(0)
        self.target.system.copier = self._copier  # type: ignore[method-assign,assignment]
        self.replies: dict[int, Message] = {}
        record = self.target.router._send
        self.target.router._send = lambda who, frame: (self._record(frame), record(who, frame))  # type: ignore
        self._last_id = 0

    def _copier(self, _name: str, memory: Memory, _alive: object) -> HeldCopies:
        self.copies.append(HeldCopies(Opened(None, HostMapping(memory).open()), self.target.loop))
        return self.copies[-1]

    def _record(self, frame: bytes) -> None:
        _, request_id, reply = messages.decode_reply(frame)
        assert request_id not in self.replies, "each request has one reply"
        self.replies[request_id] = reply

    @property
    def last(self) -> Message:
        return [*self.replies.values()][-1]

    def send(self, who: int, message: Message) -> int:
        self._last_id += 1
        self.target.loop.run_until_complete(self._receive(who, message))
        return self._last_id

    async def _receive(self, who: int, message: Message) -> None:
        self.target.router.receive(identity(who), messages.encode_request(self._last_id, message))
        await _turns()

    def ask(self, who: int, message: Message) -> Message | None:
        """The reply; None where it is yet to come."""
        return self.replies.get(self.send(who, message))

    def wait(self, request_id: int) -> Message:
        """The reply, which real threads may have to work for."""

        async def answered() -> None:
            while request_id not in self.replies:
                await asyncio.sleep(0.001)

        self.target.loop.run_until_complete(asyncio.wait_for(answered(), TIMEOUT_S))
        return self.replies[request_id]

    def answer(self, who: int, message: Message) -> Message:
        return self.wait(self.send(who, message))

    def greeting(self, client: int) -> Hello:
        return Hello(NOBODY, client.to_bytes(16, "big"), "test")

    def hello(self, who: int) -> Message | None:
        return self.ask(who, self.greeting(who))

    def memory_of(self, who: int) -> Memory:
        """Has a place of its own for the proof, unless `memory` has none."""
        own = self.target.memory_of(who).proof_address
        return replace(self.memory, proof_address=own) if self.memory.proof_address else self.memory

    def register(self, who: int, model: str = "model") -> Message | None:
        tag = ModelTag(model, (("weights", model),), 1, 1)
        message = messages.Register(f"engine {who}", 0, tag, geometry(0), self.memory_of(who))
        return self.ask(who, message)

    def prove(self, who: int, model: str = "model") -> None:
        assert isinstance(self.register(who, model), messages.Challenge)
        assert isinstance(self.answer(who, messages.Prove()), messages.Registered)

    def join(self, who: int, model: str = "model") -> None:
        assert isinstance(self.hello(who), messages.Welcome)
        self.prove(who, model)
        assert isinstance(self.ask(who, messages.Join(f"engine {who}")), messages.Joined)

    def leave(self, who: int) -> None:
        self.target.router.disconnected(identity(who))
        self._settle()

    def stored(self, *numbers: int, who: int = 0) -> tuple[bytes, ...]:
        """Client `who` has stored these chunks; their keys."""
        for number in numbers:
            self.ask(who, store(number))
        self.end_copies()
        return tuple(map(key, numbers))

    def lookup(self, who: int, number: int) -> Found:
        found = self.ask(who, question(number))
        assert isinstance(found, Found)
        return found

    def has(self, who: int, number: int) -> bool:
        """Whether a lookup by client `who` finds the chunk."""
        return self.lookup(who, number).resume_tokens == CHUNK_SIZE

    def frames(self) -> tuple[int, int, int]:
        """(free, reserved, ready); they are all that there are, as counted and as looked for one by one."""
        self.target.cache.check_integrity()
        l1 = self.target.report.status()["l1"]
        free, reserved, ready = (l1[f"{name}_bytes"] // FRAME_BYTES for name in ("free", "reserved", "ready"))
        assert free + reserved + ready == l1["total_bytes"] // FRAME_BYTES == self.target.l1.num_frames
        return free, reserved, ready

    @property
    def jobs(self) -> int:
        """Copies that wait."""
        return sum(len(each.jobs) for each in self.copies)

    def end_copies(self, error: CopyError | None = None) -> None:
        for each in self.copies:
            each.end(error)
        self._settle()

    def _settle(self) -> None:
        self.target.loop.run_until_complete(_turns())


def identity(who: int) -> bytes:
    return who.to_bytes(4, "big")


async def _turns() -> None:
    for _ in range(SETTLED_TURNS):
        await asyncio.sleep(0)


@pytest.fixture
def desk() -> Iterator[Desk]:
    with owner() as (pid, address):
        one = Desk(pid, address)
        yield one
        one.target.close()


@pytest.fixture
def serving(desk: Desk) -> Desk:
    """An engine, another one of another model, and a user."""
    desk.join(0)
    desk.join(1, "another model")
    desk.hello(USER)
    return desk


def evict_everything(desk: Desk, who: int = 0) -> None:
    for number in range(1000, 1000 + desk.target.l1.num_frames):
        desk.stored(number, who=who)


def inspect(desk: Desk, *numbers: int, engine: str = "engine 0") -> Message | None:
    return desk.ask(USER, Inspect(engine, tuple(map(key, numbers)), len(numbers) * CHUNK_SIZE))
