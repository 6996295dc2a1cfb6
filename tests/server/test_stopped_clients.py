"""Clients that stand still or are killed in the middle of copies, or that read nothing they are told: the
server stays whole, and bytes stay right."""

import itertools
import os
import platform
import random
import time

import pytest
import zmq
from harness.clients import client, go_on, stop
from harness.exercise import exercise, new_engine, served
from harness.peer import Peer, widest_geometry
from harness.processes import tail
from harness.server import LMCacheServer
from harness.waiting import PATIENCE_S, wait_until

from lmcache_client.contract import messages
from lmcache_client.contract.control import Status
from lmcache_client.contract.keys import ModelTag
from lmcache_client.contract.messages import Done, Ping, Refused, Stored
from lmcache_server.admin.status import SHOWN_BYTES
from lmcache_server.net.outbox import HIGH_WATER, MAX_BYTES

PAIRS = 4
COUNT = 6000
"""Requests whose replies nobody reads."""
STATUSES = 'lmcache_requests_total{op="status",outcome="ok"}'

CLIENT = """
import random, sys
from harness.exercise import exercise, keep_the_server_copying, new_engine
engine = new_engine(sys.argv[1], sys.argv[2])
draw = random.Random(sys.argv[2])
for turn in range(1_000_000):
    keep_the_server_copying(engine, draw.randrange(1 << 30))
    exercise(engine, draw.randrange(4))
    if turn < 2:
        print("up" if not turn else "again", flush=True)
    if turn == 12:
        print("on", flush=True)
"""


def test_a_client_stopped_in_mid_copy_disturbs_nobody_and_goes_on() -> None:
    """The kernel copies from and to a stopped process as to any other: its copies end, their answers wait."""
    draw = random.Random(5)
    with LMCacheServer(l1_size_gb=0.2) as server, client(CLIENT, server.address, "stopped") as stopped:
        bystander, busy = new_engine(server.address, "bystander"), 0
        # On a busy machine a stop seldom meets a copy: then there are more stops.
        for number in range(120):
            if number >= 8 and busy:
                break
            time.sleep(draw.random() * 0.05)
            stop(stopped.pid)
            busy += server.status()["l1"]["reserved_bytes"] > 0
            assert exercise(bystander, 20 + number % 2) == (0 if number < 2 else 3 * 256)
            server.wait_until(lambda l1: l1["readers"] == l1["reserved_bytes"] == 0)
            go_on(stopped.pid)
        assert busy, "some stops found a copy under way"
        assert stopped.stdout.readline() == b"again\n"
        assert stopped.stdout.readline() == b"on\n", "it went on and saw only right bytes"
        stop(stopped.pid)
        stopped.kill()
        server.wait_at_rest(sessions=2)
        assert server.terminate() == 0, "the invariants are checked at the end"


def test_clients_killed_in_mid_copy_also_while_they_are_stopped_leave_nothing_behind() -> None:
    draw = random.Random(3)
    # Less room than the prompts and the stores beside them take: eviction goes on all the while.
    with LMCacheServer(l1_size_gb=0.1) as server:
        failures = 0.0
        # Some of them must die in mid-copy.
        for number in itertools.count():
            if number >= PAIRS and failures:
                break
            names = (f"client {number}", f"client {number}, to be stopped")
            with (
                client(CLIENT, server.address, names[0]) as one,
                client(CLIENT, server.address, names[1]) as two,
            ):
                time.sleep(draw.random() * draw.choice((0.01, 0.1, 0.3)))
                for each in (one, two):
                    assert each.popen.poll() is None, f"a wrong byte or an error: {tail(each.log)}"
                stop(two.pid)
                one.kill()
                time.sleep(draw.random() * 0.05)
                two.kill()
            server.wait_at_rest()
            failures = server.metrics()['lmcache_copy_failures_total{direction="store"}']
        for number in range(2):
            served(server, "one of the last", number)
            assert served(server, "the last", number) == 3 * 256, "it serves as before"
        assert server.terminate() == 0, "the invariants are checked at the end"


