"""A server whose stderr nobody reads: a stopped terminal, a blocked log driver."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.peer import Peer
from harness.server import LMCacheServer
from harness.waiting import wait_until

from lmcache_client.contract.messages import Done, Ping
from lmcache_server.host.logs import MAX_LINES

LINE_BYTES = 100
PIPE_BYTES = 1 << 16
LINES = 2 * MAX_LINES + PIPE_BYTES // LINE_BYTES


@pytest.fixture
def unread(tmp_path: Path) -> Iterator[tuple[LMCacheServer, int]]:
    """A server and the reading end of the pipe that is its stderr."""
    pipe = tmp_path / "stderr"
    os.mkfifo(pipe)
    descriptor = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    server = LMCacheServer(l1_size_gb=0.02, log_level="debug")
    server.log, usual = pipe, server.log
    with server:
        # The end of a log goes into the message of a failed test, and nobody could read the end of a pipe.
        assert server.process is not None
        server.log = server.process.log = usual
        with Peer(server.address) as peer:
            for _ in range(LINES // 100):
                for _ in range(100):
                    peer.socket.send(b"garbage")  # a line each
                assert isinstance(peer.ask(Ping()), Done), "the event loop does not wait for a reader"
        yield server, descriptor
    os.close(descriptor)


def test_the_server_goes_on_and_ends(unread: tuple[LMCacheServer, int]) -> None:
    server, _ = unread
    assert server.get("/healthz") == "ok\n"
    assert server.terminate() == 0


def test_who_reads_later_learns_how_many_lines_were_dropped(unread: tuple[LMCacheServer, int]) -> None:
    server, descriptor = unread
    heard = b""

    def notice() -> re.Match[bytes] | None:
        nonlocal heard
        with contextlib.suppress(BlockingIOError):
            heard += os.read(descriptor, 1 << 20)
        return re.search(rb" WARNING (\d+) lines of the log were dropped: nobody read them\n", heard)

    match = wait_until(notice)
    assert match is not None
    lines = heard.count(b"dropped a frame of 7 bytes")
    assert MAX_LINES <= lines <= LINES - int(match[1])
    assert server.terminate() == 0
    wait_until(lambda: notice() and heard.endswith(b" INFO stopping with 0 sessions open\n"))
