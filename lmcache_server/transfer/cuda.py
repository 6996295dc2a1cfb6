"""Copies between pinned L1 and another process's memory on a GPU, which is mapped by its handles."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, NamedTuple

import numpy as np

from lmcache_client.contract.messages import NONCE_BYTES, Memory
from lmcache_kernels.driver import CudaError, Driver
from lmcache_kernels.page_copy import MAX_PIECES, PageCopy
from lmcache_server.transfer.base import CopyError, HandleError, NoAccessError
from lmcache_server.transfer.gpus import Gpu, Gpus, LostGpuError
from lmcache_server.transfer.lent import lent
from lmcache_server.transfer.locked_memory import LockedMemory
from lmcache_server.transfer.plan import Pieces, adjacent, first_of_later_slices, merged, slices

logger = logging.getLogger(__name__)

REMEDIES = {
    2: "its context on that GPU needs memory: lower vLLM's --gpu-memory-utilization",
    46: "its compute mode allows one process only: run 'nvidia-smi -c 0' on the host, or use MPS",
}
"""What to do about errors of CUDA (CUresult) whose cause is not the handle: no memory, device unavailable."""
SMALL_BYTES = 28 << 10
"""Shorter pieces count as small. docs/gpu.md says where the figure comes from."""
MIN_KERNEL_PIECES = 32
"""Fewer small pieces are not worth a launch of the kernel: on an H200, 16 were not, and 64 were."""


@dataclass
class _Lane:
    """One direction: a stream and two events, each free or recorded behind one of the last two slices."""

    stream: int
    events: list[int]
    waiting: list[int] = field(default_factory=list)
    num_begun: int = 0

    @property
    def num_ended(self) -> int:
        return self.num_begun - len(self.waiting)


class CudaMapping:
    """The GPU memory of one worker; see `transfer.base.Mapping`. Each direction has a thread, a stream and up
    to two slices in flight: the bus does not wait for Python."""

    lanes = ((True,), (False,))
    # Between two slices of stores come the few bytes that the engine itself copies to the host in each step.
    _slice_bytes: ClassVar = {True: 32 << 20, False: 8 << 20}

    def __init__(self, memory: Memory, gpus: Gpus, locked: LockedMemory) -> None:
        self.bases: list[int] = []
        self._memory = memory
        self._gpus = gpus
        self._locked = locked
        self._gpu: Gpu | None = None
        self._opened: dict[bytes | tuple[int, int], int] = {}
        """By handle, or by descriptor and bytes, where the allocation is mapped."""
        self._lanes: dict[bool, _Lane] = {}
        self._kernel: PageCopy | None = None

    @property
    def lost(self) -> bool:
        return self._gpu is not None and bool(self._gpu.lost)

    @property
    def may_pin(self) -> bool:
        return not self._locked.is_complete

    def open(self) -> list[bytes]:
        """As in Mapping. Even if it raises, `close` must follow."""
        memory = self._memory
        try:
            gpu = self._gpu = self._gpus.find(memory.device)
            if gpu.lost:
                raise NoAccessError(gpu.lost)
            driver = gpu.driver
            gpu.enter()
            gpu.stay_near()
            shared: tuple[bytes | tuple[int, int], ...] = memory.handles or memory.descriptors
            for handle in shared:
                if handle not in self._opened:
                    self._opened[handle] = self._opened_by(handle, gpu)
            for handle, (start, size) in zip(shared, memory.buffers, strict=True):
                self.bases.append(self._opened[handle] + start)
                _check_range(driver, self.bases[-1], start, size)
            for load in (True, False):
                events = [driver.create_event() for _ in range(2)]
                self._lanes[load] = _Lane(driver.create_stream(), events)
            if function := gpu.kernel():
                self._kernel = PageCopy(driver, function)
            return [driver.read(base, NONCE_BYTES) for base in self.bases]
        except CudaError as error:
            remedy = REMEDIES.get(error.code, "'nvidia-smi' and the kernel's log may say more")
            raise NoAccessError(f"the server cannot use the worker's GPU ({error}): {remedy}") from error

    def _opened_by(self, handle: bytes | tuple[int, int], gpu: Gpu) -> int:
        """The address of the allocation that this handle, or descriptor and bytes, stands for."""
        if isinstance(handle, bytes):
            try:
                return gpu.driver.open_handle(handle)
            except CudaError as error:
                if error.code in REMEDIES:
                    raise
                raise HandleError(f"the server cannot open the worker's GPU memory ({error})") from error
        descriptor, num_bytes = handle
        with lent(self._memory.pid, descriptor) as own:
            return gpu.driver.map_descriptor(own, num_bytes, gpu.ordinal)

    def copies(self, whole: Pieces, *, load: bool) -> Iterator[tuple[int, Callable[[], object]]]:
        """As in Mapping. All copy threads share one interpreter, so what a slice costs here is kept small."""
        assert self._gpu is not None
        gpu, lane, slice_bytes = self._gpu, self._lanes[load], self._slice_bytes[load]
        if gpu.lost:
            raise LostGpuError(gpu.lost)
        try:
            pieces = self._locked.ensure(joined(whole, slice_bytes))
        finally:
            # To pin, this thread may have entered another GPU's context.
            self._enter(load)
        ends = (pieces.remote, pieces.local) if load else (pieces.local, pieces.remote)
        batch = gpu.driver.batch(*ends, pieces.length, in_order=not load)
        for first, last, num_bytes in slices(pieces.length, slice_bytes):
            enqueue = partial(batch, first, last, lane.stream)
            if load and self._kernel is not None:
                part = Pieces(*(array[first:last] for array in pieces))
                enqueue = partial(_load_with, gpu.driver, self._kernel, part, lane.stream)
            yield num_bytes, partial(self._begin, enqueue, load)

    def _begin(self, enqueue: Callable[[], object], load: bool) -> None:
        """Enqueues a slice, then waits for the one before it."""
        assert self._gpu is not None
        gpu, lane = self._gpu, self._lanes[load]
        if gpu.lost:
            raise LostGpuError(gpu.lost)
        try:
            enqueue()
            gpu.driver.record(lane.events[-1], lane.stream)
        except Exception as error:
            # This also waits for what has been enqueued and no event stands for.
            raise gpu.check(error, lane.stream) from error
        lane.waiting.append(lane.events.pop())
        lane.num_begun += 1
        if not lane.events:
            self._finish(lane.num_ended + 1, load)

    def _enter(self, load: bool) -> None:
        assert self._gpu is not None
        try:
            self._gpu.enter()
        except CudaError as error:
            raise self._gpu.check(error, self._lanes[load].stream) from error

    def begun(self, *, load: bool) -> Callable[[], object]:
        return partial(self._finish, self._lanes[load].num_begun, load)

    def _finish(self, count: int, load: bool) -> None:
        """Waits until the first `count` slices of this direction have been copied."""
        assert self._gpu is not None
        lane = self._lanes[load]
        while lane.num_ended < count:
            event = lane.waiting.pop(0)
            lane.events.append(event)
            try:
                self._gpu.driver.wait_for(event)
            except CudaError as error:
                raise self._gpu.check(error, lane.stream) from error

    def close(self) -> None:
        """Waits for all copies and unmaps the worker's memory."""
        if (gpu := self._gpu) is None:
            return
        steps: list[Callable[[], object]] = [gpu.enter]
        for lane in self._lanes.values():
            steps.append(partial(gpu.driver.synchronize, lane.stream))
            steps.append(partial(gpu.driver.destroy_stream, lane.stream))
            steps += [partial(gpu.driver.destroy_event, event) for event in lane.events + lane.waiting]
        if self._kernel is not None:
            steps.append(self._kernel.close)
        for handle, address in self._opened.items():
            if isinstance(handle, bytes):
                steps.append(partial(gpu.driver.close_handle, address))
            else:
                steps.append(partial(gpu.driver.unmap, address, handle[1]))
        for step in steps:
            _attempt(step, gpu)


