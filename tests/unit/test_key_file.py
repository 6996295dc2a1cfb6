"""Who may read a key file, and what is in it."""

import os
from pathlib import Path

import pytest

from lmcache_client.contract.endpoint import EndpointError, address, split, start_command
from lmcache_client.contract.key_file import read_key

KEY = bytes(range(32))


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "key"
    file.touch(0o600)
    file.write_bytes(KEY)
    return str(file)


def test_a_key_is_32_bytes_or_64_digits(path: str) -> None:
    for content in (KEY, KEY.hex().encode(), KEY.hex().upper().encode() + b"\r\n"):
        Path(path).write_bytes(content)
        assert read_key(path) == KEY
    for content in (b"", KEY[1:], KEY + b"\n", KEY.hex().encode()[1:], b"\xff" * 64, bytes(1 << 20)):
        Path(path).write_bytes(content)
        with pytest.raises(ValueError, match=f"{path} must have 32 bytes"):
            read_key(path)
    with pytest.raises(ValueError, match=r"none: No such file"):
        read_key(path + "none")
    with pytest.raises(ValueError, match="Is a directory"):
        read_key(os.path.dirname(path))


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o660, 0o620, 0o601, 0o777])
def test_nobody_else_may_read_or_change_it(mode: int, path: str) -> None:
    os.chmod(path, mode)
    with pytest.raises(ValueError, match=f"chmod 600 {path}"):
        read_key(path)


@pytest.mark.parametrize("mode", [0o440, 0o640])
def test_a_group_of_this_process_may_read_it_as_kubernetes_mounts_it(
    mode: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chmod(path, mode)
    group = os.stat(path).st_gid
    for own, others in ((group, []), (group + 1, [group])):
        monkeypatch.setattr(os, "getegid", lambda own=own: own)
        monkeypatch.setattr(os, "getgroups", lambda others=others: others)
        assert read_key(path) == KEY
    monkeypatch.setattr(os, "getgroups", list)
    with pytest.raises(ValueError, match="only its groups may also read it"):
        read_key(path)


def test_an_address_names_the_key_file_of_tcp(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = address("10.0.0.1", 5555, path)
    assert endpoint == f"tcp://10.0.0.1:5555?key_file={path}"
    plain, key = split(endpoint)
    assert plain == "tcp://10.0.0.1:5555"
    assert len(key) == 32
    assert key != KEY, "a tier that has the same file has another key"
    assert start_command(endpoint) == f"lmcache server --host 10.0.0.1 --port 5555 --key-file {path}"
    assert split(address("10.0.0.1", 5555)) == ("tcp://10.0.0.1:5555", b"")
    monkeypatch.chdir(os.path.dirname(path))
    assert address("10.0.0.1", 5555, "key") == endpoint, "another process reads it, too"
    assert address("", 5555, "none").startswith("ipc://"), "a Unix socket needs no key"
    with pytest.raises(EndpointError, match=r"cannot use the key file: .*none: No such file"):
        address("10.0.0.1", 5555, "none")
