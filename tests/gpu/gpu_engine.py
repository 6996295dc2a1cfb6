"""An engine without vLLM whose pages are on a GPU, laid out as vLLM lays them out."""

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from harness.rawclient import RawEngine
from numpy.typing import NDArray

from lmcache_client.contract.geometry import GroupSpec, Region
from lmcache_client.memory.cuda import CudaExport
from lmcache_kernels import driver as cuda
from lmcache_kernels.driver import Driver

BLOCK_SIZE = 16
OFFSET = 3 << 20


class Layout(NamedTuple):
    """Groups whose regions are places in one buffer of `num_bytes`."""

    groups: tuple[GroupSpec, ...]
    num_bytes: int


def _group(regions: Sequence[Region], kind: str = "full", window: int = 0) -> GroupSpec:
    return GroupSpec(kind, BLOCK_SIZE, window, "test", tuple(regions))


def planes(page_bytes: int, num_blocks: int, layers: int = 2) -> Layout:
    """Keys and values of each layer in planes of their own: two pieces a layer and block."""
    size = num_blocks * page_bytes
    regions = [Region(0, index * size, page_bytes, page_bytes) for index in range(2 * layers)]
    return Layout((_group(regions),), 2 * layers * size)


def fused(page_bytes: int, num_blocks: int, layers: int = 4) -> Layout:
    """One page a layer and block."""
    size = num_blocks * page_bytes
    regions = [Region(0, index * size, page_bytes, page_bytes) for index in range(layers)]
    return Layout((_group(regions),), layers * size)


def cross_layer(page_bytes: int, num_blocks: int, layers: int = 4) -> Layout:
    """A block of all layers is one piece, as the connector describes the layout that it asks for."""
    whole = layers * page_bytes
    return Layout((_group([Region(0, 0, whole, whole)]),), num_blocks * whole)


def padded(page_bytes: int, num_blocks: int, layers: int = 4) -> Layout:
    """Pages of a recurrent group, which mean something for 5/8 of the place they take."""
    stride, used = page_bytes, page_bytes * 5 // 8
    size = num_blocks * stride
    regions = [Region(0, index * size, stride, used) for index in range(layers)]
    return Layout((_group(regions, "recurrent"),), layers * size)


def aliased(page_bytes: int, num_blocks: int, layers: int = 4) -> Layout:
    """Groups over one tensor: attention, a sliding window and a recurrent state in the same places."""
    full, size = fused(page_bytes, num_blocks, layers)
    regions = full[0].regions
    shorter = [Region(0, each.offset, each.stride_bytes, page_bytes * 3 // 4) for each in regions]
    return Layout((*full, _group(regions, "sliding_window", 40), _group(shorter, "recurrent")), size)


LAYOUTS: tuple[Callable[..., Layout], ...] = (planes, fused, cross_layer, padded, aliased)


def allocate(num_bytes: int) -> tuple[int, object]:
    """(address, what keeps it): a tensor of torch where torch has a GPU, else memory of the driver."""
    try:
        import torch
    except ImportError:
        pass
    else:
        if torch.cuda.is_available():
            tensor = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")
            torch.cuda.synchronize()
            return tensor.data_ptr(), tensor
    driver = loaded()
    address = driver.allocate(num_bytes)
    step = 64 << 20
    for start in range(0, num_bytes, step):
        driver.write(address + start, bytes(min(step, num_bytes - start)))
    return address, None


def loaded() -> Driver:
    """The driver, with a context current on this thread."""
    driver = cuda.load()
    assert driver is not None, "these tests need a GPU"
    if not driver.current_context():
        driver.enter(driver.retain_context(0))
    return driver


def memset(driver: Driver, address: int, value: int, num_bytes: int, stream: int) -> None:
    """Enqueue what computes: bytes that change in the order of a stream."""
    function = driver._library.cuMemsetD8Async
    function.argtypes = (ctypes.c_ulonglong, ctypes.c_ubyte, ctypes.c_size_t, ctypes.c_void_p)
    code = function(address, value, num_bytes, stream)
    assert code == 0, f"cuMemsetD8Async: {code}"


class GpuEngine(RawEngine):
    """`stream` is where the engine computes."""

    def __init__(
        self,
        address: str,
        layout: Layout,
        num_blocks: int,
        engine_id: str = "engine",
        allocate: Callable[[int], tuple[int, object]] = allocate,
    ) -> None:
        self.driver = loaded()
        # Inside a larger allocation, as torch gives it.
        self._allocation, self._keeper = allocate(OFFSET + layout.num_bytes)
        self.address = self._allocation + OFFSET
        self.stream = self.driver.create_stream()
        self._num_bytes = layout.num_bytes
        super().__init__(address, layout.groups, num_blocks, engine_id, export=self.exported())

    def exported(self) -> CudaExport:
        return CudaExport(((self.address, self._num_bytes),), lambda: self.stream)

    def pages(self, group_index: int, block: int) -> NDArray[np.uint8]:
        return np.concatenate(
            [
                np.frombuffer(self.driver.read(self._place(region, block), region.page_bytes), np.uint8)
                for region in self.groups[group_index].regions
            ]
        )

    def fill(self, group_index: int, block: int, seed: int) -> NDArray[np.uint8]:
        generator = np.random.default_rng(seed)
        for region in self.groups[group_index].regions:
            content = generator.integers(0, 256, region.page_bytes, dtype=np.uint8).tobytes()
            self.driver.write(self._place(region, block), content)
        return self.pages(group_index, block)

    def clear(self, group_index: int, block: int) -> None:
        for region in self.groups[group_index].regions:
            self.driver.write(self._place(region, block), bytes(region.page_bytes))

    def _place(self, region: Region, block: int) -> int:
        return self.address + region.offset + block * region.stride_bytes

    def close(self) -> None:
        super().close()
        self.export.close()
        self.driver.synchronize(self.stream)
        self.driver.destroy_stream(self.stream)
        if self._keeper is None:
            self.driver.free(self._allocation)
