"""The checks of GPUs that `lmcache doctor` makes without a context on them: settings, memory, namespaces."""

import contextlib
import ctypes
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lmcache_kernels.driver import CudaError, Driver
from lmcache_server.commands.bench.selftest import selftest
from lmcache_server.host.machine import process_namespace
from lmcache_server.host.preflight import FAIL, OK, WARN, Check

CONTEXT_BYTES = 1 << 30
"""More than a server's context takes on a GPU: about 520 MiB on an H200."""
_MODES = {
    2: "allows no process to use the GPU",
    3: "lets only one process use the GPU, but engine and server are two",
}
"""CUcomputemode."""


def _told(bus_id: str) -> tuple[tuple[int, int] | None, bool | None]:
    """What NVML tells of a GPU without a context there, None where it does not: (free, total) bytes of its
    memory, and whether MIG divides it into instances. Raises OSError or AttributeError without NVML."""
    library = ctypes.CDLL("libnvidia-ml.so.1")
    if code := library.nvmlInit_v2():
        raise OSError(f"nvmlInit_v2 failed with {code}")
    device = ctypes.c_void_p()
    memory = (ctypes.c_ulonglong * 3)()  # nvmlMemory_t: total, free and used
    divided, pending = ctypes.c_uint(), ctypes.c_uint()
    try:
        known = not library.nvmlDeviceGetHandleByPciBusId_v2(bus_id.encode(), ctypes.byref(device))
        has_memory = known and not library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
        has_mode = known and not library.nvmlDeviceGetMigMode(
            device, ctypes.byref(divided), ctypes.byref(pending)
        )
    finally:
        library.nvmlShutdown()
    free_and_total = (memory[1], memory[0]) if has_memory else None
    return free_and_total, bool(divided.value) if has_mode else None


def check_devices(driver: Driver, report: Mapping[str, Any]) -> list[Check]:
    """Checks every GPU of `driver`, and the processes in the status `report` of a server."""
    found = []
    for ordinal in range(driver.num_devices()):
        bus_id, mode = driver.pci_bus_id(ordinal), 0
        with contextlib.suppress(CudaError):
            mode = driver.compute_mode(ordinal)
        found.append(compute_mode(bus_id, mode))
        with contextlib.suppress(OSError, AttributeError):
            free_and_total, is_divided = _told(bus_id)
            found.append(instances(bus_id, is_divided))
            found.append(memory(bus_id, free_and_total, bool(report)))
    workers = [each for each in report.get("sessions", ()) if each["role"] == "worker"]
    return [*found, namespaces(report.get("pid", 0), workers)]


def through_server(driver: Driver, endpoint: str, report: Mapping[str, Any]) -> Iterator[Check]:
    """Stores, restores and compares pages of each GPU through the running server; nothing without one."""
    for ordinal in range(driver.num_devices()) if report else ():
        name = f"GPU {driver.pci_bus_id(ordinal)}, through the server"
        found = selftest(endpoint, report["config"]["chunk_size"], ordinal)
        good = Check(name, OK, "pages were stored, restored and compared")
        yield good if found["ok"] else Check(name, FAIL, f"{found['failed']}: {found['error']}")


def compute_mode(bus_id: str, mode: int) -> Check:
    name = f"GPU {bus_id}, compute mode"
    if mode not in _MODES:
        return Check(name, OK, "default")
    fix = "nvidia-smi -c 0  (or, if it is exclusive, start the MPS daemon before server and engines)"
    return Check(name, WARN, f"it {_MODES[mode]}", fix)


def instances(bus_id: str, is_divided: bool | None) -> Check:
    name = f"GPU {bus_id}, MIG"
    if not is_divided:
        return Check(name, OK, "off" if is_divided is not None else "not supported")
    fix = "CUDA_VISIBLE_DEVICES=MIG-…  lmcache server --port …  (of each instance that has engines)"
    return Check(name, WARN, "on: a server serves the engines of one instance only", fix)


def memory(bus_id: str, free_and_total: tuple[int, int] | None, is_running: bool) -> Check:
    """`is_running` says that a server runs, which may have its context already."""
    name = f"GPU {bus_id}, device memory"
    if free_and_total is None:
        return Check(name, OK, "unknown: NVML does not tell")
    free_bytes, total_bytes = free_and_total
    shown = f"{free_bytes >> 20} of {total_bytes >> 20} MiB are free"
    if is_running or free_bytes >= CONTEXT_BYTES:
        return Check(name, OK, shown)
    finding = f"{shown}, but the server needs a context there"
    return Check(name, WARN, finding, "lower --gpu-memory-utilization")


def namespaces(server_pid: int, workers: Sequence[Mapping[str, Any]]) -> Check:
    """Whether this process sees the server's, and the server's process namespace is that of its workers."""
    name = "process namespaces"
    own, server = process_namespace("self"), process_namespace(server_pid)
    if not server_pid:
        return Check(name, OK, "unknown without a server")
    if server != own:
        finding = "the server is not in this process namespace"
        return Check(name, WARN, finding, "run doctor beside the server")
    others = [f"engine {each['engine_id']}" for each in workers if process_namespace(each["pid"]) != server]
    if others:
        finding = f"{', '.join(others)}: in another process namespace, where handles may not open"
        return Check(name, WARN, finding, "share it (docker: --pid=host; Kubernetes: hostPID)")
    return Check(name, OK, f"the server and its {len(workers)} worker(s) share one")
