"""File descriptors run short: the server turns new clients away with a sentence and serves the old ones."""

import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from harness.clients import client, cpu_s
from harness.exercise import exercise, new_engine
from harness.paths import ROOT
from harness.peer import Peer
from harness.server import LMCacheServer
from harness.waiting import wait_until

from lmcache_client.contract import messages
from lmcache_client.contract.messages import Done, Ping, Refused, Welcome
from lmcache_server.host.descriptors import ENOUGH_LIMIT
from lmcache_server.host.preflight import FEWEST_OPEN_FILES, LEAST_OPEN_FILES

LIMIT = LEAST_OPEN_FILES
SMALL_LIMIT = 512
TURNED_AWAY = "connections are turned away"


@pytest.fixture(autouse=True)
def many_descriptors_for_the_tests_themselves() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 3 * LIMIT:
        pytest.skip(f"needs a limit of open files of {3 * LIMIT}, not {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def narrow_server(limit: int = LIMIT, hard: int | None = None) -> Iterator[LMCacheServer]:
    """A server that starts with `limit` descriptors and may not have more than `hard`."""
    with LMCacheServer(l1_size_gb=0.1, descriptors=(limit, limit if hard is None else hard)) as server:
        yield server


def connected(server: LMCacheServer, stack: ExitStack) -> socket.socket:
    raw = stack.enter_context(socket.socket(socket.AF_UNIX))
    raw.connect(server.address.removeprefix("ipc://"))
    return raw


def descriptors(server: LMCacheServer) -> int:
    return len(list(Path(f"/proc/{server.pid}/fd").iterdir()))


def test_the_hard_limit_is_used_and_one_that_is_too_low_is_said_at_start() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    for hard in {1000, 20_000, most}:
        if hard <= most:
            with narrow_server(64, hard) as server:
                assert resource.prlimit(server.pid, resource.RLIMIT_NOFILE) == (min(hard, ENOUGH_LIMIT), hard)
                server.wait_for_log("INFO ready")
                for said in f"the limit of open files is {hard}", "raise it to 4096 or more (ulimit -n":
                    server.wait_for_log(said, int(hard < LEAST_OPEN_FILES))


def cpu_in_a_second(pid: int) -> float:
    before_s = cpu_s(pid)
    time.sleep(1.0)
    return cpu_s(pid) - before_s


def test_more_connections_than_fit_are_turned_away_and_the_old_are_served() -> None:
    with narrow_server() as server, ExitStack() as stack:
        old = new_engine(server.address, "old")
        stack.callback(old.close)
        for _ in range(2 * LIMIT):
            connected(server, stack)
        wait_until(lambda: TURNED_AWAY in server.log.read_text(), what="the log says who is turned away")
        exercise(old, 1)
        assert exercise(old, 1) == 3 * old.chunk_size
        assert server.status()["sessions"], "HTTP answers"
        assert descriptors(server) < LIMIT
        wait_until(lambda: cpu_in_a_second(server.pid) < 0.3, 10, "it rests: it does not spin")
        stack.pop_all().close()
        late = new_engine(server.address, "late")
        exercise(late, 2)
        assert exercise(late, 2) == 3 * late.chunk_size, "afterwards new ones are served"
        server.wait_for_log(TURNED_AWAY)
        assert server.terminate() == 0


FLOODER = """
import socket, sys
print("up", flush=True)
held = []
while True:
    raw = socket.socket(socket.AF_UNIX)
    raw.setblocking(False)
    try:
        raw.connect(sys.argv[1])
    except OSError:
        raw.close()
        continue
    held.append(raw)
    if len(held) > 8000:
        held.clear()
"""


def test_a_flood_of_connections_does_not_end_the_server() -> None:
    """libzmq ends the process when it has no descriptor for a connection that it accepts."""
    with narrow_server() as server:
        old = new_engine(server.address, "old")
        path = server.address.removeprefix("ipc://")
        with client(FLOODER, path), client(FLOODER, path):
            served = 0
            while served < 4 or TURNED_AWAY not in server.log.read_text():
                exercise(old, 1)
                assert descriptors(server) < LIMIT
                served += 1
        assert exercise(old, 1) == 3 * old.chunk_size
        server.wait_at_rest(sessions=2)
        assert server.terminate() == 0


def test_a_worker_for_whom_no_descriptor_is_left_is_told_to_come_again() -> None:
    """Not that its memory cannot be reached, which would end an engine's start."""
    with narrow_server(SMALL_LIMIT) as server, ExitStack() as stack:
        count = SMALL_LIMIT // 2 - descriptors(server) - 1
        # All connect before one greets: half of the limit is connections, a quarter is left to greet.
        peers = [stack.enter_context(Peer(server.address, f"peer {n}")) for n in range(count)]
        for peer in peers:
            assert isinstance(peer.ask(Ping()), Done)
        replies = [peer.ask(peer.hello()) for peer in peers]
        greeted = [peer for peer, reply in zip(peers, replies, strict=True) if isinstance(reply, Welcome)]
        refusals = [reply for reply in replies if isinstance(reply, Refused)]
        assert greeted
        assert refusals
        assert {reply.code for reply in refusals} == {messages.OVERLOADED}
        assert "ulimit -n" in refusals[0].message
        greeted[0].ask(greeted[0].register())
        reply = greeted[0].ask(messages.Prove())
        assert isinstance(reply, Refused)
        assert reply.code == messages.OVERLOADED
        for peer in greeted[1:]:
            peer.ask(messages.Goodbye())
        greeted[0].live("goodbye")
        server.wait_at_rest()
        assert server.terminate() == 0


def test_a_server_with_hardly_any_descriptors_does_not_start() -> None:
    """A hundred idle clients at the fewest are served; with fewer descriptors they would end the server."""
    with pytest.raises(RuntimeError, match="the limit of open files is 64"), narrow_server(64):
        pass
    with narrow_server(FEWEST_OPEN_FILES) as server, ExitStack() as idle:
        for _ in range(100):
            idle.enter_context(socket.socket(socket.AF_UNIX)).connect(server.address.removeprefix("ipc://"))
        assert server.cli("ping").returncode == 0


def test_closed_standard_files_are_not_those_of_the_server() -> None:
    """Whatever a server prints would go into its lock file."""
    server = LMCacheServer(l1_size_gb=0.02)
    command = [sys.executable, "-m", "lmcache_server", "server", "--port", str(server.port)]
    command += ["--http-port", str(server.http_port), "--l1-size-gb", "0.02"]
    closed = ["sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-', *command]
    with subprocess.Popen(closed, env=server.environment, cwd=ROOT) as process:
        try:
            wait_until(lambda: server.cli("ping").returncode == 0, 60, "the server answers")
            names = [os.readlink(f"/proc/{process.pid}/fd/{number}") for number in range(3)]
            assert names == ["/dev/null"] * 3
        finally:
            process.terminate()
    assert process.returncode == 0
    shutil.rmtree(server.runtime_dir)


def test_a_client_that_is_closed_has_no_descriptor_left(server: LMCacheServer) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    for number in range(4):
        new_engine(server.address, f"engine {number}").close()
        if number == 0:
            before = descriptors()
    wait_until(lambda: descriptors() <= before, what="the descriptors of clients are closed")
