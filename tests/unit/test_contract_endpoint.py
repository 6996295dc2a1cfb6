"""Where the server listens, and who may reach it."""

import os
import re
import socket
import types
from pathlib import Path

import pytest

from lmcache_client.contract import endpoint
from lmcache_client.contract.endpoint import EndpointError, address, split, start_command
from lmcache_client.contract.key_file import read_key


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


@pytest.mark.parametrize("host", ["fe80::1%eth0", "::ffff:10.0.0.1", "cache_1.internal"])
def test_other_hosts_are_taken_as_they_are(host):
    assert host in address(host, 5555)


@pytest.mark.parametrize("host", ["http://cache", "10.0.0.1:5555", "cache:5555", "a b", "tcp://", "a/b", "*"])
def test_what_is_no_host_is_one_clear_error(host):
    """Not a server that seems never to be there."""
    with pytest.raises(EndpointError, match=f"^{re.escape(repr(host))} is no host: name one such as"):
        address(host, 5555)


def test_what_starts_a_server_at_an_address():
    assert start_command(address("", 5999)) == "lmcache server --port 5999"
    assert start_command(address("::1", 5999)) == "lmcache server --host ::1 --port 5999"
    assert (
        start_command(address("cache.example.org", 80)) == "lmcache server --host cache.example.org --port 80"
    )


def test_no_host_means_a_socket_in_the_runtime_directory(monkeypatch):
    monkeypatch.delenv("LMCACHE_RUNTIME_DIR", raising=False)
    assert address("", 5556) == f"ipc:///tmp/lmcache-mp-{os.getuid()}/5556.sock"
    monkeypatch.setenv("LMCACHE_RUNTIME_DIR", "/run/cache")
    assert address("", 5556) == "ipc:///run/cache/5556.sock"
    # Its length counts in bytes.
    for name, fault in {
        "/run/" + "x" * 100: "is too long for a socket",
        "/run/" + "é" * 60: "is too long for a socket",
        "/run/\udcff": "cannot be printed",
        "/run/a\nb": "cannot be printed",
        "run/a": "does not begin with /",
    }.items():
        monkeypatch.setenv("LMCACHE_RUNTIME_DIR", name)
        with pytest.raises(EndpointError, match=f"{fault}: set LMCACHE_RUNTIME_DIR to"):
            address("", 5555)


def test_the_runtime_directory_is_a_directory_of_ones_own_that_nobody_else_may_enter(tmp_path, monkeypatch):
    for mode in (0o750, 0o701, 0o777, 0o1777):
        tmp_path.chmod(mode)
        said = f"set LMCACHE_RUNTIME_DIR to one that is closed to others, such as a new {tmp_path}/lmcache$"
        with pytest.raises(EndpointError, match=f"may enter {tmp_path}: {said}"):
            endpoint.check_runtime_directory(tmp_path)
        for name in ("5555.sock", "5555.lock", "77.memory"):
            (tmp_path / name).touch()
            with pytest.raises(
                EndpointError, match=f"may enter {tmp_path}: run 'chmod 700 {tmp_path}', or set"
            ):
                endpoint.check_runtime_directory(tmp_path)
        for name in ("x.sock", "5555.socket", "lock", ".sock"):
            (tmp_path / name).touch()
            with pytest.raises(EndpointError, match=said):
                endpoint.check_runtime_directory(tmp_path)
            (tmp_path / name).unlink()
        for name in ("5555.sock", "5555.lock", "77.memory"):
            (tmp_path / name).unlink()
    tmp_path.chmod(0o700)
    endpoint.check_runtime_directory(tmp_path)
    link, file = tmp_path / "link", tmp_path / "file"
    link.symlink_to(tmp_path)
    file.touch(mode=0o600)
    for path in (link, file):
        with pytest.raises(EndpointError, match="is no directory: set LMCACHE_RUNTIME_DIR"):
            endpoint.check_runtime_directory(path)
    mine = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    with pytest.raises(EndpointError, match=r"belongs to user .* LMCACHE_RUNTIME_DIR"):
        endpoint.check_runtime_directory(tmp_path)
    tmp_path.chmod(0o777)  # whose owner could give it to anybody
    with pytest.raises(endpoint.ForeignDirectoryError):
        endpoint.check_runtime_directory(tmp_path)


