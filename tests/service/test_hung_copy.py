"""A copy that never returns: it may stop its own worker's copies, and nothing else.

A GPU that hangs, or memory whose pages the kernel waits for, looks like this to a copy thread.
"""

import asyncio
import threading
from collections.abc import Iterator

import pytest
from fuzz.messages import BUFFER_BYTES, geometry
from fuzz.targets import RouterTarget, owner

from lmcache_client.contract import messages
from lmcache_client.contract.keys import ROOT_KEY, ModelTag
from lmcache_client.contract.messages import (
    Found,
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
from lmcache_server.service import registry as registry_module
from lmcache_server.transfer.host import HostMapping
from lmcache_server.transfer.plan import Pieces
from lmcache_server.transfer.worker import CopyWorker

IDS = tuple(range(1, 17))
TIMEOUT_S = 10.0
KEY = b"\x07" * 32


class Hanging(HostMapping):
    """The memory of a worker whose copies hang from `hang` on, until `go_on`."""

    hang = threading.Event()
    go_on = threading.Event()
    reached = threading.Event()

    def copy(self, pieces: Pieces, *, load: bool) -> None:
        if self.hang.is_set():
            self.reached.set()
            assert self.go_on.wait(6 * TIMEOUT_S)
        super().copy(pieces, load=load)


class Server:
    """A router with two clients; client 0 has memory of the kind above."""

    def __init__(self, pid: int, address: int) -> None:
        self.target = RouterTarget(pid, address)
        self.memory = Memory(pid, ((address, BUFFER_BYTES),), address + BUFFER_BYTES)
        self.replies: dict[int, Message] = {}
        record = self.target.router._send
        self.target.router._send = lambda who, frame: (self._record(frame), record(who, frame))  # type: ignore
        self.target.system.copier = self._copier  # type: ignore[method-assign]
        self._last_id = 0

    def _copier(self, name: str, memory: Memory, alive: object) -> CopyWorker:
        kind = Hanging if name == "copy-worker 0-0" else HostMapping
        return CopyWorker(name, kind(memory), lambda: True, self.target.loop)

    def _record(self, frame: bytes) -> None:
        _, request_id, reply = messages.decode_reply(frame)
        self.replies[request_id] = reply

    def send(self, who: int, message: Message, connection: int = 0) -> int:
        self._last_id += 1
        frame = messages.encode_request(self._last_id, message)
        self.target.loop.run_until_complete(self._receive(bytes([who, connection]), frame))
        return self._last_id

    async def _receive(self, identity: bytes, frame: bytes) -> None:
        self.target.router.receive(identity, frame)
        await asyncio.sleep(0)

    def wait(self, request_id: int) -> Message:
        async def answered() -> None:
            while request_id not in self.replies:
                await asyncio.sleep(0.001)

        self.target.loop.run_until_complete(asyncio.wait_for(answered(), TIMEOUT_S))
        return self.replies[request_id]

    def ask(self, who: int, message: Message, connection: int = 0) -> Message:
        return self.wait(self.send(who, message, connection))

    def join(self, who: int) -> None:
        assert isinstance(self.ask(who, hello(who)), Welcome)
        tag = ModelTag("model", (), 1, 1)
        self.ask(who, Register(f"worker {who}", 0, tag, geometry(0), self.memory))
        assert isinstance(self.ask(who, Prove()), Registered)
        self.ask(who, Join(f"worker {who}"))


def hello(who: int) -> Hello:
    return Hello(1 << 30, bytes([who]) * 16, "test")


def stored(number: int) -> Store:
    return Store((StoreObject(bytes([number]) * 32, ROOT_KEY, 0, 0, IDS),))


@pytest.fixture
def server() -> Iterator[Server]:
    for event in (Hanging.hang, Hanging.go_on, Hanging.reached):
        event.clear()
    with owner() as (pid, address):
        one = Server(pid, address)
        one.join(0)
        one.join(1)
        yield one
        Hanging.go_on.set()
        one.target.close()


def found(server: Server, who: int) -> Found:
    reply = server.ask(who, Lookup("r", (KEY,), 0, 256, 257))
    assert isinstance(reply, Found)
    return reply


def test_others_look_up_store_and_load_while_a_copy_hangs(server: Server) -> None:
    Hanging.hang.set()
    hung = server.send(0, stored(1))
    assert Hanging.reached.wait(TIMEOUT_S)
    assert server.ask(1, stored(7)) == Stored(1, 0, 0)
    hit = found(server, 1)
    assert hit.resume_tokens == 256
    assert server.ask(1, Load("r", hit.lease_id, KEY, 256, 0, (IDS,))) == messages.Done()
    assert found(server, 0).resume_tokens == 256, "the engine whose copies hang still looks up"
    assert hung not in server.replies
    Hanging.go_on.set()
    assert server.wait(hung) == Stored(1, 0, 0)


def test_the_end_of_a_session_whose_copy_hangs_stops_nobody_and_frees_no_frame(server: Server) -> None:
    Hanging.hang.set()
    hung = server.send(0, stored(1))
    assert Hanging.reached.wait(TIMEOUT_S)
    reserved = server.target.cache.reserved_frames
    assert reserved > 0
    server.target.router.disconnected(bytes([0, 0]))
    assert server.ask(1, stored(7)) == Stored(1, 0, 0)
    assert server.target.cache.reserved_frames == reserved, "the copy may still write there"
    assert server.target.report.status()["sessions"][0]["engine_id"] == "worker 1"

    # The same client comes again: it is answered when its former copy has ended, not before.
    greeting = server.send(0, hello(0), connection=1)
    again = server.send(0, hello(0), connection=2)
    found(server, 1)
    assert not {greeting, again} & server.replies.keys()
    Hanging.go_on.set()
    assert isinstance(server.wait(again), Welcome)
    assert isinstance(server.wait(greeting), Refused), "only the last greeting of a client counts"
    assert isinstance(server.wait(hung), Stored)
    assert server.target.cache.reserved_frames == 0
    server.target.cache.check_integrity()


def test_a_client_that_hangs_up_while_its_greeting_waits_leaves_no_session(server: Server) -> None:
    Hanging.hang.set()
    server.send(0, stored(1))
    assert Hanging.reached.wait(TIMEOUT_S)
    server.target.router.disconnected(bytes([0, 0]))
    greeting = server.send(0, hello(0), connection=1)
    server.target.router.disconnected(bytes([0, 1]))
    Hanging.go_on.set()
    assert isinstance(server.wait(greeting), Refused)
    assert len(server.target.router.registry.sessions) == 1


def test_a_connection_that_greets_as_two_clients_has_one_session(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, dropped = server.target.router.registry, []
    drop = registry.drop
    monkeypatch.setattr(registry, "drop", lambda session, why: (dropped.append(session), drop(session, why)))
    Hanging.hang.set()
    server.send(0, stored(1))
    assert Hanging.reached.wait(TIMEOUT_S)
    server.target.router.disconnected(bytes([0, 0]))
    greeting = server.send(0, hello(0), connection=1)
    assert isinstance(server.ask(0, hello(9), connection=1), Welcome)
    other = registry.sessions[bytes([0, 1])]
    Hanging.go_on.set()
    assert isinstance(server.wait(greeting), Welcome)
    assert other in dropped, "or its leases and its descriptor would stay for ever"


def test_goodbye_is_answered_when_the_copy_has_ended(server: Server) -> None:
    Hanging.hang.set()
    server.send(0, stored(1))
    assert Hanging.reached.wait(TIMEOUT_S)
    goodbye = server.send(0, Goodbye())
    found(server, 1)
    assert goodbye not in server.replies
    Hanging.go_on.set()
    assert server.wait(goodbye) == messages.Done()


def test_the_end_of_the_server_does_not_wait_for_ever(server: Server) -> None:
    Hanging.hang.set()
    server.send(0, stored(1))
    assert Hanging.reached.wait(TIMEOUT_S)
    server.target.router.registry.close()
    assert not server.target.loop.run_until_complete(server.target.system.all_ended(0.2))
    assert isinstance(server.ask(1, hello(1), connection=1), Refused), "nobody is welcome any more"
    server.target.router.registry._closed = False


def test_a_fault_between_two_checksums_gives_all_frames_back(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter((b"\0" * 64, None))

    def checksums(*_arguments: object) -> bytes:
        found = next(calls)
        if found is None:
            raise MemoryError("no room for a checksum")
        return found

    monkeypatch.setattr("lmcache_server.transfer.jobs.checksums", checksums)
    two = Store(tuple(StoreObject(bytes([n]) * 32, ROOT_KEY, 0, 0, IDS) for n in (1, 2)))
    assert server.ask(1, two) == Stored(0, 0, 2)
    assert server.target.cache.reserved_frames == 0
    server.target.cache.check_integrity()


def test_a_greeting_that_its_client_gave_up_does_not_wait_for_a_copy_that_hangs(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that gets no answer greets again every few seconds, for as long as the copy hangs."""
    monkeypatch.setattr(registry_module, "SILENT_SESSION_S", 0.01)
    Hanging.hang.set()
    server.send(0, stored(1))
    assert Hanging.reached.wait(TIMEOUT_S)
    server.target.router.disconnected(bytes([0, 0]))
    given_up = server.send(0, hello(0), connection=1)
    last = server.send(0, hello(0), connection=2)
    assert isinstance(server.wait(given_up), Refused)
    assert last not in server.replies
    Hanging.go_on.set()
    assert isinstance(server.wait(last), Welcome)
