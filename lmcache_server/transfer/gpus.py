"""The GPUs on which the server has a context: those that it copies for, and one to pin memory with."""

import contextlib
import ctypes
import logging
import os
import threading

from lmcache_kernels import driver as cuda
from lmcache_kernels.driver import CudaError, Driver
from lmcache_kernels.page_copy import KernelError, compiled
from lmcache_server.host.machine import local_processors, move_to
from lmcache_server.transfer.base import CopyError, NoAccessError

logger = logging.getLogger(__name__)

START_REMEDIES = {
    3: "run 'nvidia-modprobe -u -c 0' on the host, which makes CUDA's devices",
    802: "start the service nvidia-fabricmanager on the host, of the driver's version",
    803: "the driver was updated: restart the host, or the container",
    999: "run 'nvidia-modprobe -u -c 0' on the host, which makes CUDA's devices",
}
"""What to do if the driver does not start with this error (CUresult): not initialized, system not ready,
system driver mismatch, unknown."""
_NO_DEVICE = 100
_MALLOPT = {-1: 64 << 20, -3: 32 << 20}  # M_TRIM_THRESHOLD, and M_MMAP_THRESHOLD at its highest


class LostGpuError(CopyError):
    """The GPU's context no longer works in this process."""


class Gpu:
    """One GPU: its context, created once, and its copy kernel, if there is one."""

    def __init__(self, driver: Driver, ordinal: int, with_kernel: bool) -> None:
        with contextlib.suppress(AttributeError):  # only glibc has it
            # The arrays of a copy of many pieces take megabytes. To get them from the kernel anew each time
            # would cost more than to compute them, so each thread keeps some of what it has freed.
            for option, num_bytes in _MALLOPT.items():
                ctypes.CDLL(None).mallopt(option, num_bytes)
        self.driver = driver
        self.ordinal = ordinal
        self.name = f"GPU {driver.pci_bus_id(ordinal)}"
        self.context = driver.retain_context(ordinal)
        self.lost = ""
        """Why the context no longer works; empty while it does."""
        self._kernel: int | None = None if with_kernel else 0
        self._lock = threading.Lock()

    def enter(self) -> None:
        """Makes its context current on this thread. Raises CudaError."""
        self.driver.enter(self.context)

    def stay_near(self) -> None:
        """Moves the calling thread to the processors near the GPU."""
        move_to(local_processors(self.driver.pci_bus_id(self.ordinal)), os.sched_getaffinity(0))

    def kernel(self) -> int:
        """The copy kernel, or 0 if there is none; an error is logged once. The context must be current."""
        with self._lock:
            if self._kernel is None:
                self._kernel = 0
                try:
                    # The kernel gets host addresses of L1, which not every GPU can use.
                    if self.driver.sees_host_pointers(self.ordinal):
                        image = compiled(self.driver.compute_capability(self.ordinal))
                        self._kernel = self.driver.load_kernel(image, "page_copy")
                except (KernelError, CudaError) as error:
                    logger.warning("%(gpu)s: %(reason)s", {"gpu": self.name, "reason": str(error)})
            return self._kernel

    def check(self, error: Exception, stream: int) -> CopyError:
        """Turns a failed call into the error to raise. A second call on `stream` shows whether only one copy
        or the whole context has failed."""
        try:
            self.driver.synchronize(stream)
        except CudaError as lasting:
            if not self.lost:
                self.lost = f"{self.name} has failed for this server ({lasting})"
                logger.error("%s", self.lost)
            return LostGpuError(self.lost)
        return CopyError(f"a copy on {self.name} failed: {error}")


class Gpus:
    """The GPUs by UUID, because a GPU's number differs between processes. Any thread may use it."""

    def __init__(self, *, with_kernel: bool = False) -> None:
        self._with_kernel = with_kernel
        self._locks: dict[int, threading.Lock] = {}
        self._by_ordinal: dict[int, Gpu] = {}
        self._logged = ""

    @property
    def driver(self) -> Driver:
        """The CUDA driver. Raises NoAccessError if there is none, it does not start, or it has no GPU."""
        try:
            return cuda.started()
        except (OSError, AttributeError, CudaError) as error:
            code = error.code if isinstance(error, CudaError) else _NO_DEVICE
            if code == _NO_DEVICE:
                raise NoAccessError(
                    "the server sees no GPU: run it where 'nvidia-smi' shows the engine's GPU (containers: "
                    "--gpus all; the driver must be 525 or newer), and without CUDA_VISIBLE_DEVICES"
                ) from error
            remedy = START_REMEDIES.get(code, "'nvidia-smi' and the kernel's log may say more")
            failure = f"CUDA's driver does not start for the server ({error}): {remedy}"
            if failure != self._logged:
                self._logged = failure
                logger.error("%s", failure)
            raise NoAccessError(failure) from error

    @property
    def lost(self) -> str:
        """Why a GPU no longer works for this process; empty if all do."""
        return next((gpu.lost for gpu in list(self._by_ordinal.values()) if gpu.lost), "")

    @property
    def available(self) -> bool:
        """Whether there is a driver with a GPU. The first call waits until the driver has started."""
        with contextlib.suppress(NoAccessError):
            return bool(self.driver)
        return False

    def compile_kernel(self) -> None:
        """Compiles the copy kernel for the first GPU, so that no registration waits for it."""
        if self._with_kernel and self.available:
            with contextlib.suppress(KernelError, CudaError):  # `Gpu.kernel` logs it
                compiled(self.driver.compute_capability(0))

    def near(self, number: int) -> set[int]:
        """The processors of one of the NUMA nodes that have a GPU: of the first for number 0, of the next for
        1, and so on in turn. Empty if the system does not say."""
        sets = (local_processors(self.driver.pci_bus_id(n)) for n in range(self.driver.num_devices()))
        nodes = list(dict.fromkeys(map(frozenset, sets)))
        return set(nodes[number % len(nodes)])

    def enter_any(self) -> Gpu:
        """Makes a context current on this thread, if possible that of a GPU which is served anyway. Returns
        the GPU. Raises CopyError."""
        served = list(self._by_ordinal)
        failure = ""
        for ordinal in [*served, *(n for n in range(self.driver.num_devices()) if n not in served)]:
            if not (failure := self._entered(ordinal)):
                return self._by_ordinal[ordinal]
        raise CopyError(
            f"no GPU gives the server a context ({failure}): free some of its memory "
            "(--gpu-memory-utilization of vLLM), and set its compute mode to default (nvidia-smi -c 0)"
        )

    def _entered(self, ordinal: int) -> str:
        """As `Gpu.enter`, but returns why it failed."""
        try:
            gpu = self._get(ordinal)
            gpu.enter()
        except CudaError as error:
            return str(error)
        return gpu.lost

    def find(self, uuid: bytes) -> Gpu:
        """The GPU with this UUID. Raises NoAccessError, or CudaError if no context can be created there."""
        for ordinal in range(self.driver.num_devices()):
            if self.driver.uuid(ordinal) == uuid:
                return self._get(ordinal)
        raise NoAccessError(
            f"the server does not see the engine's GPU {uuid.hex()}: start the server with all GPUs of its "
            "engines (containers: --gpus all), and without CUDA_VISIBLE_DEVICES"
        )

    def _get(self, ordinal: int) -> Gpu:
        # A context takes long to create, and another GPU's workers must not wait for it.
        with self._locks.setdefault(ordinal, threading.Lock()):
            if ordinal not in self._by_ordinal:
                self._by_ordinal[ordinal] = Gpu(self.driver, ordinal, self._with_kernel)
            return self._by_ordinal[ordinal]
