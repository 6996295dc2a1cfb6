"""The real `lmcache doctor`: with a server and without, with the stand-in of CUDA's driver and without."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import standin
from harness import stores
from harness.peer import Peer
from harness.processes import run_forked
from harness.rawclient import RawEngine, group
from harness.server import LMCacheServer

from lmcache_client.contract.keys import ModelTag
from lmcache_client.contract.version import VERSION
from lmcache_server.options.tiers import doctor as tiers_doctor
from lmcache_server.options.tiers import urls

SYS_PTRACE = 19
# Without the capability, reads the memory of a process that lets nobody at it.
_FORBIDDEN = f"""
import ctypes, os, sys
libc = ctypes.CDLL(None)
if sys.argv[1:] != ["without"]:
    assert not libc.prctl(24, {SYS_PTRACE})
    os.execv(sys.executable, [sys.executable, "-c", sys.orig_argv[2], "without"])
assert not libc.prctl(4, 0)
from lmcache_server.commands.doctor.examine import _try_reading
print(_try_reading())
"""
on_stand_in = pytest.mark.skipif(
    standin.COMPILER is None or standin.header() is None, reason="no C++ compiler or cuda.h"
)


def doctor(environment: dict[str, str], *arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    done = run_forked("lmcache", ["doctor", "--json", *arguments], environment, 60.0)
    assert not done.stderr
    return done.returncode, {check["name"]: check for check in json.loads(done.stdout)}


def test_with_a_running_server() -> None:
    with LMCacheServer(l1_size_gb=0.05) as server:
        server.wait_until_populated()
        engine = RawEngine(server.address, [group()]).start()
        code, found = doctor(server.environment, "--port", str(server.port))
        # What the machine that runs this has of GPUs is no property of the code.
        failed = {name for name, check in found.items() if check["verdict"] == "fail"}
        assert failed <= {"driver"}
        assert code == bool(failed)
        assert found["server"]["finding"] == (f"{VERSION} at {server.address}, the same version as here")
        assert found["connectors"]["finding"].startswith(f"{engine.engine_id}, all of the server's version; ")
        assert "beside L1, which has its memory (" in found["memory"]["finding"]
        assert found["open files"]["verdict"] == "ok"
        assert found["ptrace"]["verdict"] == "ok"
        assert found["vLLM"]["verdict"] == found["plugin"]["verdict"] == "ok"
        engine.close()

        with Peer(server.address, "one\nok    server: forged") as other:
            other.model = ModelTag("model", (("vllm", "0.31.0"),), 1, 1)
            other.ask(other.hello())
            other.ask(other.register())
            lines = server.cli("doctor").stdout.splitlines()
        warning = next(line for line in lines if " connectors: " in line)
        assert warning.startswith(
            f"warn  connectors: the server has {VERSION}, engine one\\nok    server: forged"
        )
        assert " has peer, in vLLM 0.31.0 -> pip install PATH_OF_ITS_CLONE_OR_WHEEL  (of " in warning
        assert len(lines) == len(found)

        done = server.cli("doctor", "--l1-size-gb", "90000")
        lines = done.stdout.splitlines()
        assert (done.returncode, len(lines)) == (1, len(found))
        assert all(line[:6] in ("ok    ", "warn  ", "fail  ") for line in lines)
        memory = next(line for line in lines if " memory: " in line)
        assert memory.startswith("fail  memory: ")
        assert " -> pass --l1-size-gb " in memory


def test_without_a_server_and_with_a_file_for_which_there_is_no_room(tmp_path: Path) -> None:
    environment = {**os.environ, "LMCACHE_RUNTIME_DIR": str(tmp_path), "LMCACHE_L1_SIZE_GB": "90000"}
    tmp_path.chmod(0o700)
    code, found = doctor(environment, "--l1-path", "/dev/shm/lmcache-test-no-such-file")
    assert code == 1
    assert found["server"]["verdict"] == "warn"
    assert found["server"]["fix"].startswith(
        "start one with 'lmcache server --port 5555', or pass the --host"
    )
    assert found["memory"]["verdict"] == "fail"
    assert "shared memory" not in found, "/dev/shm cannot be larger than the memory"
    code, found = doctor(environment, "--l1-path", str(tmp_path / "missing/l1"), "--l1-size-gb", "0.01")
    assert (code, found["shared memory"]["fix"]) == (1, f"mkdir -p {tmp_path}/missing")


def test_a_file_that_a_server_would_refuse(tmp_path: Path) -> None:
    path = tmp_path / "l1"
    path.write_text("a letter")
    path.chmod(0o600)
    with LMCacheServer(l1_size_gb=0.05, l1_path=tmp_path / "own") as server:
        answers, port = {}, str(server.port)
        for name in ("l1", "own", "new"):
            _, answers[name] = doctor(server.environment, "--port", port, "--l1-path", str(tmp_path / name))
        with LMCacheServer(l1_size_gb=0.05) as other:
            _, answers["taken"] = doctor(other.environment, "--l1-path", str(tmp_path / "own"))
    assert answers["l1"]["L1 file"]["finding"] == (
        f"--l1-path {path} is not an lmcache file and is left unchanged"
    )
    assert answers["l1"]["L1 file"]["fix"] == "name another file"
    assert answers["taken"]["L1 file"]["finding"].endswith("own is in use by another lmcache server")
    assert {answers[name]["L1 file"]["verdict"] for name in ("own", "new")} == {"ok"}
    assert path.read_text() == "a letter"
    assert not (tmp_path / "new").exists()


STEPS = (
    "context",
    "memory of an engine",
    "open it",
    "pin memory",
    "copy",
    "copy in batches",
    "copy by kernel",
    "memory of sleep mode",
)


def tried(environment: dict[str, str]) -> dict[str, dict[str, str]]:
    _, found = doctor({**environment, "LMCACHE_L1_SIZE_GB": "0.01"}, "--gpu")
    return {name: check for name, check in found.items() if name.partition(", ")[2] in STEPS}


@on_stand_in
def test_each_gpu_is_tried_step_by_step_and_a_failing_step_says_what_helps(tmp_path: Path) -> None:
    variables = {"LMCACHE_RUNTIME_DIR": str(tmp_path)}
    environment = {**standin.environment(tmp_path, devices=2), **variables}
    found = tried(environment)
    assert list(found) == [f"GPU 00FF:0{n}:00.0, {step}" for n in range(2) for step in STEPS]
    assert all(check["verdict"] == "ok" for check in found.values()), found
    assert "GB/s from the GPU" in found["GPU 00FF:01:00.0, copy by kernel"]["finding"]
    (tmp_path / "no-context-1").touch()
    found = tried(environment)
    assert len(found) == len(STEPS) + 1
    failed = found["GPU 00FF:01:00.0, context"]
    assert (failed["verdict"], failed["fix"].split("  ")[0]) == ("fail", "nvidia-smi -c 0")
    assert "CUDA error 46" in failed["finding"]
    assert not list(tmp_path.glob("*.memory"))
    (tmp_path / "no-cuMemCreate").touch()
    *good, refused = tried({**standin.environment(tmp_path), **variables}).values()
    assert [check["verdict"] for check in good] == ["ok"] * 7
    assert (refused["verdict"], refused["fix"][:10]) == ("warn", "start vLLM")
    found = tried({**standin.environment(tmp_path, pin_limit=1 << 20), **variables})
    *good, failed = found.values()
    assert [check["verdict"] for check in good] == ["ok"] * 3
    assert (failed["name"], failed["fix"][:19]) == ("GPU 00FF:00:00.0, pin memory", "ulimit -l unlimited")


@on_stand_in
def test_what_a_gpu_is_set_to_is_looked_at_without_a_context_on_it(tmp_path: Path) -> None:
    variables = {"LMCACHE_RUNTIME_DIR": str(tmp_path), "LMCACHE_L1_SIZE_GB": "0.01"}
    what = ("compute mode", "MIG", "device memory")
    names = [f"GPU 00FF:0{number}:00.0, {each}" for number in range(2) for each in what]
    _, found = doctor({**standin.environment(tmp_path, devices=2), **variables})
    assert [found[name]["verdict"] for name in names] == ["ok"] * 6
    assert found[names[2]]["finding"] == "8192 of 8192 MiB are free"
    assert found["driver"]["finding"].startswith("CUDA 1")
    assert ", 2 GPU(s): " in found["driver"]["finding"]
    assert "of L1" in found["memlock"]["finding"] or found["memlock"]["verdict"] == "warn"
    changed = {"devices": 2, "compute_mode": 3, "mig": 1, "free_mb": 100}
    _, found = doctor({**standin.environment(tmp_path, **changed), **variables})
    assert [found[name]["verdict"] for name in names] == ["warn"] * 6
    fixes = ("nvidia-smi -c 0", "CUDA_VISIBLE_DEVICES=MIG-", "lower --gpu-memory-utilization")
    assert all(found[name]["fix"].startswith(fix) for name, fix in zip(names, fixes * 2, strict=True))
    pids = [int(path.name.removeprefix("counters-")) for path in tmp_path.glob("counters-*")]
    assert not any(standin.counters(tmp_path, pid).contexts for pid in pids)


@on_stand_in
def test_each_gpu_is_tried_through_the_running_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in standin.environment(tmp_path, devices=2).items():
        monkeypatch.setenv(name, value)
    with LMCacheServer(l1_size_gb=0.05) as server:
        engine = RawEngine(server.address, [group()]).start()
        server.wait_until_populated()
        names = [f"GPU 00FF:0{n}:00.0, through the server" for n in range(2)]
        _, found = doctor(server.environment, "--port", str(server.port), "--gpu")
        assert [found[name]["finding"] for name in names] == ["pages were stored, restored and compared"] * 2
        assert found["process namespaces"]["finding"] == "the server and its 1 worker(s) share one"
        engine.close()
        server.environment["CUDA_VISIBLE_DEVICES"] = "0"
        server.kill()
        server.start()
        server.wait_until_populated()
        everything = {**server.environment, "CUDA_VISIBLE_DEVICES": "0,1"}
        code, found = doctor(everything, "--port", str(server.port), "--gpu")
        assert (code, found[names[0]]["verdict"], found[names[1]]["verdict"]) == (1, "ok", "fail")
        assert found[names[1]]["finding"].startswith("register: the server does not see the engine's GPU")


@pytest.mark.skipif(os.geteuid() != 0, reason="gives up a capability")
def test_memory_that_may_not_be_read_is_found_by_trying() -> None:
    done = subprocess.run([sys.executable, "-c", _FORBIDDEN], capture_output=True, text=True, check=True)
    assert "the kernel does not let the server copy memory of process" in done.stdout


def tiers(tmp_path: Path, *urls: str, **variables: str) -> tuple[int, dict[str, dict[str, str]]]:
    variables |= {"LMCACHE_RUNTIME_DIR": str(tmp_path), "LMCACHE_L1_SIZE_GB": "0.01"}
    tmp_path.chmod(0o700)
    arguments = [word for url in urls for word in ("--tier", url)]
    code, found = doctor({**os.environ, **variables}, *arguments)
    return code, {name: check for name, check in found.items() if name.startswith("tier")}


def test_a_tier_is_tried_with_a_record_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    _, found = tiers(tmp_path, f"dir://{folder}?size_gb=0.01")
    assert [check["verdict"] for check in found.values()] == ["ok", "ok"]
    assert "written, read, compared and removed" in found["tier 1"]["finding"]
    assert not list(tmp_path.iterdir()), "it is as before"
    folder.mkdir(mode=0o700)
    _, found = tiers(tmp_path, f"dir://{folder}?size_gb=90000000")
    assert found["tier 1, room"]["verdict"] == "warn"
    space = os.statvfs(folder)
    room_gb = (space.f_bavail - 0.02 * space.f_blocks) * space.f_frsize / (1 << 30)
    advised = float(found["tier 1, room"]["fix"].partition("size_gb=")[2].partition(" ")[0])
    assert advised == pytest.approx(room_gb, rel=0.1, abs=1)
    folder.chmod(0o777)
    code, found = tiers(tmp_path, f"dir://{folder}?size_gb=90000000")
    assert (code, found["tier 1"]["verdict"]) == (1, "fail")
    assert found["tier 1"]["fix"].startswith("name a new subdirectory of it")
    assert "tier 1, room" not in found
    _, found = tiers(tmp_path, "s3://user:secret@bucket")
    assert found["tier 1"]["verdict"] == "fail"
    assert "secret" not in str(found)


def test_a_full_disk_is_no_reason_for_a_size_that_the_server_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    for free_gb, fix in ((0, "name another directory"), (0.025, "name"), (0.5, "size_gb=0.48 or less")):
        space = SimpleNamespace(f_bavail=int(free_gb * (1 << 18)), f_frsize=1 << 12, f_blocks=1 << 18)
        monkeypatch.setattr(os, "statvfs", lambda _: space)  # noqa: B023
        found = tiers_doctor._room("room", urls.parse("dir:///none?size_gb=1"))
        assert (found.verdict, found.fix.partition(fix)[2]) == ("warn", found.fix[len(fix) :])
        assert found.fix.endswith(", or free space there")


def test_the_directory_of_a_running_server_is_left_to_it(tmp_path: Path) -> None:
    url, folder = f"dir://{tmp_path}/tier?size_gb=0.01", tmp_path / "tier"
    with LMCacheServer(l1_size_gb=0.05, tier=url) as server, LMCacheServer(l1_size_gb=0.05) as other:
        own = ("--port", str(server.port))
        for asked in (
            (),
            ("--tier", f"{url}&write=commit"),
            ("--tier", f"dir://{folder}/?shared=1&size_gb=9"),
        ):
            _, found = doctor(server.environment, *own, *asked)
            assert found["tier 1"]["verdict"] == "ok"
            assert "the running server uses it" in found["tier 1"]["finding"]
        code, found = doctor(other.environment, "--tier", url)
        assert code == 1
        assert "another server uses the directory" in found["tier 1"]["finding"]
        if os.geteuid() == 0:
            os.chown(folder, 65534, 65534)
            _, foreign = doctor(server.environment, *own)
            assert foreign["tier 1"]["verdict"] == "fail"
            assert "belongs to user nobody" in foreign["tier 1"]["finding"]
            assert "restore the owner" in foreign["tier 1"]["fix"]
            os.chown(folder, 0, 0)
        folder.chmod(0o500)
        _, closed = doctor(server.environment, *own)
        shutil.rmtree(folder)
        code, gone = doctor(server.environment, *own)
    assert (code, gone["tier 1"]["verdict"], closed["tier 1"]["verdict"]) == (1, "fail", "fail")
    assert closed["tier 1"]["finding"] == f"its owner may not use {folder}"
    assert gone["tier 1"]["finding"] == f"cannot use the directory {folder}"
    assert "restore it" in gone["tier 1"]["fix"]
    assert "tier 1, room" not in gone


def test_settings_under_which_valkey_evicts_nothing_are_a_warning(tmp_path: Path) -> None:
    with stores.valkey(tmp_path, requirepass="right", **{"maxmemory-policy": "noeviction"}) as store:
        url = f"valkey://127.0.0.1:{store.port}"
        for password, verdict, fix in (
            ("wrong-secret", "fail", "set LMCACHE_VALKEY_PASSWORD"),
            ("right", "warn", "set maxmemory-policy there to allkeys-lru"),
        ):
            _, found = tiers(tmp_path, url, LMCACHE_VALKEY_PASSWORD=password)
            assert found["tier 1"]["verdict"] == verdict
            assert found["tier 1"]["fix"].startswith(fix)
            assert "wrong-secret" not in str(found)
    with stores.valkey(tmp_path) as store:
        _, found = tiers(tmp_path, f"valkey://127.0.0.1:{store.port}")
        assert found["tier 1"]["verdict"] == "ok"
        assert stores.ask(store.port, "DBSIZE").strip() == ":0"
