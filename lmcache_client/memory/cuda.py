"""The client's half of copies between a GPU and L1: memory handles, and when a copy may begin."""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator

from lmcache_client.contract.geometry import Geometry
from lmcache_client.contract.messages import Memory
from lmcache_kernels import driver as cuda
from lmcache_kernels.driver import CudaError, Driver


class ExportError(Exception):
    """This memory cannot be exported to another process; the message says what to change."""


def check_proof_places(geometry: Geometry, num_buffers: int) -> None:
    """Raises ExportError unless each buffer begins with a page of the null block. The content of that page is
    meaningless, so the server's nonce can go there."""
    starts = {(region.buffer, region.offset) for group in geometry.groups for region in group.regions}
    if any((buffer, 0) not in starts for buffer in range(num_buffers)):
        raise ExportError("KV cache memory that does not begin with a page of the null block")


class CudaExport:
    """KV cache memory of this process on one GPU.

    `buffers` are (address, bytes); the first bytes of each belong to the null block, whose content is
    meaningless. `current_stream` returns the CUstream on which the engine computes. The engine's context must
    be current in the thread that creates this. Raises ExportError.
    """

    def __init__(self, buffers: tuple[tuple[int, int], ...], current_stream: Callable[[], int]) -> None:
        driver = cuda.load()
        if driver is None:
            raise ExportError("no CUDA driver that this process can use")
        try:
            self._context = driver.current_context()
            ordinals = {driver.ordinal_of(address) for address, _ in buffers}
            if len(ordinals) != 1:
                raise ExportError("KV cache memory on more than one GPU in one worker")
            self._device = driver.uuid(ordinals.pop())
            exported = [_exported(driver, address) for address, _ in buffers]
        except CudaError as error:
            raise ExportError(f"KV cache memory that CUDA does not share ({error})") from error
        self._handles = tuple(handle for handle, _ in exported)
        self._ranges = tuple((offset, size) for (_, offset), (_, size) in zip(exported, buffers, strict=True))
        self._addresses = [address for address, _ in buffers]
        self._driver = driver
        self._fence = _Fence(driver, self._context, current_stream)

    def memory(self, pid: int) -> Memory:
        return Memory(pid, self._ranges, 0, self._device, self._handles)

    @contextlib.contextmanager
    def proving(self, nonce: bytes) -> Iterator[None]:
        """Keeps the nonce in the first bytes of every buffer while the context is open. For any thread."""
        self._driver.enter(self._context)
        before = [self._driver.read(address, len(nonce)) for address in self._addresses]
        try:
            for address in self._addresses:
                self._driver.write(address, nonce)
            yield
        finally:
            for address, content in zip(self._addresses, before, strict=True):
                self._driver.write(address, content)

    def after_compute(self, function: Callable[[], None]) -> None:
        """Calls `function`, in another thread, once the GPU has computed everything that the engine has
        submitted so far, with all its reads and writes."""
        self._fence.after(function)

    @property
    def failure(self) -> str:
        """Why the functions that still wait will never be called; empty while `after_compute` works."""
        return self._fence.failure

    def close(self) -> None:
        """Drops the functions that still wait."""
        self._fence.close()


def _exported(driver: Driver, address: int) -> tuple[bytes, int]:
    """(the handle of the allocation that contains `address`, the offset of `address` in it)."""
    if not driver.has_ipc_handle(address):
        raise ExportError(
            "KV cache memory from CUDA's virtual memory or pool allocator, which no other process can open: "
            "start vLLM without --enable-sleep-mode, and without expandable_segments or cudaMallocAsync in "
            "PYTORCH_CUDA_ALLOC_CONF"
        )
    base, _ = driver.allocation(address)
    return driver.ipc_handle(base), address - base


class _Fence:
    """Waits for points in a stream, in a thread of its own. The GPU never waits for another process, so the
    death of a process cannot stall it. After a failure, the thread calls nothing more. It sets `failure`
    last."""

    def __init__(self, driver: Driver, context: int, current_stream: Callable[[], int]) -> None:
        self._driver = driver
        self._context = context
        self._current_stream = current_stream
        self._free: list[int] = []
        self._waiting: queue.SimpleQueue[tuple[int | CudaError, Callable[[], None]] | None]
        self._waiting = queue.SimpleQueue()
        self.failure = ""
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="lmcache-fence", daemon=True)
        self._thread.start()

    def after(self, function: Callable[[], None]) -> None:
        point: int | CudaError
        try:
            point = self._free.pop() if self._free else self._driver.create_event()
            self._driver.record(point, self._current_stream())
        except CudaError as error:  # for the thread, which has earlier functions to call
            point = error
        self._waiting.put((point, function))

    def close(self) -> None:
        self._closed = True
        self._waiting.put(None)
        self._thread.join()

    def _work(self) -> None:
        try:
            self._driver.enter(self._context)
            while (item := self._waiting.get()) is not None and not self._closed:
                point, function = item
                if isinstance(point, CudaError):
                    raise point
                self._driver.wait_for(point)
                self._free.append(point)
                function()
        except Exception as error:  # whatever it is, the worker must hear of it
            self.failure = f"waiting for the GPU failed: {error}"
