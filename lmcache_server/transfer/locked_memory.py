"""Pins L1 unit by unit: GPU copies use only pinned memory, because only that moves at the speed of the bus.

A GPU copy first pins every unit that it touches and that is not pinned yet. The rest is pinned in the
background. So the server is ready at once, and pageable memory slows down no copy.
"""

import logging
import os
import threading
import time
from collections.abc import Callable

import numpy as np

from lmcache_kernels.driver import CudaError
from lmcache_server.core.pool import FRAME_BYTES, Runs
from lmcache_server.host.machine import move_to
from lmcache_server.host.units import GB_BYTES
from lmcache_server.transfer.base import CopyError
from lmcache_server.transfer.gpus import Gpus, LostGpuError
from lmcache_server.transfer.plan import Pieces, cut

logger = logging.getLogger(__name__)

RETRY_S = 60.0
"""After a failure nothing is pinned for this long."""
MEMLOCK = (
    "; allow locked memory (ulimit -l unlimited, LimitMEMLOCK=infinity, docker --ulimit memlock=-1), leave "
    "GPU memory for page tables (vLLM's --gpu-memory-utilization) or ask for less with --l1-size-gb, and "
    "restart the server"
)


class LockedMemory:
    """The units of the `num_bytes` at `address`, and which of them are pinned. Any thread may use it.

    No copy may cross the border between two units, because the driver has registered them separately. After a
    copy whose memory could not be pinned, `lacking` is told which frames are not pinned.
    """

    def __init__(
        self,
        gpus: Gpus,
        address: int,
        num_bytes: int,
        unit_bytes: int,
        lacking: Callable[[Runs], object] = lambda _runs: None,
    ) -> None:
        self._gpus = gpus
        self._lacking = lacking
        self._refused = False
        self._processors = os.sched_getaffinity(0)
        self._address = address
        self._num_bytes = num_bytes
        self._unit_bytes = unit_bytes
        count = -(-num_bytes // unit_bytes)
        self._pinned = np.zeros(count, dtype=bool)
        self._locks = [threading.Lock() for _ in range(count)]
        self._borders = np.arange(1, count, dtype=np.uint64) * np.uint64(unit_bytes) + np.uint64(address)
        self._lock, self._telling = threading.Lock(), threading.Lock()
        self.pinned_bytes = 0
        self._retry_s = 0.0
        self._logged = ""
        self.failure = ""
        """Why the last attempt to pin failed, and what to do about it; empty if it succeeded."""

    @property
    def is_complete(self) -> bool:
        """Whether all of it is pinned."""
        return self.pinned_bytes >= self._num_bytes

    def prepare(self, number: int) -> bool:
        """Returns whether there are GPUs. If so, moves the calling thread, which will populate and pin unit
        `number`, near one of them. Memory is allocated near the thread that first touches it, so L1 is spread
        over all NUMA nodes that have a GPU."""
        if not self._gpus.available:
            return False
        move_to(self._gpus.near(number), self._processors)
        return True

    def pin_rest(self) -> bool:
        """Pins what is not pinned yet; returns whether everything is."""
        rest = np.flatnonzero(~self._pinned).tolist()
        return self._gpus.available and not any(map(self.pin_unit, rest))

    def ensure(self, pieces: Pieces) -> Pieces:
        """Pins every unit that these pieces touch. Returns them cut where a unit ends. Raises CopyError."""
        unit_bytes, last = np.uint64(self._unit_bytes), pieces.local - np.uint64(self._address)
        units = last // unit_bytes
        # In place: otherwise, half of the time goes into new arrays.
        last += pieces.length
        last -= np.uint64(1)
        last //= unit_bytes
        if np.any(units != last):
            pieces = Pieces(*cut(*pieces, self._borders))
            units = (pieces.local - np.uint64(self._address)) // unit_bytes
        # Once all are pinned, which units these are is not asked: that, too, takes its time.
        for index in () if self.is_complete else np.unique(units).tolist():
            if failure := self.pin_unit(index):
                # From now on, a store gets only frames that are pinned.
                self._refused = True
                self._tell()
                raise CopyError(failure)
        return pieces

    def _tell(self) -> None:
        frames = self._unit_bytes // FRAME_BYTES
        with self._telling:  # the last to tell has seen all that is pinned
            rest = np.flatnonzero(~self._pinned)
            runs = np.split(rest, np.flatnonzero(np.diff(rest) > 1) + 1) if len(rest) else []
            self._lacking(tuple((int(run[0]) * frames, len(run) * frames) for run in runs))

    def pin_unit(self, index: int) -> str:
        """Pins one unit, in the context of any GPU. Returns why that failed, which has been logged; empty if
        it is pinned."""
        with self._locks[index]:
            if self._pinned[index]:
                return ""
            if (failure := self.failure) and time.monotonic() < self._retry_s:
                return failure
            start = index * self._unit_bytes
            size_bytes = min(self._unit_bytes, self._num_bytes - start)
            try:
                self._register(self._address + start, size_bytes)
            except (CudaError, CopyError) as error:
                return self._failed(error)
            self._pinned[index] = True
            with self._lock:
                self.pinned_bytes += size_bytes
                self.failure = ""
            if self._refused:
                self._tell()
        return ""

    def _register(self, address: int, size_bytes: int) -> None:
        """Raises CudaError for what the registration itself has against it, and CopyError without a GPU."""
        while True:
            gpu = self._gpus.enter_any()
            try:
                return gpu.driver.register_host(address, size_bytes)
            except CudaError as error:
                # A context that fails answers every call with the same error; then it is another GPU's turn.
                if not isinstance(gpu.check(error, 0), LostGpuError):
                    raise

    def _failed(self, error: CudaError | CopyError) -> str:
        self._retry_s = time.monotonic() + RETRY_S
        pinned_gb, wanted_gb = self.pinned_bytes / GB_BYTES, self._num_bytes / GB_BYTES
        advice = MEMLOCK if isinstance(error, CudaError) else ""
        self.failure = failure = (
            f"only {pinned_gb:.2f} of {wanted_gb:.2f} GB of L1 could be pinned ({error}): copies between "
            f"GPUs and the part that is not pinned fail{advice}"
        )
        if str(error) != self._logged:
            self._logged = str(error)
            logger.error("%s", failure)
        return failure
