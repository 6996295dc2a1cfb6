"""Every bound of what one client, or all of them, may have the server keep: the real router, in this process,
with copies that end when the test says so."""

import asyncio
from collections.abc import Iterator

import pytest
from fuzz.messages import BUFFER_BYTES, geometry
from fuzz.targets import RouterTarget, owner
from msgspec import structs

from lmcache_client.contract import messages
from lmcache_client.contract.keys import ROOT_KEY, ModelTag
from lmcache_client.contract.messages import (
    Done,
    Goodbye,
    Hello,
    Join,
    Load,
    Lookup,
    Memory,
    Message,
    Prove,
    Refused,
    Register,
    Registered,
    Store,
    Stored,
    StoreObject,
    Welcome,
)
from lmcache_server.service.registry import MAX_JOBS, MAX_SESSIONS, MAX_WAITING_BYTES, MAX_WORKERS
from lmcache_server.transfer.base import CopyJob, Opened, Outcome
from lmcache_server.transfer.host import HostMapping

SETTLED_TURNS = 6
"""Turns of the loop after which a coroutine has come as far as it can."""
NOBODY = 1 << 30
"""A process id that means nothing."""


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

    def end(self) -> None:
        jobs, self.jobs = self.jobs, []
        for job in jobs:
            job.set_result(Outcome(None, 0))

    def close(self) -> "asyncio.Future[None]":
        self.end()
        if not self.ended.done():
            self.ended.set_result(None)
        return self.ended


class Desk:
    """Asks the router as client `who`; None where the answer is yet to come."""

    def __init__(self, pid: int, address: int) -> None:
        self.target = RouterTarget(pid, address)
        self.memory = Memory(pid, ((address, BUFFER_BYTES),), address + BUFFER_BYTES)
        self.target.system.copier = self._copier  # type: ignore[method-assign,assignment]
        self.replies: list[tuple[int, Message]] = []
        record = self.target.router._send
        self.target.router._send = lambda who, frame: (self._record(frame), record(who, frame))  # type: ignore
        self._last_id = 0

    def _copier(self, _name: str, memory: Memory, _alive: object) -> HeldCopies:
        self.copies = HeldCopies(Opened(None, HostMapping(memory).open()), self.target.loop)
        return self.copies

    def _record(self, frame: bytes) -> None:
        self.replies.append(messages.decode_reply(frame)[1:])

    def ask(self, who: int, message: Message) -> Message | None:
        self._last_id += 1
        count = len(self.replies)
        self.target.loop.run_until_complete(self._receive(who, message))
        return self.replies[-1][1] if len(self.replies) > count else None

    async def _receive(self, who: int, message: Message) -> None:
        identity = who.to_bytes(4, "big")
        self.target.router.receive(identity, messages.encode_request(self._last_id, message))
        for _ in range(SETTLED_TURNS):
            await asyncio.sleep(0)

    def hello(self, who: int) -> Message | None:
        return self.ask(who, Hello(NOBODY, who.to_bytes(16, "big"), "test"))

    def register(self, who: int, model: str = "model") -> Message | None:
        tag = ModelTag(model, (), 1, 1)
        return self.ask(who, Register(f"engine {who}", 0, tag, geometry(0), self.memory))

    def end_copies(self) -> None:
        async def end() -> None:
            self.copies.end()
            for _ in range(SETTLED_TURNS):
                await asyncio.sleep(0)

        self.target.loop.run_until_complete(end())


@pytest.fixture
def desk() -> Iterator[Desk]:
    with owner() as (pid, address):
        one = Desk(pid, address)
        yield one
        one.target.close()


@pytest.fixture
def worker(desk: Desk) -> Desk:
    """Client 0 is worker and scheduler of an engine."""
    desk.hello(0)
    desk.register(0)
    assert isinstance(desk.ask(0, Prove()), Registered)
    desk.ask(0, Join("engine 0"))
    return desk


