"""A server that is told to end while clients connect without pause ends all the same."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.processes import free_port
from harness.server import LMCacheServer

STOPS = 3
END_S = 10
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
    clients = [
        subprocess.Popen([sys.executable, "-c", STORM, path], stdout=subprocess.PIPE) for _ in range(2)
    ]
    try:
        for client in clients:
            assert client.stdout is not None
            assert client.stdout.readline() == b"up\n"
        yield
    finally:
        for client in clients:
            client.kill()
            client.communicate()


# The socket of a server whose loop has stopped: nobody reads what ZeroMQ reports of connections.
CLOSES_LATE = """
import sys, time
from lmcache_server.config import Config
from lmcache_server.net.listener import bound_listener

with bound_listener(Config(port=int(sys.argv[1]))):
    print("up", flush=True)
    time.sleep(2)
"""


def test_a_socket_closes_though_its_monitor_is_full(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-c", CLOSES_LATE, str(port)]
    environment = {**os.environ, "LMCACHE_RUNTIME_DIR": str(tmp_path / "run")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as closing:
        assert closing.stdout is not None
        assert closing.stdout.readline() == b"up\n"
        try:
            with storm(str(tmp_path / "run" / f"{port}.sock")):
                assert closing.wait(END_S) == 0
        finally:
            closing.kill()


@pytest.mark.parametrize("_number", range(STOPS))
def test_a_stop_ends_whoever_connects(_number: int) -> None:
    server = LMCacheServer(l1_size_gb=0.02)
    server.start()
    assert server.process is not None
    try:
        with storm(server.address.removeprefix("ipc://")):
            assert server.process.stop(END_S) == 0
    finally:
        server.kill()
