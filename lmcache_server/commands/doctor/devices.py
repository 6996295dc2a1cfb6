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


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class Management:
    """NVML, which tells about GPUs without a context there. What it does not tell is None."""

    def __init__(self) -> None:
        """Raises OSError without the library or if it does not start."""
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        if code := self._library.nvmlInit_v2():
            raise OSError(f"nvmlInit_v2 failed with {code}")

    def close(self) -> None:
        self._library.nvmlShutdown()

    def free_bytes(self, pci_bus_id: str) -> tuple[int, int] | None:
        """(free, total) bytes of a GPU's memory."""
        memory = _Memory()
        has_told = self._ask("nvmlDeviceGetMemoryInfo", pci_bus_id, memory)
        return (int(memory.free), int(memory.total)) if has_told else None

    def is_divided(self, pci_bus_id: str) -> bool | None:
        """Whether MIG divides the GPU into instances."""
        current, pending = ctypes.c_uint(), ctypes.c_uint()
        has_told = self._ask("nvmlDeviceGetMigMode", pci_bus_id, current, pending)
        return bool(current.value) if has_told else None

    def _ask(self, name: str, pci_bus_id: str, *answers: Any) -> bool:
        """Calls the function `name` for a GPU, to fill in `answers`. Returns whether it did."""
        device = ctypes.c_void_p()
        failed = self._library.nvmlDeviceGetHandleByPciBusId_v2(pci_bus_id.encode(), ctypes.byref(device))
        return not failed and not getattr(self._library, name)(device, *map(ctypes.byref, answers))


def check_devices(driver: Driver, report: Mapping[str, Any]) -> list[Check]:
    """Checks every GPU of `driver`, and the processes in the status `report` of a server."""
    found, management = [], None
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, AttributeError):
            management = stack.enter_context(contextlib.closing(Management()))
        for ordinal in range(driver.num_devices()):
            bus_id, mode = driver.pci_bus_id(ordinal), 0
            with contextlib.suppress(CudaError):
                mode = driver.compute_mode(ordinal)
            found.append(compute_mode(bus_id, mode))
            if management is not None:
                found.append(instances(bus_id, management.is_divided(bus_id)))
                found.append(memory(bus_id, management.free_bytes(bus_id), bool(report)))
    workers = [each for each in report.get("sessions", ()) if each["role"] == "worker"]
    return [*found, namespaces(report.get("pid", 0), workers)]


def through_server(driver: Driver, endpoint: str, report: Mapping[str, Any]) -> Iterator[Check]:
    """Stores, restores and compares pages of each GPU through the running server; nothing without one."""
    for ordinal in range(driver.num_devices()) if report else ():
        name = f"GPU {driver.pci_bus_id(ordinal)}, through the server"
        found = selftest(endpoint, report["config"]["chunk_size"], ordinal)
        if found["ok"]:
            yield Check(name, OK, "pages were stored, restored and compared")
        else:
            yield Check(name, FAIL, f"{found['failed']}: {found['error']}")


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
