"""The files of a running server are removed, by hand or by a program that tidies up /tmp."""

import fcntl
import os
import time
from pathlib import Path

import pytest
from harness.server import LMCacheServer

from lmcache_server.net.claim import Claim


def file(server: LMCacheServer, kind: str) -> Path:
    return Path(server.runtime_dir) / f"{server.port}.{kind}"


def test_a_second_server_takes_nothing_over_when_the_lock_file_is_gone(server: LMCacheServer) -> None:
    file(server, "lock").unlink()
    with pytest.raises(RuntimeError) as caught:
        server.beside().start()
    assert f"port {server.port} is in use: another lmcache server of this user has" in str(caught.value)
    assert server.cli("ping").returncode == 0


def test_the_first_server_leaves_the_socket_of_the_second_alone(server: LMCacheServer) -> None:
    file(server, "lock").unlink()
    file(server, "sock").unlink()
    with server.beside() as other:
        said = f"{file(server, 'sock')} was removed, so no further engine can connect: restart this server"
        server.wait_for_log(said)
        assert server.terminate() == 0
        assert f"pid {other.pid}," in server.cli("status").stdout
        assert other.terminate() == 0
        assert not file(server, "sock").exists()


def test_the_socket_of_a_crashed_server_is_replaced(server: LMCacheServer) -> None:
    server.kill()
    assert file(server, "sock").exists()
    server.start()
    assert server.cli("ping").returncode == 0
    server.kill()
    file(server, "sock").unlink()
    file(server, "sock").write_text("not a socket")
    server.start()
    assert server.cli("ping").returncode == 0


def test_the_directory_is_locked_for_programs_that_tidy_up(server: LMCacheServer) -> None:
    directory = os.open(server.runtime_dir, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with LMCacheServer(l1_size_gb=0.02) as other:
        other.kill()
        other.environment = server.environment
        other.start()
        assert other.process is not None, "servers of other ports share the directory"
    os.close(directory)


def test_the_files_never_look_old(tmp_path: Path) -> None:
    lock, path = tmp_path / "1.lock", tmp_path / "1.sock"
    lock.touch()
    claim = Claim(path, lock)
    long_ago = time.time() - 1e6
    for now_s in (1e6, 2e6):
        os.utime(lock, (long_ago, long_ago))
        os.utime(path, (long_ago, long_ago))
        claim.tick(now_s)
        assert min(lock.stat().st_mtime, path.stat().st_mtime) > time.time() - 1000
    claim.listening.close()