def _load_with(driver: Driver, kernel: PageCopy, part: Pieces, stream: int) -> None:
    for by_kernel, (local, remote, length) in batches(part):
        if by_kernel:
            kernel.launch(local, remote, length, stream)
        else:
            driver.batch(remote, local, length, in_order=False)(0, len(length), stream)


class Batch(NamedTuple):
    """The pieces of one call: one launch of the kernel or one batch of a copy engine."""

    by_kernel: bool
    pieces: Pieces


def joined(whole: Pieces, slice_bytes: int) -> Pieces:
    """The same bytes in as few pieces as possible, none of which is joined with one of another slice."""
    goes_on = adjacent(whole.remote, whole.length)
    if not goes_on.any():
        return whole
    goes_on &= adjacent(whole.local, whole.length)
    goes_on[first_of_later_slices(np.cumsum(whole.length), slice_bytes) - 1] = False
    length, local, remote = merged(goes_on, whole.length, whole.local, whole.remote)
    return Pieces(local, remote, length)


def batches(
    whole: Pieces, *, small_bytes: int = SMALL_BYTES, max_batch_pieces: int = MAX_PIECES
) -> Iterator[Batch]:
    """Splits joined pieces into batches that may run in any order or at the same time.

    A copy engine moves large pieces at the speed of the bus and takes no compute from vLLM, but each piece
    has a fixed cost. The kernel moves many small pieces at once, on multiprocessors that vLLM would use.
    """
    small = whole.length < np.uint64(small_bytes)
    if np.count_nonzero(small) < MIN_KERNEL_PIECES:
        small[:] = False
    for by_kernel in (False, True):
        chosen = Pieces(*(array[small == by_kernel] for array in whole))
        for first in range(0, len(chosen.length), max_batch_pieces):
            yield Batch(by_kernel, Pieces(*(array[first : first + max_batch_pieces] for array in chosen)))


def _check_range(driver: Driver, base: int, start: int, size: int) -> None:
    """Raises CopyError unless the `size` bytes at `base`, which is `start` bytes into its handle's
    allocation, lie in that allocation."""
    first = base - start
    try:
        begins, num_bytes = driver.allocation(first)
        is_inside = base + size <= begins + num_bytes
    except CudaError as error:
        # Nobody else is known to ask this about another process's memory, so a driver may refuse to answer.
        logger.debug("the range of a worker's memory is not known: %(reason)s", {"reason": str(error)})
        is_inside = driver.buffer_id(first) == driver.buffer_id(base + size - 1)
    if not is_inside:
        raise CopyError("a buffer reaches beyond the allocation of its handle")


def _attempt(step: Callable[[], object], gpu: Gpu) -> None:
    """Runs one step of closing; if it fails, the others must still run."""
    try:
        step()
    except CudaError as error:
        if not gpu.lost:
            values = {"gpu": gpu.name, "reason": str(error)}
            logger.warning("a worker's memory on %(gpu)s was not given back cleanly: %(reason)s", values)
