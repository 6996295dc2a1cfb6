"""Peers that speak ZMTP by hand: what no ZeroMQ client would send must not end the server."""

import os
import socket
import struct
import time
from pathlib import Path

from harness.peer import Peer
from harness.server import LMCacheServer
from harness.waiting import PATIENCE_S

from lmcache_client.contract.messages import Done

FIRST_UNSEEDED = 0x6B8B4567
"""Where ROUTER's own names for its clients begin when nobody has seeded libc's rand()."""
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)


def connected(server: LMCacheServer) -> socket.socket:
    raw = socket.socket(socket.AF_UNIX)
    raw.settimeout(PATIENCE_S)
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


MALFORMED = {
    "noise": os.urandom(64),
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "old version": b"\xff" + bytes(8) + b"\x7f\x01\x05",
    "other mechanism": GREETING[:12] + b"CURVE".ljust(20, b"\0") + bytes(32),
    "long command": GREETING + b"\x04\xff" + bytes(255),
    "endless command": GREETING + b"\x06" + b"\xff" * 8,
    "forbidden name": GREETING + ready(b"\0"),
    "long name": GREETING + ready(b"x" * 255),
    "empty message": GREETING + ready(b"a") + b"\x00\x00",
    "a thousand parts": GREETING + ready(b"a") + b"\x01\x00" * 1000 + b"\x00\x00",
    "a message of a TiB": GREETING + ready(b"a") + b"\x02" + struct.pack(">Q", 1 << 40),
    "short ping": GREETING + ready(b"a") + b"\x04\x05\x04PING",
    "ready twice": GREETING + ready(b"a") + ready(b"b"),
}


def test_malformed_peers_do_no_harm(server: LMCacheServer) -> None:
    for what, sent in MALFORMED.items():
        with connected(server) as raw:
            raw.sendall(sent)
            time.sleep(0.1)  # until the server has read it
            assert serves(server), what
        assert serves(server), what
