"""The real `lmcache doctor`: with a server and without, with the stand-in of CUDA's driver and without."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import standin
from harness.peer import Peer
from harness.rawclient import RawEngine, group
from harness.server import LMCacheServer

from lmcache_client.contract.keys import ModelTag
from lmcache_client.contract.version import VERSION

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


def doctor(environment: dict[str, str], *arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    """(exit code, checks by name)."""
    command = [sys.executable, "-m", "lmcache_server", "doctor", "--json", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert not done.stderr
    return done.returncode, {check["name"]: check for check in json.loads(done.stdout)}


def test_with_a_running_server() -> None:
    with LMCacheServer(l1_size_gb=0.05) as server:
        engine = RawEngine(f"ipc://{server.runtime_dir}/{server.port}.sock", [group()]).start()
        code, found = doctor(server.environment, "--port", str(server.port))
        # What the machine that runs this has of GPUs is no property of the code.
        failed = {name for name, check in found.items() if check["verdict"] == "fail"}
        assert failed <= {"driver"}
        assert code == bool(failed)
        assert found["server"]["finding"] == (
            f"{VERSION} at ipc://{server.runtime_dir}/{server.port}.sock, as here"
        )
        assert found["connectors"]["finding"] == "1 connected, all of the server's version"
        assert " of L1 (" in found["memory"]["finding"]
        assert found["open files"]["verdict"] == "ok"
        assert found["ptrace"]["verdict"] == "ok"
        assert found["vLLM"]["verdict"] == found["plugin"]["verdict"] == "ok"
        engine.close()

        with Peer(f"ipc://{server.runtime_dir}/{server.port}.sock", "one\nok    server: forged") as other:
            other.model = ModelTag("model", (("vllm", "0.31.0"),), 1, 1)
            other.ask(other.hello())
            other.ask(other.register())
            lines = server.cli("doctor").stdout.splitlines()
        warning = next(line for line in lines if " connectors: " in line)
        assert warning.startswith(
            f"warn  connectors: the server has {VERSION}, engine one\\nok    server: forged"
        )
        assert f" has peer, in vLLM 0.31.0 -> pip install lmcache-mp=={VERSION}" in warning
        assert len(lines) == len(found)

        done = server.cli("doctor", "--l1-size-gb", "90000")
        lines = done.stdout.splitlines()
        assert (done.returncode, len(lines)) == (1, len(found))
        assert all(line[:6] in ("ok    ", "warn  ", "fail  ") for line in lines)
        memory = next(line for line in lines if " memory: " in line)
        assert memory.startswith("fail  memory: ")
        assert " -> lmcache server --l1-size-gb " in memory


def test_without_a_server_and_with_a_file_for_which_there_is_no_room(tmp_path: Path) -> None:
    environment = {**os.environ, "LMCACHE_RUNTIME_DIR": str(tmp_path), "LMCACHE_L1_SIZE_GB": "90000"}
    tmp_path.chmod(0o700)
    code, found = doctor(environment, "--l1-path", "/dev/shm/lmcache-test-no-such-file")
    assert code == 1
    assert (found["server"]["verdict"], found["server"]["fix"]) == ("warn", "lmcache server")
    assert found["shared memory"]["verdict"] == found["memory"]["verdict"] == "fail"
    assert "remount,size=90001G /dev/shm" in found["shared memory"]["fix"]
    code, found = doctor(environment, "--l1-path", str(tmp_path / "missing/l1"), "--l1-size-gb", "0.01")
    assert (code, found["shared memory"]["fix"]) == (1, f'mkdir -p "$(dirname {tmp_path}/missing/l1)"')


@pytest.mark.skipif(standin.COMPILER is None or standin.header() is None, reason="no C++ compiler or cuda.h")
def test_with_gpus(tmp_path: Path) -> None:
    environment = {**standin.environment(tmp_path, devices=2), "LMCACHE_RUNTIME_DIR": str(tmp_path)}
    _, found = doctor(environment, "--l1-size-gb", "0.01")
    assert found["driver"]["finding"].startswith("CUDA 1")
    assert ", 2 GPU(s): " in found["driver"]["finding"]
    assert "of L1" in found["memlock"]["finding"] or found["memlock"]["verdict"] == "warn"
    assert found["copy kernel"]["verdict"] in ("ok", "warn")


@pytest.mark.skipif(os.geteuid() != 0, reason="gives up a capability")
def test_memory_that_may_not_be_read_is_found_by_trying() -> None:
    done = subprocess.run([sys.executable, "-c", _FORBIDDEN], capture_output=True, text=True, check=True)
    assert "the kernel does not let the server copy memory of process" in done.stdout
