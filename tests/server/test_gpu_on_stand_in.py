"""The GPU half of client and server, run without a GPU: against a stand-in of CUDA's driver.

It shows that calls, handles, order, deaths and refusals are right as far as the driver's contract goes, and
nothing about a GPU: see tests/support/standin/cuda.cpp.
"""

import os
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import pytest
import standin
from harness import forks
from harness.paths import ROOT, SUPPORT
from harness.server import LMCacheServer, refusal
from harness.waiting import wait_until
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lmcache_server.host import machine, preflight

pytestmark = pytest.mark.skipif(
    standin.COMPILER is None or standin.header() is None, reason="no C++ compiler, or no cuda.h"
)
SUITE = "-m pytest -q -c tests/gpu/pytest.ini --rootdir=. --confcutdir=tests/gpu"
SLOW = {"ORDER_ROUNDS": "60", "BUSY_BYTES": str(4 << 20), "BUSY_COUNT": "8"}
SMALL = {"KILLS": "1", "READ_ROUNDS": "3", "ORDER_ROUNDS": "30", "LARGEST_PAGE": str(1 << 20)}


def run(environment: dict[str, str], *arguments: str) -> str:
    # Its servers are processes of its own, as they are on a GPU's machine.
    own = {name: value for name, value in environment.items() if name != forks.SHARED}
    done = subprocess.run(
        [sys.executable, *SUITE.split(), *(arguments or ("tests/gpu",))],
        cwd=ROOT,
        env={**SLOW, **own},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.timeout(1800)  # of a whole suite
@pytest.mark.parametrize("size", [SMALL, pytest.param({}, marks=pytest.mark.long)], ids=["small", "whole"])
def test_the_gpu_suite_passes(tmp_path, size):
    assert "passed" in run(standin.environment(tmp_path, devices=2) | size)
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith(("counters-", "memory-"))]


def listed() -> list[str]:
    """What docs/gpu.md says that the suite needs beside torch and cupy."""
    (packages,) = re.findall(r"^pip install ([\w -]+)$", (ROOT / "docs/gpu.md").read_text(), re.M)
    return packages.split()


def test_the_packages_that_the_gpu_suite_is_said_to_need_are_those_of_the_server_and_pytest():
    declared = [re.match(r"[\w-]+", each)[0] for each in metadata.requires("lmcache-mp") if ";" not in each]
    assert listed() == sorted([*declared, "pytest"])


def linked(directory: Path, *distributions: str) -> Path:
    """A folder with these distributions, which are installed here, and what they need."""
    directory.mkdir()
    left, done = [*distributions], set()
    while left:
        name = left.pop()
        if canonicalize_name(name) in done:
            continue
        done.add(canonicalize_name(name))
        found = metadata.distribution(name)
        for top in {Path(file).parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            (directory / top).symlink_to(found.locate_file(top))
        needed = map(Requirement, found.requires or ())
        left += [each.name for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
    return directory


@pytest.mark.long
def test_the_whole_suite_passes_with_the_listed_packages_and_without_vllm(tmp_path):
    """They are carried along, as to a machine without a network, and found by the user's PYTHONPATH."""
    venv.create(tmp_path / "empty", with_pip=False, symlinks=True)
    environment = standin.environment(tmp_path / "devices", devices=2) | SLOW | SMALL
    (tmp_path / "devices").mkdir()
    carried = linked(tmp_path / "carried", "torch", *listed())
    assert not (carried / "vllm").exists()
    environment["PYTHONPATH"] = f"{standin.CUPY}:{carried}"
    environment.pop(forks.SHARED, None)
    command = ["make", "test-gpu", f"GPU_PYTHON={tmp_path}/empty/bin/python", "SANITIZER="]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert re.search(r"test_connector.py \.+ ", done.stdout)
    assert re.search(r"test_logits.py \.+ ", done.stdout)
    skipped = re.findall(r"^(?:SKIPPED|XFAIL).*: (.*)", done.stdout, re.M)
    assert set(skipped) <= {"torch has no GPU here"}


@pytest.mark.long
def test_without_batches_and_kernel_the_same_bytes_come_back(tmp_path):
    """An older driver, and no cupy."""
    environment = standin.environment(tmp_path, version=12070)
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, ROOT / "kernels", SUPPORT)))
    run(environment, "tests/gpu/test_round_trips.py", "-k", "1024 or 8192 or pins")


@pytest.mark.long
def test_what_is_not_pinned_yet_is_pinned_when_a_copy_needs_it(tmp_path):
    """The background is far behind."""
    run(standin.environment(tmp_path, pin_us=1_500_000), "tests/gpu/test_round_trips.py", "-k", "pins")


