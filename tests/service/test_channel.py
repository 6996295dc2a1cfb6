"""The client's end of the wire, where the other end or the machine is not as it should be."""

import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from desk import Desk
from harness.hostile import BENT, HostileServer
from harness.waiting import wait_until

from lmcache_client.channel import Channel, ChannelError, RefusedError
from lmcache_client.contract import messages
from lmcache_client.contract.codec import pack, unpack
from lmcache_client.contract.messages import Done, Hello, Ping, Refused, Welcome
from lmcache_client.transport import Connection, Process, System

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
    (session,) = desk.target.router.registry.sessions.values()
    desk.target.router.registry.drop(session, "silent")
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
        wait_until(process.ended, 5.0, "the process has ended")
        process.close()


def test_an_engine_hears_that_the_server_is_of_another_version(tmp_path: object) -> None:
    """What answers here says what a server of another release says: its reply has its own version."""
    address, stop = f"ipc://{tmp_path}/socket", threading.Event()
    os.chmod(str(tmp_path), 0o700)

    def answer() -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.bind(address)
            while not stop.is_set():
                if socket.poll(50):
                    identity, frame = socket.recv_multipart()
                    _, request_id, *_ = unpack(frame)
                    reply = Refused(messages.WRONG_VERSION, "not shown")
                    version = messages.PROTOCOL_VERSION + 1
                    socket.send_multipart([identity, pack([version, request_id, bytes(16), reply])])

    thread = threading.Thread(target=answer)
    thread.start()
    channel = Channel(address, lambda _channel: None)
    try:
        channel.start(5.0, 2.0)
        wait_until(lambda: channel.refusal is not None, 2.0, "the channel knows that it was refused")
        assert isinstance(channel.refusal, RefusedError)
        assert channel.refusal.code == messages.WRONG_VERSION
        assert "install the same version of lmcache-mp" in str(channel.refusal)
    finally:
        stop.set()
        thread.join()
        channel.close(0.0)


def test_a_reply_of_another_life_of_the_server_answers_nothing(hostile: HostileServer) -> None:
    """What a server says that has restarted is about requests of other sessions."""
    channel = Channel(hostile.address, lambda _channel: None)
    try:
        channel.start(5.0, 5.0)
        hostile.lies[Ping] = BENT["another boot id"]
        pending = channel.submit(Ping(), LONG_S)
        wait_until(lambda: pending.done, 10.0, "the request has ended")
        assert isinstance(pending.error, ChannelError)
        assert "has forgotten this engine" in str(pending.error)
        hostile.lies.clear()
        wait_until(lambda: pending.settled and channel.ready, 10.0, "the server is greeted again")
    finally:
        channel.close(0.0)


def test_a_reply_that_cannot_be_read_ends_the_session_and_is_said_once(hostile: HostileServer) -> None:
    """Whose reply it was is unknown: without a new session, a request would hold its memory for long."""
    said: list[str] = []
    channel = Channel(hostile.address, lambda _channel: None, lambda _ready, text: said.append(text))
    try:
        channel.start(5.0, 5.0)
        hostile.lies[Ping] = hostile.lies[Hello] = BENT["garbage"]
        pending = channel.submit(Ping(), LONG_S)
        greeted = hostile.asked[Hello]
        wait_until(lambda: hostile.asked[Hello] >= greeted + 3, 10.0, "the channel tries again")
        assert "cannot be read" in str(pending.error)
        assert sum("cannot be read" in text for text in said) == 1
        hostile.lies.clear()
        wait_until(lambda: pending.settled and channel.ready, 10.0, "the server is greeted again")
    finally:
        channel.close(0.0)


class EndlessConnection(Connection):
    """Has always one more frame."""

    def receive(self) -> bytes | None:
        return messages.encode_reply(bytes(16), 1 << 40, Done())


class EndlessSystem(System):
    def connect(self, address: str) -> Connection:
        return EndlessConnection(address)


def test_a_server_that_never_stops_talking_does_not_stop_the_engine(tmp_path: Path) -> None:
    channel = Channel(f"ipc://{tmp_path}/socket", lambda _channel: None, system=EndlessSystem())
    poll = threading.Thread(target=channel.poll, daemon=True)
    poll.start()
    poll.join(20.0)
    assert not poll.is_alive()
    channel.close(0.0)
