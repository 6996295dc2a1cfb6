"""Launches page_copy.cu, a kernel that copies a list of pieces in stream order.

cupy only provides the compiler, NVRTC; the driver loads and launches the kernel.
"""

import ctypes
import functools
import mmap
from pathlib import Path

import numpy as np

from lmcache_kernels.driver import CudaError, Driver, Numbers

SOURCE = Path(__file__).with_suffix(".cu")
TILE_BYTES = 4096
"""The bytes that 32 threads copy at a time."""
THREADS = 512
"""The threads of a block. With four loads of 16 bytes per thread, 32 KiB are in flight."""
BLOCKS = 8
"""The blocks of a launch, which occupy at most this many of the engine's multiprocessors."""
MAX_PIECES = 8192
"""The limit for one launch."""

_MAX_ITEMS = 1 << 31
_ROW_BYTES = 24
_TABLES = 4
"""How many launches may be in flight."""

CUPY = {12: "'cupy-cuda12x>=13.6' nvidia-cuda-nvrtc-cu12", 13: "'cupy-cuda13x>=13.6' 'nvidia-cuda-nvrtc>=13'"}
"""What the optional dependencies cuda12 and cuda13 install."""


class KernelError(Exception):
    """There is no kernel for this device; the message says what to install."""


@functools.cache
def compiled(architecture: str) -> bytes:
    """Compiles the kernel for compute capability `architecture` (such as "90"). Raises KernelError."""
    try:
        from cupy.cuda import nvrtc
    except ImportError as error:
        raise KernelError(
            f"small pages are copied by the copy engine; for a faster kernel, run pip install {CUPY[13]}, "
            f"or {CUPY[12]} with a driver before 580"
        ) from error
    try:
        program = nvrtc.createProgram(SOURCE.read_text(), SOURCE.name, (), ())
        nvrtc.compileProgram(program, (f"--gpu-architecture=sm_{architecture}", "--std=c++17"))
        image: bytes = nvrtc.getCUBIN(program)
    except Exception as error:  # cupy does not export its exception types
        reason = f"cupy's NVRTC did not compile the copy kernel for sm_{architecture}: {error}"
        raise KernelError(reason) from error
    return image


class PageCopy:
    """The kernel and the tables of its launches, for one thread in which the kernel's context is current."""

    def __init__(self, driver: Driver, function: int) -> None:
        """`function` is `page_copy` of the compiled module. Raises CudaError."""
        self._driver = driver
        self._function = function
        size_bytes = _TABLES * MAX_PIECES * _ROW_BYTES
        # Whole pages of its own, so that no other registration overlaps them.
        self._host = np.frombuffer(mmap.mmap(-1, size_bytes), np.uint64).reshape(_TABLES, MAX_PIECES, 3)
        self._next = 0
        self._device = driver.allocate(size_bytes)
        try:
            driver.register_host(self._host.ctypes.data, size_bytes)
        except CudaError:
            driver.free(self._device)
            raise
        self._events = [driver.create_event() for _ in range(_TABLES)]

    def launch(self, source: Numbers, destination: Numbers, length: Numbers, stream: int) -> None:
        """Enqueues copies of `length[i]` bytes from `source[i]` to `destination[i]`, for at most MAX_PIECES.

        The addresses are the device's, of its own memory or of pinned host memory. The arrays may change when
        this returns. Raises ValueError or CudaError.
        """
        if not len(length):
            return
        table, tiles = arguments(source, destination, length)
        slot, self._next = self._next, (self._next + 1) % _TABLES
        event = self._events[slot]
        # This returns at once for an event that was never recorded.
        self._driver.wait_for(event)
        self._host[slot, : len(table)] = table
        at = slot * MAX_PIECES * _ROW_BYTES
        on_device = self._device + at
        self._driver.copy(on_device, self._host.ctypes.data + at, table.nbytes, stream)
        values = ctypes.c_ulonglong(on_device), *map(ctypes.c_uint, (len(table), tiles, TILE_BYTES))
        self._driver.launch(self._function, BLOCKS, THREADS, stream, *values)
        self._driver.record(event, stream)

    def close(self) -> None:
        """Frees the tables. No launch may be in flight. Raises CudaError."""
        for event in self._events:
            self._driver.destroy_event(event)
        self._driver.unregister_host(self._host.ctypes.data)
        self._driver.free(self._device)


def arguments(
    source: Numbers, destination: Numbers, length: Numbers, tile_bytes: int = TILE_BYTES
) -> tuple[Numbers, int]:
    """The kernel's table with one row per piece, and the number of tiles of the longest piece.

    Raises ValueError if this is too much work for one launch.
    """
    tiles = -(-int(length.max()) // tile_bytes)
    if len(length) * tiles > _MAX_ITEMS:
        raise ValueError(
            f"{len(length)} pieces of up to {int(length.max())} bytes are too many for one launch: copy fewer"
        )
    return np.ascontiguousarray(np.stack((source, destination, length), axis=1)), tiles
