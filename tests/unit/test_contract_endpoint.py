"""Where the server listens, and who may reach it."""

import os
import socket

import pytest

from lmcache_client.contract import endpoint
from lmcache_client.contract.endpoint import EndpointError, address, check_runtime_directory, peer_pid


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", "tcp://localhost:5555"),
        ("tcp://localhost", "tcp://localhost:5555"),
        ("tcp://10.0.0.1/", "tcp://10.0.0.1:5555"),
        ("::1", "tcp://[::1]:5555"),
        ("[::1]", "tcp://[::1]:5555"),
    ],
)
def test_a_host_means_tcp(host, expected):
    assert address(host, 5555) == expected


def test_no_host_means_a_socket_in_the_runtime_directory(monkeypatch):
    monkeypatch.setenv("LMCACHE_RUNTIME_DIR", "/run/cache")
    assert address("", 5556) == "ipc:///run/cache/5556.sock"
    monkeypatch.delenv("LMCACHE_RUNTIME_DIR")
    assert address("", 5556) == f"ipc:///tmp/lmcache-mp-{os.getuid()}/5556.sock"


def test_a_socket_path_that_the_kernel_refuses_is_refused_with_the_fix(monkeypatch):
    monkeypatch.setenv("LMCACHE_RUNTIME_DIR", "/run/" + "x" * 100)
    with pytest.raises(EndpointError, match="set LMCACHE_RUNTIME_DIR to a shorter directory"):
        address("", 5555)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("localhost", True), ("tcp://127.0.0.1", True), ("127.1.2.3", True), ("[::1]", True),
     ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("example.org", False)],
)  # fmt: skip
def test_loopback_hosts_are_told_apart(host, expected):
    assert endpoint.is_loopback(host) is expected


def test_a_directory_of_ones_own_is_accepted(tmp_path):
    tmp_path.chmod(0o700)
    check_runtime_directory(tmp_path)


def test_a_directory_that_others_may_enter_is_refused(tmp_path):
    for mode in (0o750, 0o701, 0o777):
        tmp_path.chmod(mode)
        with pytest.raises(EndpointError, match="chmod 700"):
            check_runtime_directory(tmp_path)


def test_a_file_or_a_link_is_no_runtime_directory(tmp_path):
    tmp_path.chmod(0o700)
    link, file = tmp_path / "link", tmp_path / "file"
    link.symlink_to(tmp_path)
    file.touch(mode=0o600)
    for path in (link, file):
        with pytest.raises(EndpointError, match="must be a directory of user id"):
            check_runtime_directory(path)


def test_a_directory_of_another_user_is_refused(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
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


def test_a_socket_path_that_is_no_text_is_refused_with_the_fix(monkeypatch):
    for name in ("/run/\udcff", "/run/a\nb"):
        monkeypatch.setenv("LMCACHE_RUNTIME_DIR", name)
        with pytest.raises(EndpointError, match="set LMCACHE_RUNTIME_DIR to a directory with a plain name"):
            address("", 5555)


def test_the_length_of_a_socket_path_counts_in_bytes(monkeypatch):
    monkeypatch.setenv("LMCACHE_RUNTIME_DIR", "/run/" + "é" * 60)
    with pytest.raises(EndpointError, match="set LMCACHE_RUNTIME_DIR to a shorter directory"):
        address("", 5555)
