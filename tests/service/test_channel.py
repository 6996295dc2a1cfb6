"""The client's end of the wire, where the other end or the machine is not as it should be."""

import os
import subprocess
import threading

import zmq
from desk import Desk
from harness.waiting import wait_until

from lmcache_client.channel import Channel, RefusedError
from lmcache_client.contract import messages
from lmcache_client.contract.codec import pack, unpack
from lmcache_client.contract.messages import Done, Ping, Refused, Welcome
from lmcache_client.transport import Process


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
