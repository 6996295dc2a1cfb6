"""Peers that speak ZMTP by hand: what no ZeroMQ client would send must not end the server."""

import os
import socket
import struct
import time
from pathlib import Path

import pytest
from harness.peer import Peer
from harness.server import LMCacheServer

from lmcache_client.contract.messages import Done

FIRST_UNSEEDED = 0x6B8B4567
"""Where ROUTER's own names for its clients begin when nobody has seeded libc's rand()."""
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)


def connected(server: LMCacheServer) -> socket.socket:
    raw = socket.socket(socket.AF_UNIX)
    raw.settimeout(5)
    raw.connect(str(Path(server.address.removeprefix("ipc://"))))
    return raw


def ready(identity: bytes) -> bytes:
    """The READY command of a DEALER that calls itself `identity`."""

    def entry(name: bytes, value: bytes) -> bytes:
        return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value

    body = b"\x05READY" + entry(b"Socket-Type", b"DEALER") + entry(b"Identity", identity)
    return (
        b"\x04" + bytes([len(body)]) if len(body) < 256 else b"\x06" + struct.pack(">Q", len(body))
    ) + body


def greeted(server: LMCacheServer) -> socket.socket:
    raw = connected(server)
    raw.sendall(GREETING)
    received = b""
    while len(received) < len(GREETING):
        received += raw.recv(len(GREETING) - len(received))
    return raw


def serves(server: LMCacheServer) -> bool:
    with Peer(server.address, "next") as peer:
        peer.live("store")
        return peer.ask(peer.message("goodbye")) == Done()


def test_a_peer_cannot_take_the_name_that_the_server_gives_next(server: LMCacheServer) -> None:
    raw = []
    for number in range(64):
        raw.append(greeted(server))
        raw[-1].sendall(ready(b"\0" + struct.pack(">I", FIRST_UNSEEDED + number)))
    time.sleep(0.3)
    assert serves(server)
    for each in raw:
        each.close()


@pytest.mark.parametrize(
    "sent",
    [
        os.urandom(64),
        b"\xff" + bytes(8) + b"\x7f\x01\x05",
        GREETING[:12] + b"CURVE".ljust(20, b"\0") + bytes(32),
        GREETING + b"\x04\xff" + bytes(255),
        GREETING + b"\x06" + b"\xff" * 8,
        GREETING + ready(b"\0"),
        GREETING + ready(b"x" * 255),
        GREETING + ready(b"a") + b"\x00\x00",
        GREETING + ready(b"a") + b"\x01\x00" * 1000 + b"\x00\x00",
        GREETING + ready(b"a") + b"\x02" + struct.pack(">Q", 1 << 40),
        GREETING + ready(b"a") + b"\x04\x05\x04PING",
        GREETING + ready(b"a") + ready(b"b"),
    ],
    ids=["noise", "old version", "other mechanism", "long command", "endless command", "forbidden name",
         "long name", "empty message", "a thousand parts", "a message of a TiB", "short ping", "ready twice"],
)  # fmt: skip
def test_malformed_peers_do_no_harm(server: LMCacheServer, sent: bytes) -> None:
    with connected(server) as raw:
        raw.sendall(sent)
        time.sleep(0.1)
        assert serves(server)
    assert serves(server)
