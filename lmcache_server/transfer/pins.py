"""Pins L1 unit by unit: GPU copies use only pinned memory, because only that moves at the speed of the bus.

A GPU copy first pins every unit that it touches and that is not pinned yet. The rest is pinned in the
background. So the server is ready at once, and pageable memory slows down no copy.
"""

import logging
import os
import threading

import numpy as np

from lmcache_kernels.driver import CudaError
from lmcache_server.host.units import GB_BYTES
from lmcache_server.transfer.base import CopyError
from lmcache_server.transfer.gpus import Gpus
from lmcache_server.transfer.plan import Pieces, cut

logger = logging.getLogger(__name__)


class Pins:
    """The units of the `num_bytes` at `address`, and which of them are pinned. Any thread may use it.

    No copy may cross the border between two units, because the driver has registered them separately.
    """

    def __init__(self, gpus: Gpus, address: int, num_bytes: int, unit_bytes: int) -> None:
        self._gpus = gpus
        self._address = address
        self._num_bytes = num_bytes
        self._unit_bytes = unit_bytes
        count = -(-num_bytes // unit_bytes)
        self._pinned = np.zeros(count, dtype=bool)
        self._locks = [threading.Lock() for _ in range(count)]
        self.borders = np.arange(1, count, dtype=np.uint64) * np.uint64(unit_bytes) + np.uint64(address)
        self._lock = threading.Lock()
        self.pinned_bytes = 0
        self.failure = ""
        """Why no more can be pinned, and what to do about it; empty if nothing failed."""

    def prepare(self, number: int) -> bool:
        """Returns whether there are GPUs. If so, moves the calling thread, one of several that populate and
        pin, near one of them: memory is allocated near the thread that first touches it."""
        if not self._gpus.available:
            return False
        near = self._gpus.near(number) & os.sched_getaffinity(0)
        if near:
            os.sched_setaffinity(0, near)
        return True

    def pin_unit(self, index: int) -> bool:
        """As `_pin`, but returns False if it failed, which has been logged."""
        try:
            self._pin(index)
        except CopyError:
            return False
        return True

    def ensure(self, pieces: Pieces) -> None:
        """Pins every unit that these pieces touch. Raises CopyError."""
        local, _, _ = cut(*pieces, self.borders)
        indexes = (local - np.uint64(self._address)) // np.uint64(self._unit_bytes)
        for index in np.unique(indexes[~self._pinned[indexes]]).tolist():
            self._pin(index)

    def _pin(self, index: int) -> None:
        """Pins one unit, in the context of any GPU. Raises CopyError."""
        with self._locks[index]:
            if self._pinned[index]:
                return
            if self.failure:
                raise CopyError(self.failure)
            start = index * self._unit_bytes
            size_bytes = min(self._unit_bytes, self._num_bytes - start)
            try:
                self._gpus.first().enter()
                self._gpus.driver.register_host(self._address + start, size_bytes)
            except CudaError as error:
                self._fail(error)
                raise CopyError(self.failure) from error
            self._pinned[index] = True
            with self._lock:
                self.pinned_bytes += size_bytes

    def _fail(self, error: CudaError) -> None:
        if not self.failure:
            pinned_gb, wanted_gb = self.pinned_bytes / GB_BYTES, self._num_bytes / GB_BYTES
            self.failure = (
                f"only {pinned_gb:.2f} of {wanted_gb:.2f} GB of L1 could be pinned ({error}): copies between "
                "GPUs and the rest fail; allow locked memory (ulimit -l unlimited, LimitMEMLOCK=infinity, "
                "docker --ulimit memlock=-1) or ask for less with --l1-size-gb, and restart the server"
            )
            logger.error("%s", self.failure)