@pytest.mark.long
def test_devices_are_found_by_uuid_whatever_their_numbers_are(tmp_path):
    environment = {**standin.environment(tmp_path, devices=3), "CUDA_VISIBLE_DEVICES": "2,0,1"}
    environment["SERVER_VISIBLE_DEVICES"] = "1,2"
    run(environment, "tests/gpu/test_round_trips.py", "-k", "8192 and not many")


@contextmanager
def started(
    directory: Path, monkeypatch: pytest.MonkeyPatch, flags: dict, **settings: object
) -> Iterator[LMCacheServer]:
    for name, value in standin.environment(directory, **settings).items():
        monkeypatch.setenv(name, value)
    with LMCacheServer(**flags) as server:
        yield server


def test_without_a_gpu_nothing_is_pinned_and_nothing_can_be_tested(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with started(tmp_path, monkeypatch, {"l1_size_gb": 0.05}) as server:
        server.wait_until_populated()
        assert server.status()["l1"]["pinned_bytes"] == 0
        code, report = server.selftest("/selftest/gpu")
        assert (code, report["error"]) == (503, "this process sees no GPU")


def test_the_self_test_of_gpus_takes_each_gpu_and_says_which_fails(tmp_path, monkeypatch):
    with started(tmp_path, monkeypatch, {"l1_size_gb": 0.05}, devices=2) as server:
        server.wait_until_populated()
        code, report = server.selftest("/selftest/gpu")
        assert (code, report["ok"]) == (200, True), report
        assert list(report["gpus"]) == ["00FF:00:00.0", "00FF:01:00.0"]
        server.wait_at_rest()
        assert standin.counters(tmp_path, server.pid).mappings == 0
        assert standin.counters(tmp_path, server.pid).batches > 0, "its copies were a GPU's"
        assert server.status()["l1"]["chunks"] == 0
        server.kill()
        (tmp_path / "no-context-1").touch()
        server.start()
        server.wait_until_populated()
        code, report = server.selftest("/selftest/gpu")
        assert (code, report["ok"], report["failed"]) == (503, False, "register")
        assert report["error"].startswith("GPU 00FF:01:00.0: the client cannot use the GPU: ")
        assert report["gpus"]["00FF:00:00.0"]["ok"]


def test_the_server_is_ready_before_l1_is_pinned_and_pins_it_unit_by_unit(tmp_path, monkeypatch):
    with started(tmp_path, monkeypatch, {"l1_size_gb": 0.7}) as server:
        server.wait_until(lambda l1: l1["pinned_bytes"] == l1["total_bytes"])
        counted = standin.counters(tmp_path, server.pid)
        assert counted.registered_bytes == server.status()["l1"]["total_bytes"]
        assert counted.contexts == 1


def test_what_cannot_be_pinned_is_an_error_with_the_limits_and_never_copied_slowly(tmp_path, monkeypatch):
    with started(tmp_path, monkeypatch, {"l1_size_gb": 0.7}, pin_limit=300 << 20) as server:
        said = lambda: "GB of L1 could be pinned" in server.log.read_text()  # noqa: E731
        wait_until(said, what="the log says how much of L1 is pinned")
        log = server.log.read_text()
        assert "only 0.25 of 0.70 GB of L1 could be pinned" in log
        assert "ulimit -l unlimited, LimitMEMLOCK=infinity, docker --ulimit memlock=-1" in log
        assert log.count("could be") == 1
        assert server.status()["l1"]["pinned_bytes"] == 256 << 20


def test_the_kernel_is_compiled_before_anybody_registers(tmp_path, monkeypatch):
    marker = tmp_path / "compiled"
    with started(tmp_path, monkeypatch, {"l1_size_gb": 0.1, "gpu_kernel": True}, compiled=marker) as server:
        wait_until(marker.exists, what="the kernel is compiled")
        assert server.status()["sessions"] == []


def test_the_benchmark_runs(tmp_path):
    """Its figures mean nothing here."""
    environment = standin.environment(tmp_path)
    environment["PYTHONPATH"] += os.pathsep + str(ROOT / "tests/gpu")
    command = [sys.executable, "benchmarks/gpu.py", "--quick"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    for title in ("Through the server", "By path, GB/s", "Start, seconds", "Slowdown"):
        assert f"### {title}" in done.stdout


def test_a_driver_that_hangs_while_it_pins_keeps_no_server_from_ending(tmp_path, monkeypatch):
    """And L1 is saved."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        flags = {"l1_size_gb": 0.1, "l1_path": f"{memory}/l1"}
        with started(tmp_path, monkeypatch, flags, pin_us=600_000_000) as server:
            server.wait_until_populated()
            assert server.terminate() == 0
            assert "saved 0 chunks" in server.log.read_text()


def test_stores_get_the_frames_that_are_pinned_once_others_could_not_be(tmp_path):
    """A third of L1 can be pinned. One store may find the rest, no later one."""
    code = """
import os
from gpu_engine import GpuEngine, fused
from harness.server import LMCacheServer
from harness.rawclient import chain
from test_round_trips import stored_prompt, restored, tables, CHUNK_SIZE
with LMCacheServer(chunk_size=CHUNK_SIZE, l1_size_gb=0.7) as server:
    engine = GpuEngine(server.address, fused(1 << 20, 64), 64).start()
    outcomes = []
    for number in range(20):
        keys = chain(range(9000 + 100 * number, 9000 + 100 * number + 6 * CHUNK_SIZE), CHUNK_SIZE)
        outcomes.append(engine.store_prompt(keys, [list(range(1, 13))]).stored)
    assert sorted(outcomes)[1:] == [6] * 19, outcomes
    assert server.status()["l1"]["free_bytes"] <= 256 << 20
    keys, pages = stored_prompt(engine, 3, list(range(1, 32)), 3)
    assert restored(engine, keys, pages, tables(engine, 3, list(range(7, 32)))) == 6
    print("fine", flush=True)
    os._exit(0)
"""
    run_code(code, standin.environment(tmp_path, pin_limit=300 << 20))


def test_a_file_on_a_disk_is_refused_where_there_are_gpus(tmp_path, monkeypatch):
    if machine.file_system_type(str(tmp_path)) in machine.MEMORY_FILE_SYSTEMS:
        pytest.skip("the temporary directory is in memory")
    if preflight.disk_file("x", True, os.uname().release).verdict == preflight.OK:
        pytest.skip("this kernel lets a GPU copy from and to files on disks")
    for name, value in standin.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    assert "put it in /dev/shm" in refusal(l1_size_gb=0.1, l1_path=tmp_path / "l1")


def run_code(code: str, environment: dict[str, str]) -> None:
    environment["PYTHONPATH"] += os.pathsep + str(ROOT / "tests/gpu")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "fine\n", done.stderr[-4000:]


def test_a_gpu_that_fails_ends_the_server_and_no_page_is_lost(tmp_path):
    """Only the end of its process frees the memory that it has mapped there. The next one goes on."""
    environment = standin.environment(tmp_path)
    code = """
import sys, pathlib, os
from gpu_engine import GpuEngine, fused
from harness.server import LMCacheServer
from harness.rawclient import RawEngine, chain, group
from harness.waiting import wait_until
from test_round_trips import stored_prompt, CHUNK_SIZE
with LMCacheServer(chunk_size=CHUNK_SIZE, l1_size_gb=0.05) as server:
    server.kill()
    path = pathlib.Path(f"/dev/shm{server.runtime_dir.removeprefix('/tmp')}")
    server.flags["l1_path"] = str(path)
    server.start()
    engine = GpuEngine(server.address, fused(65536, 32), 32).start()
    stored_prompt(engine, 2, list(range(1, 32)), 1)
    other = RawEngine(server.address, [group()], engine_id="on-a-cpu").start()
    memories = [server.metrics()[f'lmcache_worker_memories{{kind="{kind}"}}'] for kind in ("cuda", "host")]
    assert memories == [1, 1], memories
    own = chain(range(32), CHUNK_SIZE)
    page = other.fill(0, 1, 1)
    assert other.store_prompt(own, [[1, 2]]).stored == 1
    before = [each.scheduler.generation for each in (other, engine)]
    failing = pathlib.Path(os.environ["CUDA_STANDIN_DIR"], f"fail-{server.pid}")
    failing.touch()
    keys = chain(range(900, 932), CHUNK_SIZE)
    stored = engine.store_prompt(keys, [[1, 2]])
    assert (stored.stored, stored.dropped) == (0, 1), stored
    assert server.process.popen.wait(120) == 1
    failing.unlink()
    log = server.log.read_text()
    assert "has failed for this server" in log and "this server ends, and has to be started again" in log
    server.process = None
    server.start()
    def served_again():
        now = [each.scheduler.generation for each in (other, engine) if each.scheduler.ready]
        return len(now) == 2 and all(a > b for a, b in zip(now, before))
    wait_until(served_again, what="both are served again")
    found = other.lookup(own)
    assert found.resume_tokens == CHUNK_SIZE
    other.load(found, own, [[5, 6]])
    assert (other.pages(0, 5) == page).all()
    wait_until(lambda: len(server.status()["sessions"]) == 4, what="both workers, too")
    stored_prompt(engine, 2, list(range(1, 32)), 3)
    server.kill()
    path.unlink()
    print("fine", flush=True)
    os._exit(0)
"""
    run_code(code, environment)
