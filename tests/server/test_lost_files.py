"""The files of a running server are removed, by hand or by a program that tidies up /tmp."""

import contextlib
import fcntl
import os
import time
from pathlib import Path

import pytest
from harness.processes import as_user, free_port, root
from harness.server import LMCacheServer
from harness.tiers import in_threads

from lmcache_server.commands import nearby
from lmcache_server.errors import StartError
from lmcache_server.net import claim as module
from lmcache_server.net.claim import Claim, claimed


def file(server: LMCacheServer, kind: str) -> Path:
    return Path(server.runtime_dir) / f"{server.port}.{kind}"


def test_a_second_server_takes_nothing_over_when_the_lock_file_is_gone(server: LMCacheServer) -> None:
    file(server, "lock").unlink()
    with pytest.raises(RuntimeError) as caught:
        server.beside().start()
    assert f"port {server.port} is in use: another lmcache server has" in str(caught.value)
    assert server.cli("ping").returncode == 0


def test_a_server_whose_socket_was_removed_is_named_by_whoever_looks_for_it(server: LMCacheServer) -> None:
    file(server, "sock").unlink()
    with pytest.raises(RuntimeError) as caught:
        server.beside().start()
    runs = f"another lmcache server runs, but {file(server, 'sock')} was removed; choose another --port, or"
    assert f"port {server.port} is in use: {runs} restart that server" in str(caught.value)
    done = server.cli("status")
    assert server.process is not None
    pid = server.process.pid
    said = f"its socket was removed, but process {pid} still is the server: restart that"
    assert (done.returncode, done.stderr) == (
        1,
        f"lmcache: no lmcache server answers at {server.address}: {said}\n",
    )
    server.kill()
    assert "start one with" in server.cli("status").stderr, "the lock file alone says nothing"


def test_a_server_that_stops_has_not_lost_its_socket(tmp_path: Path) -> None:
    """Nobody listens any more, while it saves its cache and writes to its tiers."""
    tmp_path.chmod(0o700)
    path = tmp_path / "5555.sock"
    with claimed(path, 5555) as claim:
        claim.listening.close()
        said = f"process {os.getpid()} is its server, which starts or stops: try again soon"
        assert nearby.instead(f"ipc://{path}") == said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_socket_out_of_reach_was_not_removed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with as_user(65534) as directory:
        run = directory / "run"
        with root():
            run.mkdir(mode=0o700)
            os.chown(run, 65534, -1)
        claim = Claim(run / "1.sock", run / "1.lock")

        def ticks(*said: str) -> None:
            caplog.clear()
            for _ in range(2):
                claim.tick(0.0)
            assert caplog.messages == list(said)

        ticks()
        with root():
            os.chown(run, 0, -1)
        cannot = "so no further engine can connect"
        ticks(f"{run} belongs to user root and has mode 700, {cannot}: let user nobody enter it again")
        with root():
            os.chown(run, 65534, -1)
        ticks(f"engines can connect at {run}/1.sock again")
        (run / "1.sock").unlink()
        ticks(f"{run}/1.sock was removed, {cannot}: restart this server")
        claim.listening.close()


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


def test_a_server_leaves_no_file_when_it_stops_or_cannot_start(
    server: LMCacheServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (Path(server.runtime_dir) / "an engine's").touch()
    other = server.beside()
    other.flags |= {"port": (port := free_port()), "http_port": server.http_port}
    other.port = port
    with pytest.raises(RuntimeError, match="cannot listen on"):
        other.start()  # at the same port for HTTP
    assert not file(other, "lock").exists()
    assert server.terminate() == 0
    assert [each.name for each in Path(server.runtime_dir).iterdir()] == ["an engine's"]
    monkeypatch.delenv("LMCACHE_RUNTIME_DIR", raising=False)
    with claimed(tmp_path / "run/1.sock", 1) as claim:
        claim.listening.close()
        assert (tmp_path / "run/1.lock").exists()
    assert not (tmp_path / "run").exists(), "the server made it"


def test_of_servers_that_start_while_others_stop_one_has_the_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LMCACHE_RUNTIME_DIR", raising=False)
    path, owners, most, won = tmp_path / "run/1.sock", [0], [0], []

    def start_and_stop(number: int) -> None:
        with claimed(path, 1) as claim:
            owners.append(number)
            most.append(len(owners))
            won.append(not claim.fault())
            owners.pop()
            claim.listening.close()

    def work(number: int) -> None:
        while len(won) < 500:
            with contextlib.suppress(StartError):
                start_and_stop(number)

    in_threads(4, work)
    assert max(most) == 2
    assert all(won)
    assert not path.parent.exists()


def test_a_lock_on_a_file_that_was_removed_meanwhile_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, real = tmp_path / "1.lock", module.fcntl.flock
    tmp_path.chmod(0o700)

    def locked_late(descriptor: int, kind: int) -> None:
        real(descriptor, kind)
        if kind & fcntl.LOCK_EX:
            monkeypatch.undo()
            lock.unlink()
            lock.touch()

    monkeypatch.setattr(module.fcntl, "flock", locked_late)
    with claimed(tmp_path / "1.sock", 1) as claim, lock.open() as other:
        claim.listening.close()
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_the_file_of_l1_is_not_saved_once_it_is_removed() -> None:
    path = Path(f"/dev/shm/lmcache-test-{os.getpid()}-lost.l1")
    try:
        with LMCacheServer(l1_size_gb=0.02, l1_path=path, key_file="/none") as server:
            path.unlink()
            server.wait_for_log(f"{path} was removed, so the cache will not be saved: restart this server")
            assert server.terminate() == 0
            log = server.log.read_text()
            assert "the cache is not saved, so the next start will be empty" in log
            assert "saved 0 chunks" not in log
            assert log.count("--key-file has no effect without --host") == 1
    finally:
        path.unlink(missing_ok=True)


def test_a_tier_whose_directory_was_renamed_is_not_cleared(tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    with LMCacheServer(l1_size_gb=0.02, tier=f"dir://{tier}?size_gb=0.01") as server:
        assert server.cli("clear", "--tiers").returncode == 0
        tier.rename(tmp_path / "renamed")
        done = server.cli("clear", "--tiers")
        assert (done.returncode, "it was removed, renamed or unmounted" in done.stderr) == (1, True), done
        tier.mkdir(mode=0o700)
        done = server.cli("clear", "--tiers")
        assert (done.returncode, f"the directory {tier} is another one" in done.stderr) == (1, True), done
