"""File descriptors that a process lends over a Unix socket, whatever rights the borrower has over it."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_client.contract.endpoint import lending_path
from lmcache_client.memory.lending import Lender
from lmcache_server.transfer.lent import borrowed

PID = os.getpid()
ASKS = f"import os; from {borrowed.__module__} import borrowed; os.setresuid(65534, 65534, 65534); "


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("LMCACHE_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "file").write_text("content")
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def content(copy: int | None) -> bytes:
    assert copy is not None
    assert not os.get_inheritable(copy)
    try:
        return os.pread(copy, 100, 0)
    finally:
        os.close(copy)


def test_it_lends_what_it_should_and_nothing_else_until_it_ends(file: int) -> None:
    lending_path(PID).write_text("of a process that was killed and had this number")
    lender = Lender({file})
    lender.listen()
    for _ in range(3):
        assert content(borrowed(PID, file)) == b"content"
    assert borrowed(PID, 0) is None, "not one of its own files"
    assert borrowed(PID + 1, file) is None, "another process"
    before = len(os.listdir("/proc/self/fd"))
    assert content(borrowed(PID, file)) == b"content"
    with socket.socket(socket.AF_UNIX) as early:
        early.connect(str(lending_path(PID)))
        lender.close()
        with contextlib.suppress(OSError):
            early.sendall(file.to_bytes(4, "little"))
            assert not socket.recv_fds(early, 1, 1)[1], "its number may be another file's now"
    assert borrowed(PID, file) is None
    assert not lending_path(PID).exists()
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_it_lends_nothing_where_others_may_enter(tmp_path: Path, file: int, mode: int) -> None:
    tmp_path.chmod(mode)
    lender = Lender({file})
    lender.listen()
    assert (borrowed(PID, file) is None) == (mode == 0o755)
    tmp_path.chmod(0o700)
    lender.listen()
    assert content(borrowed(PID, file)) == b"content", "since it may"
    lender.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_it_lends_nothing_to_another_user(tmp_path: Path, file: int) -> None:
    lender = Lender({file})
    lender.listen()
    # A directory that was opened to all afterwards.
    for each in (*tmp_path.parents, tmp_path, lending_path(PID)):
        if each.stat().st_uid == os.getuid() and each.is_relative_to("/tmp/pytest-of-root"):
            each.chmod(0o777)
    ask = f"{ASKS}print(borrowed({PID}, {file}))"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    assert done.stdout == "None\n"
    as_root = ask.replace("os.setresuid(65534, 65534, 65534); ", "")
    done = subprocess.run([sys.executable, "-c", as_root], capture_output=True, text=True, check=True)
    assert done.stdout != "None\n"
    lender.close()