HANGS = """
import ctypes, fcntl, os, struct, sys, threading, time
from harness.rawclient import RawEngine, chain, group
PAGE, MADV_DONTNEED, USERFAULTFD, UFFDIO_API, UFFDIO_REGISTER = 1 << 20, 4, 323, 0xC018AA3F, 0xC020AA00
libc = ctypes.CDLL(None, use_errno=True)
engine = RawEngine(sys.argv[1], [group(layers=1, page_bytes=PAGE)], num_blocks=40).start()
start, size = -(-engine.memory.ctypes.data // PAGE) * PAGE + PAGE, 37 * PAGE
assert libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), MADV_DONTNEED) == 0
descriptor = libc.syscall(USERFAULTFD, os.O_CLOEXEC)
assert descriptor >= 0, ctypes.get_errno()
fcntl.ioctl(descriptor, UFFDIO_API, bytearray(struct.pack("QQQ", 0xAA, 0, 0)))
fcntl.ioctl(descriptor, UFFDIO_REGISTER, bytearray(struct.pack("QQQQ", start, size, 1, 0)))
keys = chain(range(engine.chunk_size), engine.chunk_size)
blocks = [list(range(4, 4 + engine.chunk_size // 16))]
threading.Thread(target=engine.store_prompt, args=(keys, blocks), daemon=True).start()
print("up", flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a page wait")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of its system calls")
def test_a_copy_that_hangs_keeps_no_server_from_ending() -> None:
    """A page of the client's memory never comes, as with a file server that is gone. Both threads that share
    the copy wait for it."""
    with LMCacheServer(l1_size_gb=0.1) as server, client(HANGS, server.address) as stuck:
        server.wait_until(lambda l1: l1["reserved_bytes"] > 0)
        ending, server.process = server.process, None
        assert ending is not None
        assert ending.stop(60) == 0
        assert stuck.popen.poll() is None, "not because its client has ended"


def test_reports_that_nobody_reads_take_bounded_memory() -> None:
    """Tens of bytes ask for a report of more than a hundred KiB."""
    with LMCacheServer(l1_size_gb=0.05) as server, Peer(server.address) as asker, zmq.Context() as context:
        server.wait_until_populated()
        asker.geometry = widest_geometry()
        asker.ask(asker.hello())
        for number in range(20):
            asker.model = ModelTag("m", (("weights", f"{number}"),), 1, 1)
            asker.live("store", since="register")
        report_bytes = len(server.get("/status"))
        assert SHOWN_BYTES * 0.8 < report_bytes < SHOWN_BYTES * 2
        before = server.rss_bytes()
        for count in (250, 80):
            deaf = [context.socket(zmq.DEALER) for _ in range(3)]
            for socket in deaf:
                socket.setsockopt(zmq.RCVHWM, 1)
                socket.connect(server.address)
            handled = server.metrics()[STATUSES]
            for _ in range(count):
                for socket in deaf:
                    socket.send(messages.encode_request(1, Status()))
            everything = handled + len(deaf) * count
            wait_until(lambda: server.metrics()[STATUSES] == everything, 60)  # noqa: B023
            most = len(deaf) * ((HIGH_WATER + 1) * report_bytes + MAX_BYTES) + (16 << 20)
            assert server.rss_bytes() - before < most < len(deaf) * 250 * report_bytes / 2
            assert isinstance(asker.ask(Ping()), Done)
            for socket in deaf:
                socket.close(0)


def test_a_client_that_never_reads_its_replies_costs_little() -> None:
    with LMCacheServer(l1_size_gb=0.1) as server:
        server.wait_until_populated()
        bystander = new_engine(server.address, "bystander")
        exercise(bystander, 0)
        before = server.rss_bytes()
        for kind in ("ping", "lookup"):
            with Peer(server.address) as deaf:
                deaf.live("store")
                message = Ping() if kind == "ping" else deaf.lookup()
                answered = server.answered()
                for _ in range(COUNT):
                    deaf.send(message)
                assert exercise(bystander, 0) == 3 * bystander.chunk_size
                wait_until(lambda: server.answered() >= answered + COUNT, what="all are answered")  # noqa: B023
                assert server.rss_bytes() - before < 64 << 20
                # It hears what was kept for it, then what it asks now.
                replies = 0
                while deaf.socket.poll(200 if replies >= 1000 else 1000 * PATIENCE_S):
                    _, reply = deaf.receive()
                    replies += 1
                assert 1000 <= replies < COUNT, kind
                assert not isinstance(reply, Refused)
                assert isinstance(deaf.ask(Ping()), Done)
                assert isinstance(deaf.ask(deaf.store()), Stored)
                deaf.ask(deaf.message("goodbye"))
