"""Where the server listens, and who may reach it."""

import os
import socket

import pytest

from lmcache_client.contract import endpoint
from lmcache_client.contract.endpoint import EndpointError, address, check_runtime_directory, peer_pid


@pytest.mark.parametrize(
    ("host", "expected", "is_loopback"),
    [
        ("localhost", "tcp://localhost:5555", True),
        ("tcp://127.0.0.1", "tcp://127.0.0.1:5555", True),
        ("127.1.2.3", "tcp://127.1.2.3:5555", True),
        ("::1", "tcp://[::1]:5555", True),
        ("[::1]", "tcp://[::1]:5555", True),
        ("tcp://10.0.0.1/", "tcp://10.0.0.1:5555", False),
        ("0.0.0.0", "tcp://0.0.0.0:5555", False),
        ("::", "tcp://[::]:5555", False),
        ("example.org", "tcp://example.org:5555", False),
    ],
)
def test_a_host_means_tcp_and_loopback_hosts_are_told_apart(host, expected, is_loopback):
    assert address(host, 5555) == expected
    assert endpoint.is_loopback(host) is is_loopback


def test_no_host_means_a_socket_in_the_runtime_directory(monkeypatch):
    monkeypatch.delenv("LMCACHE_RUNTIME_DIR", raising=False)
    assert address("", 5556) == f"ipc:///tmp/lmcache-mp-{os.getuid()}/5556.sock"
    monkeypatch.setenv("LMCACHE_RUNTIME_DIR", "/run/cache")
    assert address("", 5556) == "ipc:///run/cache/5556.sock"
    # Its length counts in bytes.
    for name, fix in {
        "/run/" + "x" * 100: "to a shorter directory",
        "/run/" + "é" * 60: "to a shorter directory",
        "/run/\udcff": "to a directory with a plain name",
        "/run/a\nb": "to a directory with a plain name",
    }.items():
        monkeypatch.setenv("LMCACHE_RUNTIME_DIR", name)
        with pytest.raises(EndpointError, match=f"set LMCACHE_RUNTIME_DIR {fix}"):
            address("", 5555)


def test_the_runtime_directory_is_a_directory_of_ones_own_that_nobody_else_may_enter(tmp_path, monkeypatch):
    for mode in (0o750, 0o701, 0o777):
        tmp_path.chmod(mode)
        with pytest.raises(EndpointError, match="chmod 700"):
            check_runtime_directory(tmp_path)
    tmp_path.chmod(0o700)
    check_runtime_directory(tmp_path)
    link, file = tmp_path / "link", tmp_path / "file"
    link.symlink_to(tmp_path)
    file.touch(mode=0o600)
    for path in (link, file):
        with pytest.raises(EndpointError, match="must be a directory of user id"):
            check_runtime_directory(path)
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(EndpointError, match="LMCACHE_RUNTIME_DIR"):
        check_runtime_directory(tmp_path)


def test_the_kernel_knows_the_peer_of_a_unix_socket_alone(tmp_path):
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        client.connect(str(tmp_path / "socket"))
        descriptor = client.fileno()
        assert peer_pid(descriptor) == os.getpid()
        assert client.fileno() == descriptor, "it is still open"
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        client.connect(listener.getsockname())
        assert peer_pid(client.fileno()) is None


def test_a_peer_that_cannot_be_asked_is_nobody_not_unknown():
    """A server that took it for unknown would let a client register memory that is not its own."""
    with open(os.devnull) as file:
        for descriptor in (-1, file.fileno()):
            assert peer_pid(descriptor) == 0
