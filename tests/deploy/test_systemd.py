"""The systemd unit: valid, tight, and a server that is confined as it says serves engines."""

import configparser
import json
import os
import re
import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path

import pytest
import standin
from harness import tools
from harness.options import load
from harness.paths import ROOT
from harness.server import LMCacheServer

from deploy.programs import run
from lmcache_server import config

UNIT = ROOT / "deploy" / "systemd" / "lmcache.service"
CONFINED = Path(__file__).parent / "confined.py"
MAX_EXPOSURE = 20
"""In tenths, as systemd-analyze counts it. memcached's unit in Debian 12 has 48, one without a sandbox 96."""


def service() -> dict[str, str]:
    """The unit's [Service] section; of a key that is there twice, the last."""
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str
    parser.read(UNIT)
    return dict(parser["Service"])


def analyze() -> Path:
    """systemd-analyze, of a version that can judge a file."""
    found = tools.find("systemd-analyze")
    version = int(run(found, "--version").split()[1])
    if version < 250:
        tools.missing(f"needs systemd 250 or newer, not {version}")
    return found


def test_the_unit_is_valid_and_tight(tmp_path):
    # systemd asks whether the program is there, which it is once it has been installed as the unit says.
    unit = tmp_path / UNIT.name
    text = UNIT.read_text()
    assert "ExecStart=/opt/lmcache/bin/lmcache server\n" in text
    unit.write_text(text.replace("/opt/lmcache/bin/lmcache", sys.executable))
    assert not run(analyze(), "verify", "--man=no", unit, stderr=subprocess.STDOUT)
    run(analyze(), "security", "--offline=true", f"--threshold={MAX_EXPOSURE}", UNIT)


def test_it_has_what_the_server_needs_and_its_configuration_file_is_accepted():
    found = service()
    assert found["LimitMEMLOCK"] == "infinity"
    assert int(found["LimitNOFILE"]) >= 4096
    assert found["RuntimeDirectoryMode"] == "0700"
    assert found["BindPaths"] == "-/tmp/nvidia-mps"
    for name in ("PrivateDevices", "PrivateUsers", "RemoveIPC", "PrivateNetwork", "MemoryMax"):
        assert name not in found
    # The exit code of a configuration that cannot work: starting again would not help.
    assert found["RestartPreventExitStatus"] == "2"
    loaded = load("--config", str(UNIT.parent / "lmcache.toml"))
    assert loaded.l1_size_gb == 64
    commented = re.findall(r"^# (\w+) = ", (UNIT.parent / "lmcache.toml").read_text(), re.MULTILINE)
    assert commented
    assert set(commented) <= set(config.FLAGS)


def allowed_calls(group: str) -> set[str]:
    listed = run(tools.find("systemd-analyze"), "syscall-filter", "--no-pager", group)
    lines = [line.strip() for line in listed.splitlines()[1:]]
    names = {line for line in lines if line and not line.startswith(("#", "@"))}
    return names.union(*(allowed_calls(line) for line in lines if line.startswith("@")))


def confined(without: str | None = None) -> list[str]:
    """The command that confines what comes behind it as the unit says, without one more system call."""
    words = service()["SystemCallFilter"].split()
    calls = set().union(*(allowed_calls(each) if each.startswith("@") else {each} for each in words))
    return [sys.executable, str(CONFINED), "capabilities", "mdwe", *sorted(calls - {without})]


_SLEEPER = """
import json, os, sys
# Only in the same directory is the memory lent by the engine itself.
os.environ["LMCACHE_RUNTIME_DIR"] = "/dev/null"
import virtual_memory
from gpu_engine import GpuEngine, fused
from harness.server import LMCacheServer
from test_round_trips import CHUNK_SIZE, restored, stored_prompt, tables
with LMCacheServer(chunk_size=CHUNK_SIZE, l1_size_gb=0.05, through=json.loads(sys.argv[1])) as server:
    if sys.argv[2] == "lends":
        os.environ["LMCACHE_RUNTIME_DIR"] = server.runtime_dir
    engine = GpuEngine(server.address, fused(65536, 32), 32, "one", virtual_memory.allocate)
    engine.start()
    print(engine.worker.refusal or "served")
    if engine.worker.ready:
        free = list(range(1, 32))
        prompt = stored_prompt(engine, 2, free, 1)
        print("restored", restored(engine, *prompt, tables(engine, 2, free)))
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.parametrize("without", [None, "process_vm_readv"])
def test_a_server_confined_as_the_unit_says_serves(without, stack):
    """And it does not where the filter takes away what it needs, so that this shows something."""
    found = service()
    assert found["CapabilityBoundingSet"] == ""
    if find_library("seccomp") is None:
        tools.missing("needs libseccomp, which is not installed")
    through = [*confined(without), "--"]
    server = stack.enter_context(LMCacheServer(l1_size_gb=0.05, checksums=False, through=through))
    status = Path(f"/proc/{server.pid}/status").read_text()
    assert "NoNewPrivs:\t1" in status
    assert "Seccomp:\t2" in status
    assert re.search(r"CapEff:\t0+\n", status)
    # The bench is an engine that checks what comes back; without capabilities, as vLLM beside it.
    engine = [sys.executable, str(CONFINED), "capabilities", "--", sys.executable, "-m", "lmcache_server"]
    bench = ["bench", "--requests", "2", "--layers", "2", "--only", "store,load", "--port", str(server.port)]
    done = subprocess.run(
        [*engine, *bench], cwd=ROOT, env=server.environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode == 0) == (without is None), done.stdout + done.stderr
    if without:
        assert "process_vm_readv" in done.stderr


@pytest.mark.skipif(standin.COMPILER is None or standin.header() is None, reason="no C++ compiler or cuda.h")
@pytest.mark.parametrize(
    ("without", "lends", "served"),
    [(None, "", True), ("pidfd_getfd", "lends", True), ("pidfd_getfd", "", False)],
)
def test_confined_so_it_serves_a_gpu_whose_engine_may_sleep(without, lends, served, tmp_path):
    """The engine lends the descriptors of its memory or, if it cannot, the kernel copies them."""
    environment = standin.environment(tmp_path)
    environment["PYTHONPATH"] += os.pathsep + str(ROOT / "tests/gpu")
    engine = [sys.executable, str(CONFINED), "capabilities", "--", sys.executable, "-c", _SLEEPER]
    through = json.dumps([*confined(without), "mincore", "--"])  # which the stand-in calls
    done = subprocess.run(
        [*engine, through, lends], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if served:
        assert done.stdout == "served\nrestored 4\n", done.stderr
    else:
        assert "does not let the server share the GPU memory" in done.stdout, done.stderr
