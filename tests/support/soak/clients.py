"""The clients of the soak. Each function is the life of one, in a process of its own."""

import ctypes
import mmap
import os
import random
import signal
import socket
import time
from collections.abc import Callable

from harness.exercise import exercise, keep_the_server_copying
from harness.peer import Peer
from harness.rawclient import RawEngine, group
from harness.waiting import wait_until
from msgspec import structs

from lmcache_client.contract.control import Status
from lmcache_client.contract.geometry import GroupSpec, Region
from lmcache_client.memory.host import HostExport
from lmcache_client.server_channel import ChannelError

NAMESPACES = 60
PROMPTS = 4
NUM_BLOCKS = 130
PAUSE_S = 0.5
LATE_S = 20.0
GEOMETRIES = (
    (group(layers=2, page_bytes=16 << 10), group("sliding_window", window=100, layers=2, page_bytes=8 << 10)),
    (group(layers=2, page_bytes=16 << 10),),
    (group(layers=1, page_bytes=8 << 10), group("chunked_local", window=192, layers=3, page_bytes=8 << 10)),
)


def _engine(address: str, draw: random.Random) -> tuple[RawEngine, int]:
    namespace = draw.randrange(NAMESPACES)
    groups = GEOMETRIES[namespace % len(GEOMETRIES)]
    name = f"{os.getpid()} of {namespace}"
    engine = RawEngine(address, groups, NUM_BLOCKS, name, f"model {namespace}").start()
    wait_until(lambda: engine.chunk_size and engine.scheduler.ready, LATE_S, "the engine is registered")
    return engine, namespace


def visit(address: str, _http_port: int, draw: random.Random, life_s: float) -> None:
    """Registers, stores, looks up, loads, compares every byte; leaves in order, or without a word."""
    ends_s = time.monotonic() + life_s
    engine, namespace = _engine(address, draw)
    while time.monotonic() < ends_s:
        try:
            exercise(engine, draw.randrange(PROMPTS), salt=namespace)
        except ChannelError:
            time.sleep(0.1)
        time.sleep(draw.random() * PAUSE_S)
    if draw.random() < 0.5:
        engine.close()


def die_in_mid_copy(address: str, _http_port: int, draw: random.Random, life_s: float) -> None:
    """Stores what nobody asks for, which keeps L1 full, and dies while the server copies from it."""
    ends_s = time.monotonic() + life_s
    engine, _ = _engine(address, draw)
    while time.monotonic() < ends_s:
        keep_the_server_copying(engine, draw.randrange(1 << 30), stores=6)
        time.sleep(0.1)
    keep_the_server_copying(engine, draw.randrange(1 << 30), stores=60)
    time.sleep(draw.random() * 0.003)
    os.kill(os.getpid(), signal.SIGKILL)


def fail(address: str, _http_port: int, draw: random.Random, life_s: float) -> None:
    """Its memory is no longer there when the server copies: every store and every load fails."""
    ends_s = time.monotonic() + life_s
    region = Region(0, 0, 4096, 4096)
    memory = mmap.mmap(-1, NUM_BLOCKS * region.stride_bytes)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    spec = structs.replace(group(layers=1), regions=(region,))
    groups: tuple[GroupSpec, ...] = (spec,)
    export = HostExport(((start, len(memory)),))
    engine = RawEngine(address, groups, NUM_BLOCKS, f"failing {os.getpid()}", "failing", export=export)
    engine.start()
    ctypes.CDLL(None).munmap(ctypes.c_void_p(start), ctypes.c_size_t(len(memory)))
    while time.monotonic() < ends_s:
        keep_the_server_copying(engine, draw.randrange(1 << 30), stores=20)
        time.sleep(0.2)
    # Python must not unmap what is not there: some other thread may have the address by now.
    os._exit(0)


def speak_by_hand(address: str, _http_port: int, draw: random.Random, life_s: float) -> None:
    """Peers that get to some point, say something that is no message, and hang up."""
    ends_s = time.monotonic() + life_s
    while time.monotonic() < ends_s:
        # A name of its own: the last one has it until the server has read all that the last one said.
        with Peer(address, f"peer {os.getpid()} {draw.randrange(1 << 30)}") as peer:
            until = draw.choice(Peer.LIFE)
            peer.live(until)
            for _ in range(draw.randrange(8)):
                peer.send(draw.choice((Status(), peer.lookup())))
                peer.socket.send(draw.randbytes(draw.randrange(200)))
        time.sleep(draw.random() * PAUSE_S)


def browse(_address: str, http_port: int, draw: random.Random, life_s: float) -> None:
    """Asks for pages, half of the time only a part of a request."""
    ends_s = time.monotonic() + life_s
    while time.monotonic() < ends_s:
        with socket.create_connection(("127.0.0.1", http_port), 5) as connection:
            path = draw.choice(("/", "/metrics", "/status", "/history", "/readyz", "/nothing"))
            request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
            connection.sendall(request[: draw.choice((len(request), draw.randrange(len(request))))])
            if draw.random() < 0.5:
                connection.settimeout(0.2)
                try:
                    while connection.recv(1 << 16):
                        pass
                except OSError:
                    pass
        time.sleep(draw.random() * PAUSE_S)


Life = Callable[[str, int, random.Random, float], None]
KINDS: tuple[Life, ...] = (visit, visit, visit, die_in_mid_copy, die_in_mid_copy, fail, speak_by_hand, browse)
