"""Copies between pinned L1 and another process's memory on a GPU, which is mapped through its IPC handle."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from lmcache_client.contract.messages import NONCE_BYTES, Memory
from lmcache_kernels.driver import CudaError
from lmcache_kernels.page_copy import PageCopy
from lmcache_server.transfer.base import CopyError, NoAccessError
from lmcache_server.transfer.gpus import Gpu, Gpus, LostGpuError
from lmcache_server.transfer.paths import batches
from lmcache_server.transfer.pins import Pins
from lmcache_server.transfer.plan import Pieces

logger = logging.getLogger(__name__)


@dataclass
class _Lane:
    """One direction: a stream and two events, each free or recorded behind one of the last two slices."""

    stream: int
    events: list[int]
    waiting: list[int] = field(default_factory=list)


class CudaMapping:
    """The GPU memory of one worker; see `transfer.base.Mapping`. Each direction has up to two slices in
    flight, so that the bus does not wait for Python."""

    def __init__(self, memory: Memory, gpus: Gpus, pins: Pins) -> None:
        self.bases: list[int] = []
        self._memory = memory
        self._gpus = gpus
        self._pins = pins
        self._gpu: Gpu | None = None
        self._opened: dict[bytes, int] = {}
        self._lanes: dict[bool, _Lane] = {}
        self._kernel: PageCopy | None = None

    @property
    def lost(self) -> bool:
        return self._gpu is not None and bool(self._gpu.lost)

    def open(self) -> list[bytes]:
        """As in Mapping. Even if it raises, `close` must follow."""
        memory = self._memory
        try:
            gpu = self._gpu = self._gpus.find(memory.device)
            if gpu.lost:
                raise NoAccessError(gpu.lost)
            driver = gpu.driver
            gpu.enter()
            for handle in memory.handles:
                if handle not in self._opened:
                    self._opened[handle] = driver.open_handle(handle)
            self.bases = [
                self._opened[handle] + start
                for handle, (start, _) in zip(memory.handles, memory.buffers, strict=True)
            ]
            for base, (start, size) in zip(self.bases, memory.buffers, strict=True):
                first, num_bytes = driver.allocation(base - start)
                if base < first or base + size > first + num_bytes:
                    raise CopyError("a buffer reaches beyond the allocation of its handle")
            for load in (True, False):
                events = [driver.create_event() for _ in range(2)]
                self._lanes[load] = _Lane(driver.create_stream(), events)
            if function := gpu.kernel():
                self._kernel = PageCopy(driver, function)
            return [driver.read(base, NONCE_BYTES) for base in self.bases]
        except CudaError as error:
            raise NoAccessError(
                f"the server cannot open the worker's GPU memory ({error}): both need the same user and, in "
                "containers, a shared process namespace (--pid=host)"
            ) from error

    def copy(self, pieces: Pieces, *, load: bool) -> None:
        """Enqueues a slice, then waits for the one before it."""
        assert self._gpu is not None
        gpu, lane = self._gpu, self._lanes[load]
        if gpu.lost:
            raise LostGpuError(gpu.lost)
        self._pins.ensure(pieces)
        try:
            gpu.enter()
            for batch in batches(pieces, borders=self._pins.borders, kernel=self._kernel is not None):
                local, remote, length = batch.pieces
                ends = (remote, local) if load else (local, remote)
                if batch.by_kernel and self._kernel is not None:
                    self._kernel.launch(ends[1], ends[0], length, lane.stream)
                else:
                    gpu.driver.copy_batch(*ends, length, lane.stream)
            gpu.driver.record(lane.events[-1], lane.stream)
            lane.waiting.append(lane.events.pop())
            if not lane.events:
                gpu.driver.wait_for(lane.waiting[0])
                lane.events.append(lane.waiting.pop(0))
        except CudaError as error:
            raise gpu.check(error, lane.stream) from error

    def finish(self, *, load: bool) -> None:
        """Waits until every slice of this direction has been copied."""
        assert self._gpu is not None
        lane = self._lanes[load]
        try:
            # A copy that failed to pin has left another context current.
            self._gpu.enter()
            self._gpu.driver.synchronize(lane.stream)
        except CudaError as error:
            raise self._gpu.check(error, lane.stream) from error
        lane.events += lane.waiting
        lane.waiting.clear()

    def close(self) -> None:
        """Waits for all copies and unmaps the worker's memory."""
        if self._gpu is None:
            return
        gpu = self._gpu
        steps: list[Callable[[], object]] = [gpu.enter]
        for lane in self._lanes.values():
            steps.append(partial(gpu.driver.synchronize, lane.stream))
            steps.append(partial(gpu.driver.destroy_stream, lane.stream))
            steps += [partial(gpu.driver.destroy_event, event) for event in lane.events + lane.waiting]
        if self._kernel is not None:
            steps.append(self._kernel.close)
        steps += [partial(gpu.driver.close_handle, address) for address in self._opened.values()]
        for step in steps:
            _attempt(step, gpu)


def _attempt(step: Callable[[], object], gpu: Gpu) -> None:
    """Runs one step of closing; if it fails, the others must still run."""
    try:
        step()
    except CudaError as error:
        if not gpu.lost:
            logger.warning(
                "a worker's memory on %(gpu)s was not given back cleanly: %(reason)s",
                {"gpu": gpu.name, "reason": str(error)},
            )
