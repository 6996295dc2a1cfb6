"""How a worker shares the KV cache memory of its GPU with the server, and proves that it is its own."""

import contextlib
import os
from collections.abc import Callable, Iterator

from lmcache_client.contract.geometry import Geometry
from lmcache_client.contract.messages import Memory
from lmcache_client.memory.after_compute import Fence
from lmcache_client.memory.lending import Lender
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
    be current in the thread that creates this. `is_fixed` promises that the memory at these addresses stays
    the same until `close`: the virtual memory API can replace it. Raises ExportError.
    """

    def __init__(
        self, buffers: tuple[tuple[int, int], ...], current_stream: Callable[[], int], is_fixed: bool = True
    ) -> None:
        driver = cuda.load()
        if driver is None:
            raise ExportError("no CUDA driver that this process can use")
        try:
            self._context = driver.current_context()
            ordinals = {driver.ordinal_of(address) for address, _ in buffers}
            if len(ordinals) != 1:
                raise ExportError("KV cache memory on more than one GPU in one worker")
            self._device = driver.uuid(ordinals.pop())
            # The allocator may still be clearing the memory on a stream of its own, and so over the nonce.
            driver.synchronize(current_stream())
            self._stream = driver.create_stream()
            self._shared = _Shared(driver, buffers, is_fixed)
        except CudaError as error:
            raise ExportError(f"KV cache memory that CUDA does not share ({error})") from error
        self._driver, self._addresses = driver, [address for address, _ in buffers]
        self._fence = Fence(driver, self._context, current_stream)

    def memory(self, pid: int) -> Memory:
        shared = self._shared
        shared.lend()
        return Memory(pid, tuple(shared.ranges), 0, self._device, tuple(shared.handles), tuple(shared.lent))

    @contextlib.contextmanager
    def proving(self, nonce: bytes) -> Iterator[None]:
        """Keeps the nonce in the first bytes of every buffer while the context is open. For any thread."""
        self._driver.enter(self._context)
        before = [self._driver.read(address, len(nonce), self._stream) for address in self._addresses]
        try:
            for address in self._addresses:
                self._driver.write(address, nonce, self._stream)
            yield
        finally:
            for address, content in zip(self._addresses, before, strict=True):
                self._driver.write(address, content, self._stream)

    def take_back(self) -> None:
        """Does nothing: the bytes where the proof was are pages."""

    def after_compute(self, function: Callable[[], None]) -> None:
        """Calls `function`, in another thread, once the GPU has computed everything that the engine has
        submitted so far, with all its reads and writes."""
        self._fence.after(function)

    @property
    def failure(self) -> str:
        """Why the functions that still wait will never be called; empty while `after_compute` works."""
        return self._fence.failure

    def close(self) -> None:
        """Drops the functions that still wait. The memory can be freed once the server has unmapped it. Close
        the channel first: nobody may prove the memory any more."""
        self._fence.close()
        self._shared.close()
        stream, self._stream = self._stream, 0
        with contextlib.suppress(CudaError):  # at the end of a process, the driver may have ended
            if stream:
                self._driver.destroy_stream(stream)


NO_HANDLE = (
    "KV cache memory from CUDA's virtual memory or pool allocator, which no other process can open: start "
    "vLLM without expandable_segments or cudaMallocAsync in PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF, "
    "and without --enable-sleep-mode and --enable-cumem-allocator"
)


class _Shared:
    """What another process opens the memory by: for each buffer a legacy handle or, for memory of the virtual
    memory API, a file descriptor of this process. The descriptors keep the memory until `close`."""

    def __init__(self, driver: Driver, buffers: tuple[tuple[int, int], ...], is_fixed: bool) -> None:
        self.handles, self.ranges, self.lent = list[bytes](), list[tuple[int, int]](), list[tuple[int, int]]()
        self._by_base: dict[int, tuple[int, int]] = {}
        self._lender: Lender | None = None
        try:
            if all(driver.has_ipc_handle(address) for address, _ in buffers):
                for address, size in buffers:
                    base, _ = driver.allocation(address)
                    self.handles.append(driver.ipc_handle(base))
                    self.ranges.append((address - base, size))
            elif is_fixed:
                for address, size in buffers:
                    self._export(driver, address, size)
                self._lender = Lender({descriptor for descriptor, _ in self.lent})
            else:
                raise ExportError(f"{NO_HANDLE}. vLLM 0.33 and newer can share memory of the last two")
        except Exception:
            self.close()
            raise

    def _export(self, driver: Driver, address: int, size: int) -> None:
        base, num_bytes = driver.allocation(address)
        try:
            if base not in self._by_base:
                self._by_base[base] = driver.export_descriptor(base), num_bytes
        except CudaError as error:
            raise ExportError(f"{NO_HANDLE} ({error})") from error
        if address + size > base + num_bytes:
            raise ExportError(NO_HANDLE)  # expandable segments consist of many allocations
        self.lent.append(self._by_base[base])
        self.ranges.append((address - base, size))

    def lend(self) -> None:
        if self._lender is not None:
            self._lender.listen()

    def close(self) -> None:
        if self._lender is not None:
            self._lender.close()
        while self._by_base:
            _, (descriptor, _) = self._by_base.popitem()
            os.close(descriptor)
