"""Launches page_copy.cu: a list of pieces, copied by one kernel in stream order.

cupy brings the compiler (NVRTC) and nothing else: the driver loads and launches what it made.
"""

import ctypes
import mmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lmcache_kernels.driver import CudaError, Driver

SOURCE = Path(__file__).with_suffix(".cu")
TILE_BYTES = 4096
"""What 32 threads copy at a time."""
THREADS = 512
"""Of a block; at 16 bytes a load and four loads a thread, 32 KiB are on their way."""
BLOCKS = 8
"""At most as many multiprocessors are taken from the engine."""
MAX_PIECES = 8192
"""Of one launch."""

_MAX_ITEMS = 1 << 31
_ROW_BYTES = 24
_TABLES = 4
"""Launches that may be on their way at a time."""


class KernelError(Exception):
    """There is no kernel for this device; the message says what to install."""


def compiled(architecture: str) -> bytes:
    """The kernel for compute capability `architecture` ("90"), by cupy's NVRTC. Raises KernelError."""
    try:
        from cupy.cuda import nvrtc
    except ImportError as error:
        raise KernelError(
            "small pages are copied one by one; a kernel that is faster comes with pip install "
            "'lmcache-mp[cuda13]', or 'lmcache-mp[cuda12]' for a driver before 580"
        ) from error
    try:
        program = nvrtc.createProgram(SOURCE.read_text(), SOURCE.name, (), ())
        nvrtc.compileProgram(program, (f"--gpu-architecture=sm_{architecture}", "--std=c++17"))
        image: bytes = nvrtc.getCUBIN(program)
    except Exception as error:  # cupy's own types, of which it exports none
        raise KernelError(
            f"cupy's NVRTC did not compile the copy kernel for sm_{architecture}: {error}"
        ) from error
    return image


class PageCopy:
    """The kernel and the tables of its launches, for one thread whose context is current."""

    def __init__(self, driver: Driver, function: int) -> None:
        """`function` is `page_copy` of the compiled module. Raises CudaError."""
        self._driver = driver
        self._function = function
        size_bytes = _TABLES * MAX_PIECES * _ROW_BYTES
        # Of whole pages, so that no other registration has part of them.
        self._staging = mmap.mmap(-1, size_bytes)
        self._host = np.frombuffer(self._staging, np.uint64).reshape(_TABLES, MAX_PIECES, 3)
        self._events: list[int] = []
        self._next = 0
        self._device = driver.allocate(size_bytes)
        try:
            driver.register_host(self._host.ctypes.data, size_bytes)
        except CudaError:
            driver.free(self._device)
            raise
        self._events = [driver.create_event() for _ in range(_TABLES)]

    def launch(
        self,
        source: NDArray[np.uint64],
        destination: NDArray[np.uint64],
        length: NDArray[np.uint64],
        stream: int,
        num_blocks: int = BLOCKS,
    ) -> None:
        """Enqueue the copy of `length[i]` bytes from `source[i]` to `destination[i]`, for every i; at most
        MAX_PIECES.

        Addresses are those the device sees: of its own memory, or of pinned host memory. The arrays may
        change when this returns. Raises ValueError or CudaError.
        """
        if not len(length):
            return
        table, tiles = arguments(source, destination, length)
        slot, self._next = self._next, (self._next + 1) % _TABLES
        event = self._events[slot]
        # An event that was never recorded has happened.
        self._driver.wait_for(event)
        self._host[slot, : len(table)] = table
        at = slot * MAX_PIECES * _ROW_BYTES
        on_device = self._device + at
        self._driver.copy(on_device, self._host.ctypes.data + at, table.nbytes, stream)
        plain = map(ctypes.c_uint, (len(table), tiles, TILE_BYTES))
        self._driver.launch(
            self._function, num_blocks, THREADS, stream, ctypes.c_ulonglong(on_device), *plain
        )
        self._driver.record(event, stream)

    def close(self) -> None:
        """No launch may be on its way. Raises CudaError."""
        for event in self._events:
            self._driver.destroy_event(event)
        self._driver.unregister_host(self._host.ctypes.data)
        self._driver.free(self._device)


def arguments(
    source: NDArray[np.uint64],
    destination: NDArray[np.uint64],
    length: NDArray[np.uint64],
    tile_bytes: int = TILE_BYTES,
) -> tuple[NDArray[np.uint64], int]:
    """The kernel's table of pieces, one row each, and how many tiles the longest has.

    Raises ValueError when that is too much work for one launch.
    """
    tiles = -(-int(length.max()) // tile_bytes)
    if len(length) * tiles > _MAX_ITEMS:
        raise ValueError(
            f"{len(length)} pieces of up to {int(length.max())} bytes are too many for one launch: copy fewer"
        )
    return np.ascontiguousarray(np.stack((source, destination, length), axis=1)), tiles
