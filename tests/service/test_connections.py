"""Which client the server takes a connection to be of, when the number of its descriptor is used again."""

import socket
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from harness.waiting import wait_until

from lmcache_server.net.connections import Connections

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x1c\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"


class Router:
    """A ROUTER and its connections, both read only when the test says so."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.gone: list[bytes] = []
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.connections = Connections(self.socket)
        self.socket.bind(f"ipc://{path}")

    def connect(self, raw: socket.socket, frames: int) -> None:
        """A client that has sent so many frames."""
        raw.connect(str(self.path))
        raw.sendall(GREETING + READY)
        answer = b""
        while b"READY" not in answer:
            answer += raw.recv(1024)
        raw.sendall(b"\x00\x01x" * frames)

    def frame(self) -> tuple[bytes, bool]:
        """The client of the next frame, and whether the frame counts."""
        assert self.socket.poll(120_000)
        identity, frame = self.socket.recv_multipart(copy=False)
        return identity.bytes, self.connections.belongs(frame, identity.bytes)

    def accepted(self) -> int:
        """The number of the one connection that there is, when it is there."""
        wait_until(lambda: self.gone.extend(self.connections.ended()) or self.connections._open)
        (number,) = self.connections._open
        return number

    def is_empty(self) -> bool:
        self.gone += self.connections.ended()
        return not self.connections._open

    def close(self) -> None:
        self.connections.close()
        self.socket.close(0)
        self.context.term()


@pytest.fixture
def router() -> Iterator[Router]:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        router = Router(Path(directory, "s"))
        try:
            yield router
        finally:
            router.close()


@pytest.mark.parametrize("read_before", [0, 1])
def test_frames_of_a_client_that_hung_up_are_not_taken_for_those_of_the_next(router, read_before):
    """The next client's connection has the number of the last one's, some of whose frames still wait."""
    with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
        router.connect(first, frames=6)
        number = router.accepted()
        read = [router.frame() for _ in range(read_before)]
        # The server closes its end; this process keeps the number of the client's end.
        first.shutdown(socket.SHUT_RDWR)
        wait_until(router.is_empty)
        router.connect(second, frames=2)
        assert router.accepted() == number, "the number is used again"
        read += [router.frame() for _ in range(8 - read_before)]
        old, new = sorted({name for name, _ in read}, key=struct.Struct(">xI").unpack)
        counts = [(name == new, counted) for name, counted in read]
        assert (True, False) not in counts, "the second client is served"
        assert (False, True) not in counts[counts.index((True, True)) :], "the first is not, any more"
        assert router.connections._open == {number: new}
        second.shutdown(socket.SHUT_RDWR)
        wait_until(router.is_empty)
        assert router.gone[-1] == new, "its session ends with its connection"
        assert set(router.gone[:-1]) == {old}, "this one ends with its own, or when the next client speaks"