def refused(reply: Message | None) -> bool:
    assert reply is None or isinstance(reply, (Refused, Stored)), reply
    if isinstance(reply, Refused):
        assert reply.code == messages.OVERLOADED
    return isinstance(reply, Refused)


IDS = tuple(range(1, 17))


def store(number: int, padding: int = 0) -> Store:
    """One object that is new and `padding` that are the same and so busy."""
    key = number.to_bytes(32, "big")
    return Store((StoreObject(key, ROOT_KEY, 0, 0, IDS),) * (1 + padding))


def test_copies_that_wait_are_bounded_by_their_number(worker: Desk) -> None:
    key = b"\x07" * 32
    assert worker.ask(0, Store((StoreObject(key, ROOT_KEY, 0, 0, IDS),))) is None
    worker.end_copies()
    found = worker.ask(0, Lookup("r", (key,), 0, 256, 257))
    assert isinstance(found, messages.Found)
    load = Load("r", found.lease_id, key, 256, 0, (IDS,))
    for _ in range(MAX_JOBS):
        assert worker.ask(0, load) is None
    assert refused(worker.ask(0, load))
    assert refused(worker.ask(0, store(2)))
    assert len(worker.copies.jobs) == MAX_JOBS
    worker.end_copies()
    assert worker.ask(0, store(3)) is None
    worker.end_copies()
    assert [type(reply) for _, reply in worker.replies].count(Done) == MAX_JOBS


def test_copies_that_wait_are_bounded_by_the_bytes_of_their_requests(worker: Desk) -> None:
    message = store(1, padding=4000)
    each = len(messages.encode_request(1000, message))
    accepted = 0
    # L1 has room for fewer objects than it takes: those that find none are answered at once.
    while not refused(worker.ask(0, store(accepted, padding=4000))):
        accepted += 1
        assert accepted < MAX_JOBS
    waiting = len(worker.copies.jobs)
    assert waiting * each <= MAX_WAITING_BYTES < (waiting + 1) * each
    worker.end_copies()
    assert not refused(worker.ask(0, structs.replace(message)))


def test_sessions_are_bounded(desk: Desk) -> None:
    for who in range(MAX_SESSIONS):
        assert isinstance(desk.hello(who), Welcome)
    assert refused(desk.hello(MAX_SESSIONS))
    assert isinstance(desk.hello(5), Welcome), "who is there already may greet again"
    desk.ask(7, Goodbye())
    assert isinstance(desk.hello(MAX_SESSIONS), Welcome)


def test_workers_are_bounded(desk: Desk) -> None:
    for who in range(MAX_WORKERS):
        desk.hello(who)
        assert isinstance(desk.register(who), messages.Challenge)
    desk.hello(MAX_WORKERS)
    assert refused(desk.register(MAX_WORKERS))
    assert isinstance(desk.register(3), messages.Challenge), "who is registered may do so again"
    desk.ask(9, Goodbye())
    assert isinstance(desk.register(MAX_WORKERS), messages.Challenge)


def test_models_that_come_and_go_are_forgotten(desk: Desk) -> None:
    desk.hello(0)
    for number in range(200):
        desk.register(0, f"model {number}")
        assert isinstance(desk.ask(0, Prove()), Registered)
        assert len(desk.target.router.registry.known) <= 2
    assert len(list(desk.target.router.registry.engines)) == 1


def test_what_is_known_of_a_namespace_is_small(worker: Desk) -> None:
    """It outlives the engine as long as one chunk of it is stored."""
    assert worker.ask(0, store(1)) is None
    worker.end_copies()
    worker.ask(0, Goodbye())
    (summary,) = worker.target.router.registry.known.values()
    assert _size(summary) < 2000


def _size(value: object) -> int:
    if isinstance(value, dict):
        return sum(_size(key) + _size(each) for key, each in value.items())
    return sum(map(_size, value)) if isinstance(value, (list, tuple)) else len(str(value))
