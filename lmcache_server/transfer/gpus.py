"""The GPUs on which the server has a context: those that it copies for, and one to pin memory with."""

import logging
import threading

from lmcache_kernels import driver as cuda
from lmcache_kernels.driver import CudaError, Driver
from lmcache_kernels.page_copy import KernelError, compiled
from lmcache_server.host.machine import local_processors
from lmcache_server.transfer.base import CopyError, NoAccessError

logger = logging.getLogger(__name__)


class LostGpuError(CopyError):
    """The GPU's context no longer works in this process."""


class Gpu:
    """One GPU: its context, created once, and its copy kernel, if there is one."""

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self.driver = driver
        self.ordinal = ordinal
        self.name = f"GPU {driver.pci_bus_id(ordinal)}"
        self.context = driver.retain_context(ordinal)
        self.lost = ""
        """Why the context no longer works; empty while it does."""
        self._kernel: int | None = None
        self._lock = threading.Lock()

    def enter(self) -> None:
        """Makes its context current on this thread. Raises CudaError."""
        self.driver.enter(self.context)

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

    def check(self, error: CudaError, stream: int) -> CopyError:
        """Turns a failed call into the error to raise. A second call on `stream` shows whether only one copy
        or the whole context has failed."""
        try:
            self.driver.synchronize(stream)
        except CudaError as lasting:
            if not self.lost:
                self.lost = f"{self.name} has failed for this server ({lasting}): restart the server"
                logger.error("%s", self.lost)
            return LostGpuError(self.lost)
        return CopyError(f"a copy on {self.name} failed: {error}")


class Gpus:
    """The GPUs by UUID, because a GPU's number differs between processes. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_ordinal: dict[int, Gpu] = {}

    @property
    def driver(self) -> Driver:
        """The CUDA driver. Raises NoAccessError if there is none, or no GPU."""
        driver = cuda.load()
        if driver is None:
            raise NoAccessError(
                "the server sees no GPU: run it where 'nvidia-smi' shows the engine's GPU (containers: "
                "--gpus all), and without CUDA_VISIBLE_DEVICES"
            )
        return driver

    @property
    def available(self) -> bool:
        """Whether there is a driver with a GPU. The first call waits until the driver has started."""
        with self._lock:
            return cuda.load() is not None

    def near(self, number: int) -> set[int]:
        """The processors near GPU `number` modulo the number of GPUs; empty if the system does not say."""
        return local_processors(self.driver.pci_bus_id(number % self.driver.num_devices()))

    def first(self) -> Gpu:
        """The GPU to pin memory with."""
        with self._lock:
            return next(iter(self._by_ordinal.values()), None) or self._get(0)

    def find(self, uuid: bytes) -> Gpu:
        """The GPU with this UUID. Raises NoAccessError, or CudaError if no context can be created there."""
        for ordinal in range(self.driver.num_devices()):
            if self.driver.uuid(ordinal) == uuid:
                with self._lock:
                    return self._get(ordinal)
        raise NoAccessError(
            f"the server does not see the engine's GPU {uuid.hex()}: start the server with all GPUs of its "
            "engines (containers: --gpus all), and without CUDA_VISIBLE_DEVICES"
        )

    def _get(self, ordinal: int) -> Gpu:
        if ordinal not in self._by_ordinal:
            self._by_ordinal[ordinal] = Gpu(self.driver, ordinal)
        return self._by_ordinal[ordinal]
