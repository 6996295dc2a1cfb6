"""Reads this machine, this Python environment and a running server, and runs all checks on them."""

import itertools
import os
import subprocess
import sys
from collections.abc import Mapping, Set
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lmcache_client.contract.endpoint import address
from lmcache_client.memory.host import ProofBuffer, allow_tracer
from lmcache_kernels.driver import CudaError, Driver
from lmcache_server.commands import control
from lmcache_server.commands.doctor import verdicts
from lmcache_server.commands.doctor.devices import check_devices, through_server
from lmcache_server.commands.doctor.gpu import try_gpus
from lmcache_server.commands.shared_flags import Address
from lmcache_server.host import machine, preflight
from lmcache_server.host.machine import text
from lmcache_server.host.preflight import FAIL, WARN, Check
from lmcache_server.host.units import GB_BYTES
from lmcache_server.options import parts

TIMEOUT_S = 10.0
TRY_TIMEOUT_S = 20.0
PLUGINS = "vllm.general_plugins"
_THP = "/sys/kernel/mm/transparent_hugepage/enabled"
_READER = """
import sys
from lmcache_server.transfer.host import CopyError, read
sys.stdin.readline()
try:
    read(int(sys.argv[1]), int(sys.argv[2]), 1)
except CopyError as error:
    print(error)
"""
"""Reads a byte of the process that started it, as the server reads an engine. Yama lets a parent read its
children, so the parent cannot try this itself."""


def examine(
    server: Address, options: Mapping[str, Any], flags: Set[str], gpu_trial: bool = False
) -> list[Check]:
    """Run all checks. Except for the `options` that were given as `flags`, a running server's own count."""
    report, answer = _server(server)
    config = report.get("config", {}).items()
    effective = {**options, **{name: value for name, value in config if name not in flags}}
    l1_bytes = int(effective["l1_size_gb"] * GB_BYTES)
    driver, failure = _driver()
    gpus = [driver.pci_bus_id(index) for index in range(driver.num_devices())] if driver is not None else []
    version = driver.version() if driver is not None else 0
    vllm_version = _vllm_version()
    limits = _limits(report.get("pid", 0))
    return [
        answer,
        verdicts.connectors(report.get("version", ""), report.get("sessions", ())),
        verdicts.names(report.get("explained", ())),
        verdicts.vllm(vllm_version),
        verdicts.plugin(vllm_version, _plugin_failure(), os.environ.get("VLLM_PLUGINS")),
        verdicts.command(find_spec("lmcache") is not None),
        *_l1_room(effective, l1_bytes, report),
        verdicts.memlock(limits["Max locked memory"], l1_bytes, len(gpus)),
        verdicts.transparent_huge_pages(text(_THP), _THP),
        preflight.open_files(limits["Max open files"]),
        verdicts.ptrace(text("/proc/sys/kernel/yama/ptrace_scope"), _try_reading()),
        verdicts.numa(
            sorted(machine.numbers(text("/sys/devices/system/node/online") or "0")),
            {gpu: int(text(f"/sys/bus/pci/devices/{gpu.lower()}/numa_node") or -1) for gpu in gpus},
        ),
        verdicts.driver(gpus, version, failure, _has_device_files()),
        *itertools.chain(*(of(effective, report) for of in parts("doctor", "checks"))),
        *(check_devices(driver, report) if driver is not None else ()),
        *(try_gpus(driver) if driver is not None and gpu_trial else ()),
        *(through_server(driver, address(*server), report) if driver is not None and gpu_trial else ()),
    ]


def _server(server: Address) -> tuple[dict[str, Any], Check]:
    """The status report of the running server, empty if there is none, and the check "server"."""
    try:
        report = control.report(server, TIMEOUT_S, explain=True)
    except control.UnreachableError as error:
        return {}, Check("server", WARN, f"no server answers at {error.endpoint}", error.advice)
    except control.ControlError as error:
        return {}, Check("server", FAIL, str(error))
    return report, verdicts.server(report["version"], address(*server))


def _l1_room(values: Mapping[str, Any], l1_bytes: int, report: Mapping[str, Any]) -> list[Check]:
    """Checks for enough room for L1 in memory, or in reserved huge pages."""
    if any(backs(values) for backs in parts("flags", "backs_l1")):
        return []
    if values["l1_hugetlb"]:
        # A running server already has its pages.
        return [] if report else [preflight.huge_pages(machine.memory_info(), l1_bytes)]
    taken_bytes = report.get("l1", {}).get("populated_bytes", 0)
    return [preflight.memory(l1_bytes, taken_bytes, *machine.available_bytes())]


def _limits(pid: int) -> dict[str, int]:
    """The hard limits of the running server, or else of this process, by their names in /proc/PID/limits."""
    is_server = "lmcache" in (text(f"/proc/{pid}/cmdline") or "")
    table = (text(f"/proc/{pid}/limits") if is_server else None) or text("/proc/self/limits") or ""
    limits = {}
    for line in table.splitlines()[1:]:
        name, hard = line[:26].strip(), line[47:68].strip()
        limits[name] = machine.UNLIMITED if hard == "unlimited" else int(hard)
    return limits


def _try_reading() -> str:
    """Why another process of this user cannot read this process's memory, as the server reads an engine's;
    empty if it can."""
    own = ProofBuffer()
    command = [sys.executable, "-c", _READER, str(os.getpid()), str(own.address)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        allow_tracer(child.pid)
        output, _ = child.communicate("\n", timeout=TRY_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        child.kill()
        child.communicate()
        return str(error)
    return output.strip() if not child.returncode else f"the attempt ended with code {child.returncode}"


def _driver() -> tuple[Driver | None, str]:
    try:
        return Driver(), ""
    except AttributeError:
        return None, "the driver is older than CUDA 12"
    except (OSError, CudaError) as error:
        return None, str(error)


def _has_device_files() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/proc/driver/nvidia/version").exists()


def _vllm_version() -> str:
    """The version of vLLM in this environment, from any distribution, without importing it; empty if none."""
    if find_spec("vllm") is None:
        return ""
    for distribution in metadata.packages_distributions().get("vllm", ()):
        return metadata.version(distribution)
    return "unknown"


def _plugin_failure() -> str:
    plugins = metadata.entry_points(group=PLUGINS, name="lmcache_mp")
    try:
        for plugin in plugins:
            plugin.load()
    except Exception as error:  # a broken installation may raise anything
        return f"the plugin lmcache_mp does not load: {error}"
    return "" if plugins else "the plugin lmcache_mp is not installed in this Python environment"
