"""A server that is told to end while clients connect without pause ends all the same."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from harness.clients import client
from harness.processes import free_port
from harness.server import LMCacheServer
from harness.waiting import PATIENCE_S
from zmq.utils.monitor import recv_monitor_message

from lmcache_server.net import connections

STOPS = 2
TURNS = 2_000
STORM = """
import socket, sys, time
print("up", flush=True)
while True:
    try:
        client = socket.socket(socket.AF_UNIX)
        client.connect(sys.argv[1])
        client.close()
    except OSError:
        time.sleep(0.01)
"""


@contextlib.contextmanager
def storm(path: str) -> Iterator[None]:
    with client(STORM, path), client(STORM, path):
        yield


# The socket of a server whose loop has stopped: nobody reads what ZeroMQ reports of connections.
CLOSES_LATE = """
import sys, time
from lmcache_server.config import Config
from lmcache_server.net.listener import bound_listener

with bound_listener(Config(port=int(sys.argv[1]))):
    print("up", flush=True)
    time.sleep(2)
"""


def test_a_socket_closes_though_its_monitor_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("LMCACHE_RUNTIME_DIR", str(tmp_path / "run"))
    with client(CLOSES_LATE, str(port)) as closing, storm(str(tmp_path / "run" / f"{port}.sock")):
        assert closing.popen.wait(PATIENCE_S) == 0


def test_clients_that_connect_without_pause_do_not_hold_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = 0

    def counted(*arguments: Any) -> Any:
        nonlocal read
        read += 1
        return recv_monitor_message(*arguments)

    monkeypatch.setattr(connections, "recv_monitor_message", counted)
    path = str(tmp_path / "storm.sock")
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        following = connections.Connections(socket)
        socket.bind(f"ipc://{path}")
        most = 0
        with storm(path):
            for _ in range(TURNS):
                read = 0
                following.ended()
                most = max(most, read)
        following.close()
    assert 0 < most <= connections.MOST_EVENTS


def test_a_stop_ends_whoever_connects() -> None:
    for _ in range(STOPS):
        with LMCacheServer(l1_size_gb=0.02) as server, storm(server.address.removeprefix("ipc://")):
            assert server.terminate() == 0
