"""What this machine, this Python environment and a running server say, for the checks."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lmcache_client.contract.endpoint import address
from lmcache_client.contract.messages import Status, StatusReport
from lmcache_client.memory.host import ProofBuffer, allow_tracer
from lmcache_kernels.driver import CudaError, Driver
from lmcache_kernels.page_copy import KernelError, compiled
from lmcache_server.commands import control
from lmcache_server.commands.doctor import checks
from lmcache_server.commands.doctor.checks import Check
from lmcache_server.host import descriptors, machine
from lmcache_server.host.units import GB_BYTES

TIMEOUT_S = 2.0
TRY_TIMEOUT_S = 20.0
PLUGINS = "vllm.general_plugins"
_THP = "/sys/kernel/mm/transparent_hugepage/enabled"
_THP_OF_FILES = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
_READER = """
import sys
from lmcache_server.transfer.host import CopyError, read
sys.stdin.readline()
try:
    read(int(sys.argv[1]), int(sys.argv[2]), 1)
except CopyError as error:
    print(error)
"""
"""Reads a byte of another process as the server reads an engine: not as its parent, which Yama favours."""


def examine(options: Mapping[str, Any], given: Mapping[str, Any]) -> list[Check]:
    """All checks. `options` are the server's that matter here; of those that were not `given` as flags a
    running server's own count."""
    found, server = _server(options["host"], options["port"])
    config = found.get("config", {})
    l1 = {
        name: config.get(name, options[name]) if given.get(name) is None else options[name]
        for name in ("l1_size_gb", "l1_path", "l1_hugetlb")
    }
    l1_bytes = int(l1["l1_size_gb"] * GB_BYTES)
    driver, failure = _driver()
    gpus = [driver.pci_bus_id(each) for each in range(driver.num_devices())] if driver is not None else []
    version = driver.version() if driver is not None else 0
    vllm_version = _vllm_version()
    limits = _limits(found.get("pid", 0))
    return [
        server,
        _connectors(found),
        checks.vllm(vllm_version),
        checks.plugin(vllm_version, _plugin_failure(), os.environ.get("VLLM_PLUGINS")),
        *_l1_memory(l1, l1_bytes, found),
        checks.memlock(limits["Max locked memory"], l1_bytes, len(gpus)),
        checks.transparent_huge_pages(_text(_THP), _THP),
        checks.reserved_huge_pages(machine.memory_info(), l1_bytes, l1["l1_hugetlb"], bool(found)),
        checks.open_files(limits["Max open files"], descriptors.LEAST_LIMIT),
        checks.ptrace(_text("/proc/sys/kernel/yama/ptrace_scope"), _try_reading()),
        checks.numa(
            sorted(machine.numbers(_text("/sys/devices/system/node/online") or "0")),
            {gpu: int(_text(f"/sys/bus/pci/devices/{gpu.lower()}/numa_node") or -1) for gpu in gpus},
        ),
        checks.driver(gpus, version, failure, _has_device_files()),
        checks.copy_kernel(len(gpus), _kernel_failure(driver), version),
    ]


def _text(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _server(host: str, port: int) -> tuple[dict[str, Any], Check]:
    """The status report of a running server, empty without one, and what is to be said of it."""
    where, report, failure, unreachable = f"port {port}", dict[str, Any](), "", False
    try:
        where = address(host, port)
        reply = control.ask(host, port, Status(), TIMEOUT_S)
        assert isinstance(reply, StatusReport)
        report = json.loads("".join(reply.pieces))
    except control.UnreachableError:
        unreachable = True
    except (control.ControlError, ValueError) as error:
        failure = str(error)
    return report, checks.server(report.get("version", ""), where, failure, unreachable)


def _connectors(report: Mapping[str, Any]) -> Check:
    versions = {
        f"engine {each['engine_id']}, pid {each['pid']}": str(each["client_version"])
        for each in report.get("sessions", ())
        if each["engine_id"]
    }
    vllms = {each["vllm_version"] for each in report.get("sessions", ()) if each["vllm_version"]}
    not_cached = {
        f"engine {each['engine_id']}": str(each["not_cached"])
        for each in report.get("sessions", ())
        if each["not_cached"]
    }
    return checks.connectors(report.get("version", ""), versions, sorted(vllms), not_cached)


def _l1_memory(l1: Mapping[str, Any], l1_bytes: int, report: Mapping[str, Any]) -> list[Check]:
    """Whether there is room for L1: in memory, or in a file of a memory file system or on a disk."""
    path, taken = l1["l1_path"], report.get("l1", {}).get("populated_bytes", 0)
    mount, in_memory, room_bytes = "", not l1["l1_hugetlb"], 0
    if path and os.path.isdir(directory := os.path.dirname(os.path.abspath(path))):
        in_memory = _is_memory(directory)
        taken = os.stat(path).st_blocks * 512 if os.path.exists(path) else 0
        left = os.statvfs(directory)
        room_bytes = taken + left.f_bavail * left.f_frsize
        mount = next(each for each in map(str, Path(path).absolute().parents) if os.path.ismount(each))
    found = [checks.l1_file(path, mount, in_memory, room_bytes, l1_bytes)]
    if in_memory:
        found.insert(0, checks.memory(*machine.available_bytes(), taken, l1_bytes))
    if mount and in_memory:
        found.append(checks.transparent_huge_pages(_text(_THP_OF_FILES), _THP_OF_FILES))
    return found


def _is_memory(directory: str) -> bool:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return machine.file_system_type(descriptor) in machine.MEMORY_FILE_SYSTEMS
    finally:
        os.close(descriptor)


def _limits(pid: int) -> dict[str, int]:
    """The hard limits of a running server, or of this process, by their names in /proc/PID/limits."""
    of_server = "lmcache" in (_text(f"/proc/{pid}/cmdline") or "")
    text = (_text(f"/proc/{pid}/limits") if of_server else None) or _text("/proc/self/limits") or ""
    limits = {}
    for line in text.splitlines()[1:]:
        name, hard = line[:26].strip(), line[47:68].strip()
        limits[name] = checks.UNLIMITED if hard == "unlimited" else int(hard)
    return limits


def _try_reading() -> str:
    """Why another process of this user cannot read this one's memory, as the server reads an engine's;
    empty when it can."""
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
        return None, "its driver is older than CUDA 12"
    except (OSError, CudaError) as error:
        return None, str(error)


def _has_device_files() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/proc/driver/nvidia/version").exists()


def _kernel_failure(driver: Driver | None) -> str:
    try:
        if driver is not None:
            compiled(driver.compute_capability(0))
    except (KernelError, CudaError) as error:
        return str(error)
    return ""


def _vllm_version() -> str:
    """Of the vLLM in this Python environment, whatever its distribution is called; it is not imported."""
    if find_spec("vllm") is None:
        return ""
    for distribution in metadata.packages_distributions().get("vllm", ()):
        return metadata.version(distribution)
    return "unknown"


def _plugin_failure() -> str:
    found = metadata.entry_points(group=PLUGINS, name="lmcache_mp")
    try:
        for entry in found:
            entry.load()
    except Exception as error:  # whatever an installation that is broken raises
        return f"the plugin lmcache_mp does not load: {error}"
    return "" if found else "the plugin lmcache_mp is not installed in this Python environment"
