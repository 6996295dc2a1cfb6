"""Replies to clients that do not read: how many bytes wait for them, over real sockets."""

import contextlib
from collections.abc import Iterator

import pytest
import zmq
from harness.waiting import wait_until

from lmcache_server.net import outbox
from lmcache_server.net.outbox import MAX_BYTES, MAX_REPLIES, MAX_TOTAL_BYTES, SMALL_BYTES, Replies

LARGE = bytes(1 << 17)
ENOUGH = 200
"""More large replies than ZeroMQ, the kernel and Replies take for one client."""
Socket = zmq.Socket[bytes]


class Clients:
    """A ROUTER socket with replies, and clients that read when the test does."""

    def __init__(self, context: "zmq.Context[Socket]", stack: contextlib.ExitStack, address: str) -> None:
        self._context, self._stack, self._address = context, stack, address
        self.router = self._socket(zmq.ROUTER)
        self.replies = Replies(self.router)
        self.router.bind(address)

    def _socket(self, kind: int) -> Socket:
        socket = self._stack.enter_context(self._context.socket(kind))
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 1)
        return socket

    def connect(self) -> tuple[bytes, Socket]:
        client = self._socket(zmq.DEALER)
        client.connect(self._address)
        client.send(b"hello")
        identity, _ = self.router.recv_multipart()
        return identity, client

    def swamp(self, identity: bytes) -> None:
        for _ in range(ENOUGH):
            self.replies.send(identity, LARGE)

    def read(self, client: Socket) -> list[bytes]:
        """Everything that is kept for the client."""
        frames = []
        while True:
            self.replies.flush()
            if not client.poll(0 if self.replies.are_waiting else 200):
                if not self.replies.are_waiting:
                    return frames
                continue
            frames.append(client.recv())


@pytest.fixture
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        yield Clients(context, stack, f"ipc://{tmp_path_factory.mktemp('zmq')}/socket")


def test_the_bytes_that_wait_for_one_client_are_bounded(clients: Clients) -> None:
    identity, client = clients.connect()
    clients.swamp(identity)
    assert MAX_BYTES - len(LARGE) < clients.replies.num_bytes <= MAX_BYTES
    for number in range(MAX_REPLIES):
        clients.replies.send(identity, b"%d" % number)
    heard = [frame for frame in clients.read(client) if frame != LARGE]
    # Without the reply to a copy, its client would keep holding the copy's blocks.
    assert heard == [b"%d" % number for number in range(len(heard))], "small replies come, and in order"
    assert len(heard) >= MAX_REPLIES - MAX_BYTES // len(LARGE)
    assert clients.replies.num_bytes == 0
    # Small replies are bounded by their number.
    clients.swamp(identity)
    for _ in range(3 * MAX_REPLIES):
        clients.replies.send(identity, bytes(SMALL_BYTES))
    assert clients.replies.num_bytes <= MAX_BYTES + MAX_REPLIES * SMALL_BYTES
    assert clients.read(client).count(bytes(SMALL_BYTES)) <= MAX_REPLIES


def test_the_bytes_that_wait_for_all_clients_are_bounded(clients: Clients) -> None:
    deaf = [clients.connect() for _ in range(MAX_TOTAL_BYTES // MAX_BYTES + 4)]
    for identity, _ in deaf:
        clients.swamp(identity)
    assert MAX_TOTAL_BYTES - len(LARGE) < clients.replies.num_bytes <= MAX_TOTAL_BYTES
    identity, client = clients.connect()
    for number in range(MAX_REPLIES):
        clients.replies.send(identity, b"%d" % number)
        assert client.recv() == b"%d" % number, "who reads is answered"


def test_a_client_that_goes_leaves_nothing(clients: Clients) -> None:
    (first, gone), (second, forgotten) = clients.connect(), clients.connect()
    clients.swamp(first)
    clients.swamp(second)
    clients.replies.forget(second)
    assert 0 < clients.replies.num_bytes <= MAX_BYTES
    gone.close()
    forgotten.close()

    def empty() -> bool:
        clients.replies.flush()
        return not clients.replies.are_waiting

    wait_until(empty, what="ZeroMQ has noticed that the client has gone")
    assert clients.replies.num_bytes == 0


def test_many_clients_that_do_not_read_keep_nobody_waiting(clients: Clients) -> None:
    deaf = [clients.connect() for _ in range(3 * outbox.TRIES)]
    for identity, _ in deaf:
        for _ in range(100):
            clients.replies.send(identity, bytes(1 << 14))
    assert clients.replies.num_bytes, "not all of them are with ZeroMQ"
    last, heard = deaf[-1][1], 0

    def goes_on() -> bool:
        nonlocal heard
        clients.replies.flush()
        while last.poll(0):
            heard += len(last.recv()) == 1 << 14
        return heard == 100

    wait_until(goes_on, what="the client that begins to read hears all")
