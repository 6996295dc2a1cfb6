"""The real router in this process, with copies that end when the test says so."""

import asyncio

from fuzz.messages import BUFFER_BYTES, geometry
from fuzz.targets import RouterTarget

from lmcache_client.contract import messages
from lmcache_client.contract.keys import ModelTag
from lmcache_client.contract.messages import (
    Hello,
    Join,
    Joined,
    Memory,
    Message,
    Prove,
    Register,
    Registered,
    Welcome,
)
from lmcache_server.transfer.base import CopyError, Opened, Outcome
from lmcache_server.transfer.host import HostMapping
from lmcache_server.transfer.jobs import CopyJob

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
    """Asks the router as client `who`; None where the answer is yet to come."""

    def __init__(self, pid: int, address: int) -> None:
        self.copies: list[HeldCopies] = []
        self.target = RouterTarget(pid, address)
        self.memory = Memory(pid, ((address, BUFFER_BYTES),), address + BUFFER_BYTES)
        self.target.system.copier = self._copier  # type: ignore[method-assign,assignment]
        self.replies: list[tuple[int, Message]] = []
        record = self.target.router._send
        self.target.router._send = lambda who, frame: (self._record(frame), record(who, frame))  # type: ignore
        self._last_id = 0

    def _copier(self, _name: str, memory: Memory, _alive: object) -> HeldCopies:
        self.copies.append(HeldCopies(Opened(None, HostMapping(memory).open()), self.target.loop))
        return self.copies[-1]

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
        await _turns()

    def hello(self, who: int) -> Message | None:
        return self.ask(who, Hello(NOBODY, who.to_bytes(16, "big"), "test"))

    def register(self, who: int, model: str = "model") -> Message | None:
        tag = ModelTag(model, (("weights", model),), 1, 1)
        return self.ask(who, Register(f"engine {who}", 0, tag, geometry(0), self.memory))

    def join(self, who: int, model: str = "model") -> None:
        """Makes client `who` the worker and the scheduler of an engine of its own."""
        assert isinstance(self.hello(who), Welcome)
        self.register(who, model)
        assert isinstance(self.ask(who, Prove()), Registered)
        assert isinstance(self.ask(who, Join(f"engine {who}")), Joined)

    def leave(self, who: int) -> None:
        """The connection of client `who` is lost."""
        self.target.router.disconnected(who.to_bytes(4, "big"))
        self._settle()

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


async def _turns() -> None:
    for _ in range(SETTLED_TURNS):
        await asyncio.sleep(0)
