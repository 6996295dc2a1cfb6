"""L1 pinned, unit by unit: a GPU copies to and from pinned memory only, at the speed of the bus.

Every copy of a GPU pins first what it is about to touch and has not been pinned yet; in the background the
rest follows. So the server is ready at once, and no copy is ever slow because its memory is pageable.
"""

import logging
import os
import threading

import numpy as np

from lmcache_kernels.driver import CudaError
from lmcache_server.transfer.base import CopyError
from lmcache_server.transfer.gpus import Gpus
from lmcache_server.transfer.plan import Pieces, cut

logger = logging.getLogger(__name__)

_GB = 1 << 30
"""As in --l1-size-gb."""


class Pins:
    """Which units of the `num_bytes` at `address` are pinned. For any thread.

    A copy must not reach over the end of a unit: two registrations are not one to the driver.
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
        """Why no more can be pinned, in a sentence."""

    def prepare(self, number: int) -> bool:
        """Whether there are GPUs to pin for. If so the calling thread, one of several that populate and pin,
        moves near one of them: memory lies where it is first touched."""
        if not self._gpus.available:
            return False
        near = self._gpus.near(number) & os.sched_getaffinity(0)
        if near:
            os.sched_setaffinity(0, near)
        return True

    def pin_unit(self, index: int) -> bool:
        """As `_pin`; False when it failed, which has been logged."""
        try:
            self._pin(index)
        except CopyError:
            return False
        return True

    def ensure(self, pieces: Pieces) -> None:
        """Pin every unit that has part of these pieces. Raises CopyError."""
        local, _, _ = cut(*pieces, self.borders)
        indexes = (local - np.uint64(self._address)) // np.uint64(self._unit_bytes)
        for index in np.unique(indexes[~self._pinned[indexes]]).tolist():
            self._pin(index)

    def _pin(self, index: int) -> None:
        """Pin one unit, in the context of any GPU. Raises CopyError."""
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
            self.failure = (
                f"{self.pinned_bytes / _GB:.2f} of {self._num_bytes / _GB:.2f} GB of L1 are pinned "
                f"and no more could be ({error}): copies between GPUs and the rest of it fail; allow locked "
                "memory (ulimit -l unlimited, LimitMEMLOCK=infinity, docker --ulimit memlock=-1) or ask for "
                "less with --l1-size-gb, and start again"
            )
            logger.error("%s", self.failure)
