"""What the helper process of a native client does with memory that a request names."""

import os
import socket
import threading
from typing import Any

import msgspec
import pytest

from lmcache_server.options.tiers.helper import Helper, Part, Reply, Request

AREA = 1 << 12
INSIDE = [Part(3, 0, AREA), Part(3, 8, AREA - 8), Part(3, AREA, 0)]
OUTSIDE = [Part(3, 0, AREA + 1), Part(3, -1, 8), Part(3, 8, -1), Part(3, AREA, 1), Part(4, 0, 8)]


class Client:
    """Keeps the sizes that it was asked to write."""

    def __init__(self) -> None:
        self.written: list[int] = []

    def share(self, _address: int, num_bytes: int) -> None:
        assert num_bytes == AREA

    def write(self, _name: str, memory: Any) -> bool:
        self.written += [num_bytes for _, num_bytes in memory]
        return True


@pytest.mark.parametrize("part", [*INSIDE, *OUTSIDE], ids=str)
def test_no_call_reaches_memory_outside_of_an_area(part: Part) -> None:
    client: Any = Client()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    serving = threading.Thread(target=Helper(lambda: client).serve, args=(theirs,))
    serving.start()
    area = os.memfd_create("area")
    os.truncate(area, AREA)

    def ask(request: Request, *descriptors: int) -> Reply:
        socket.send_fds(ours, [msgspec.msgpack.encode(request)], descriptors)
        return msgspec.msgpack.decode(ours.recv(1 << 16), type=Reply)

    with ours, theirs:
        assert not ask(Request("open")).error
        assert not ask(Request("share", [], [Part(3, 0, AREA)]), area).error
        reply = ask(Request("write", ["name"], [part]))
        ours.shutdown(socket.SHUT_RDWR)
        serving.join()
    os.close(area)
    assert bool(reply.error) == (part in OUTSIDE)
    assert client.written == ([] if reply.error else [part.num_bytes])
