"""The client's end of the wire, where the other end or the machine is not as it should be."""

import concurrent.futures
import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from desk import Desk
from harness.hostile import BENT, BOOT_ID, HostileServer, says
from harness.waiting import PATIENCE_S, wait_until

from lmcache_client.contract import messages
from lmcache_client.contract.codec import pack
from lmcache_client.contract.messages import Done, Found, Goodbye, Hello, Ping, Refused, Welcome
from lmcache_client.server_channel import (
    KEEPER_INTERVAL_S,
    Channel,
    ChannelError,
    Pending,
    RefusedError,
    unsent,
)
from lmcache_client.servers import Part, Servers, Together, give_back
from lmcache_client.transport import Connection, ConnectionLostError, Process, System

LONG_S = 60.0


@pytest.fixture
def hostile(tmp_path: Path) -> Iterator[HostileServer]:
    tmp_path.chmod(0o700)
    with HostileServer(tmp_path) as server:
        yield server


def test_a_client_whose_session_has_ended_hears_of_it_from_a_ping(desk: Desk) -> None:
    """A session that was silent for too long is dropped on a connection that is still up."""
    welcome = desk.hello(0)
    assert isinstance(welcome, Welcome)
    assert desk.ask(0, Ping(welcome.session_id)) == Done()
    (session,) = desk.target.router.sessions.by_identity.values()
    desk.target.router.sessions.drop(session, "silent")
    reply = desk.ask(0, Ping(welcome.session_id))
    assert isinstance(reply, Refused)
    assert reply.code == messages.NOT_REGISTERED
    assert desk.ask(0, Ping()) == Done(), "whoever has no session may still ask whether the server is there"


def test_a_process_is_watched_by_a_descriptor_of_any_number() -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        descriptor = os.pidfd_open(other.pid)
        os.dup2(descriptor, 2000)
        os.close(descriptor)
        process = Process(2000)
        assert not process.ended()
        other.kill()
        wait_until(process.ended, what="the process has ended")
        process.close()


@contextlib.contextmanager
def channel_to(server: HostileServer, ready: bool = True, said: list[str] | None = None) -> Iterator[Channel]:
    """A channel, which tells what it says."""
    texts = [] if said is None else said
    channel = Channel(server.address, lambda _channel: None, lambda _level, text: texts.append(text))
    try:
        channel.start(PATIENCE_S, PATIENCE_S)
        assert channel.ready is ready
        yield channel
    finally:
        channel.close(0.0)


def test_an_engine_hears_that_the_server_is_of_another_version(hostile: HostileServer) -> None:
    """What answers here says what a server of another release says: its reply has its own version."""
    reply, version = Refused(messages.WRONG_VERSION, "not shown"), messages.PROTOCOL_VERSION + 1
    hostile.script = lambda number, _message: [[pack([version, number, bytes(16), reply])]]
    with channel_to(hostile, ready=False) as channel:
        wait_until(lambda: channel.refusal is not None, what="the channel knows that it was refused")
        assert isinstance(channel.refusal, RefusedError)
        assert channel.refusal.code == messages.WRONG_VERSION
        assert "install the same version of lmcache-mp" in str(channel.refusal)
    # What a server writes is cut and made plain.
    error = str(RefusedError(Refused("x", "no\x1b[2J\nno" * 1000)))
    assert error.startswith("no [2J no")
    assert len(error) == messages.MAX_REASON
    assert error.isprintable()


class ScarceSystem(System):
    """Has no file descriptor left at first."""

    tries = 0

    def connect(self, address: str) -> Connection:
        self.tries += 1
        if self.tries < 3:
            raise ConnectionLostError("Too many open files")
        return super().connect(address)


def test_a_channel_that_finds_no_descriptor_connects_when_there_is_one(hostile: HostileServer) -> None:
    """An engine that wakes must not end because of it."""
    said, system = list[str](), ScarceSystem()
    channel = Channel(hostile.address, lambda _: None, lambda _, text: said.append(text), system)
    try:
        channel.start(PATIENCE_S, PATIENCE_S)
        assert channel.ready
        assert system.tries == 3
        assert said == [f"connected to the lmcache server at {hostile.address}"]
    finally:
        channel.close(0.0)


def test_the_kernel_says_who_may_read_this_process(hostile: HostileServer) -> None:
    """A server that listens at the socket could else let a process of its choice trace the engine."""
    hostile.lies[Hello] = says(Welcome(BOOT_ID, 1, "x", 1))
    with channel_to(hostile) as channel:
        assert channel.server_pid == os.getpid()


def test_a_thread_that_waits_for_a_reply_keeps_no_other_from_asking(hostile: HostileServer) -> None:
    """As a step that waits for its loads, while the thread that waits for the GPU sends the next one."""
    with channel_to(hostile) as channel:
        never = Pending(channel.system.now_s() + LONG_S)
        waiting = threading.Thread(target=channel.poll, args=(never, LONG_S))
        waiting.start()
        with concurrent.futures.ThreadPoolExecutor() as pool:
            assert pool.submit(channel.call, Ping(), LONG_S).result(LONG_S / 2) == Done()
        assert waiting.is_alive()
        never.reply = Done()
        waiting.join()