def test_root_may_use_a_directory_of_another_user_that_it_has_named(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    info = types.SimpleNamespace(st_uid=1234567, st_mode=tmp_path.lstat().st_mode)
    monkeypatch.setattr(Path, "lstat", lambda _path: info)
    monkeypatch.setattr(os, "getuid", lambda: 0)
    monkeypatch.delenv("LMCACHE_RUNTIME_DIR", raising=False)
    with pytest.raises(EndpointError, match="belongs to user id 1234567"):
        endpoint.check_runtime_directory(tmp_path)
    monkeypatch.setenv("LMCACHE_RUNTIME_DIR", str(tmp_path))
    endpoint.check_runtime_directory(tmp_path)
    with pytest.raises(EndpointError, match="belongs to user id 1234567"):
        endpoint.check_runtime_directory(tmp_path, must_own=True)


def test_the_kernel_knows_the_peer_of_a_unix_socket_alone(tmp_path):
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        client.connect(str(tmp_path / "socket"))
        descriptor = client.fileno()
        assert endpoint.peer_pid(descriptor) == os.getpid()
        assert client.fileno() == descriptor, "it is still open"
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        client.connect(listener.getsockname())
        assert endpoint.peer_pid(client.fileno()) is None


def test_a_peer_that_cannot_be_asked_is_nobody_not_unknown():
    """A server that took it for unknown would let a client register memory that is not its own."""
    with open(os.devnull) as file:
        for descriptor in (-1, file.fileno()):
            assert endpoint.peer_pid(descriptor) == 0


# -- the key file ----------------------------------------------------------------------------------------

KEY = bytes(range(32))


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "key"
    file.touch(0o600)
    file.write_bytes(KEY)
    return str(file)


def test_a_key_is_32_bytes_or_64_digits(path):
    for content in (KEY, KEY.hex().encode(), KEY.hex().upper().encode() + b"\r\n"):
        Path(path).write_bytes(content)
        assert read_key(path) == KEY
    for content in (b"", KEY[1:], KEY + b"\n", KEY.hex().encode()[1:], b"\xff" * 64, bytes(1 << 20)):
        Path(path).write_bytes(content)
        for mode in (0o600, 0o644):  # of a file without a key, nobody is told to change the mode
            os.chmod(path, mode)
            with pytest.raises(ValueError, match=f"{path} must have 32 bytes"):
                read_key(path)
    with pytest.raises(ValueError, match=r"none: copy it, or make one with"):
        read_key(path + "none")
    with pytest.raises(ValueError, match="Is a directory"):
        read_key(os.path.dirname(path))


@pytest.mark.parametrize("mode", [0o440, 0o640])
def test_nobody_else_may_read_or_change_it_but_a_group_as_kubernetes_mounts_it(mode, path, monkeypatch):
    for others in (0o604, 0o660, 0o620, 0o601):
        os.chmod(path, others)
        with pytest.raises(ValueError, match=f"chmod 600 {path}"):
            read_key(path)
    os.chmod(path, mode)
    group = os.stat(path).st_gid
    for own, others in ((group, []), (group + 1, [group])):
        monkeypatch.setattr(os, "getegid", lambda own=own: own)
        monkeypatch.setattr(os, "getgroups", lambda others=others: others)
        assert read_key(path) == KEY
    monkeypatch.setattr(os, "getgroups", list)
    with pytest.raises(ValueError, match="only its groups may also read it"):
        read_key(path)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ValueError, match="it is another user's, so make a copy"):
        read_key(path)


def test_an_address_names_the_key_file_of_tcp(path, monkeypatch):
    with_key = address("10.0.0.1", 5555, path)
    assert with_key == f"tcp://10.0.0.1:5555?key_file={path}"
    plain, key = split(with_key)
    assert plain == "tcp://10.0.0.1:5555"
    assert len(key) == 32
    assert key != KEY, "a tier that has the same file has another key"
    assert start_command(with_key) == f"lmcache server --host 10.0.0.1 --port 5555 --key-file {path}"
    assert split(address("10.0.0.1", 5555)) == ("tcp://10.0.0.1:5555", b"")
    monkeypatch.chdir(os.path.dirname(path))
    assert address("10.0.0.1", 5555, "key") == with_key, "another process reads it, too"
    assert address("", 5555, "none").startswith("ipc://"), "a Unix socket needs no key"
    with pytest.raises(EndpointError, match=r"cannot use the key file: .*none: copy it, or make one with"):
        address("10.0.0.1", 5555, "none")
