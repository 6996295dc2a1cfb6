"""The memory of a made-up worker on a GPU."""

import numpy as np
from numpy.typing import NDArray

from lmcache_client.memory.cuda import CudaExport, ExportError
from lmcache_kernels import driver as cuda
from lmcache_kernels.driver import CudaError, Driver
from lmcache_server.commands.bench.workload import BenchError


def driver_here() -> Driver:
    """Raises BenchError without a GPU."""
    driver = cuda.load()
    if driver is None:
        raise BenchError("this process sees no GPU")
    return driver


class DeviceMemory:
    """Memory on GPU number `ordinal` with the bytes of `content`. Raises BenchError."""

    def __init__(self, ordinal: int, content: NDArray[np.uint64]) -> None:
        self._driver, self._num_bytes = driver_here(), content.nbytes
        try:
            self._driver.enter(self._driver.retain_context(ordinal))
            self._address = self._driver.allocate(self._num_bytes)
            self._driver.write(self._address, content.tobytes())
            self.export = CudaExport(((self._address, self._num_bytes),), lambda: 0)
        except (CudaError, ExportError) as error:
            raise BenchError(f"the client cannot use the GPU: {error}") from error

    def read(self) -> NDArray[np.uint64]:
        return np.frombuffer(self._driver.read(self._address, self._num_bytes), np.uint64)

    def close(self) -> None:
        """To be called when the server has unmapped the memory."""
        self.export.close()
        self._driver.free(self._address)