def test_a_lookup_given_up_while_its_reply_is_taken_in_gives_its_lease_back() -> None:
    channel, released = Channel("ipc://nowhere", lambda _channel: None), list[int]()
    client = Servers([channel], "engine")

    class Racing(Pending):
        """Given up between the two steps in which the keeper takes in the reply."""

        @property
        def done(self) -> bool:
            was_done = super().done
            if threading.current_thread() is threading.main_thread() and not giving_up.is_alive():
                giving_up.start()
                giving_up.join(0.3)
            return was_done

    pending = Racing(LONG_S, partial(give_back, channel))
    lookup = Together([], Ping(), 0.0, Done)
    lookup.parts.append(Part(channel, pending, channel.generation))
    giving_up = threading.Thread(target=client.forget, args=(lookup,))
    channel.submit = lambda it, *_: released.extend(getattr(it, "lease_ids", ())) or unsent("")  # type: ignore
    with channel._lock:  # as the keeper holds it
        pending._finish(Found(256, 7, 60, ()))
    giving_up.join()
    assert released == [7]
    channel.close(0.0)


def test_a_reply_of_another_life_of_the_server_answers_nothing(hostile: HostileServer) -> None:
    """What a server says that has restarted is about requests of other sessions."""
    with channel_to(hostile) as channel:
        hostile.lies[Ping] = BENT["another boot id"]
        pending = channel.submit(Ping(), LONG_S)
        wait_until(lambda: pending.done, what="the request has ended")
        assert isinstance(pending.error, ChannelError)
        assert "has forgotten this engine" in str(pending.error)
        hostile.lies.clear()
        wait_until(lambda: pending.settled and channel.ready, what="the server is greeted again")


def test_a_reply_that_cannot_be_read_ends_the_session_and_is_said_once(hostile: HostileServer) -> None:
    """Whose reply it was is unknown: without a new session, a request would hold its memory for long."""
    said: list[str] = []
    with channel_to(hostile, said=said) as channel:
        hostile.lies[Ping] = hostile.lies[Hello] = BENT["garbage"]
        pending = channel.submit(Ping(), LONG_S)
        greeted = hostile.asked[Hello]
        wait_until(lambda: hostile.asked[Hello] >= greeted + 3, what="the channel tries again")
        assert "cannot be read" in str(pending.error)
        assert sum("cannot be read" in text for text in said) == 1
        hostile.lies.clear()
        wait_until(lambda: pending.settled and channel.ready, what="the server is greeted again")


def test_a_server_that_was_told_goodbye_is_not_greeted_again(hostile: HostileServer) -> None:
    """It would map the memory of an engine that falls asleep once more."""
    told, turns = lambda: hostile.asked.get(Goodbye, 0), list[int]()
    for times, lies in enumerate(({}, {Goodbye: BENT["silence"]})):
        hostile.lies.update(lies)
        channel = Channel(hostile.address, lambda _: None, on_turn=lambda _: turns.append(told()))
        channel.start(PATIENCE_S, PATIENCE_S)
        turns.clear()
        wait_until(turns.copy, what="the keeper is at work")
        assert channel.close(4 * KEEPER_INTERVAL_S if lies else PATIENCE_S) is not bool(lies)
        wait_until(lambda number=times + 1: told() == number, what="the server was told")
        assert turns[-1] == times, "the keeper went on after the goodbye"


def test_a_request_whose_connection_broke_is_settled_no_sooner_than_its_server_is_done(tmp_path):
    """A server that lives may still copy. That another one answers at its address says nothing about it."""
    tmp_path.chmod(0o700)
    another = bytes(range(1, 17))
    with contextlib.ExitStack() as stack:
        with HostileServer(tmp_path) as server:
            channel = stack.enter_context(channel_to(server))
            server.lies[Ping] = BENT["silence"]
            pending = channel.submit(Ping(), LONG_S)
        wait_until(lambda: pending.done, what="the connection broke")
        channel.poll()  # after the keeper's turn in which it did
        assert not pending.settled
        with HostileServer(tmp_path) as server:
            welcome = Welcome(another, os.getpid(), "x", 1)
            server.script = lambda number, _message: [[messages.encode_reply(another, number, welcome)]]
            wait_until(lambda: channel.ready, what="another server is greeted")
            channel.poll()
            assert not pending.settled
        with HostileServer(tmp_path):
            wait_until(lambda: pending.settled, what="its own server has greeted this client again")


def test_a_server_that_never_stops_talking_does_not_stop_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = messages.encode_reply(bytes(16), 1 << 40, Done())
    monkeypatch.setattr(Connection, "receive", lambda _: frame)
    channel = Channel(f"ipc://{tmp_path}/socket", lambda _channel: None)
    poll = threading.Thread(target=channel.poll, daemon=True)
    poll.start()
    poll.join(LONG_S)
    assert not poll.is_alive()
    channel.close(0.0)
