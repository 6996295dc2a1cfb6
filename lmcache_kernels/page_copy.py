"""Launches page_copy.cu: a list of pieces, copied by one kernel in stream order.

It has been compiled, and its source is tested on a CPU; it has never run on a GPU (docs/gpu.md).
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import cupy

SOURCE = Path(__file__).with_suffix(".cu")
TILE_BYTES = 4096
"""What 32 threads copy at a time."""
THREADS = 512
"""Of a block; at 16 bytes a load and four loads a thread, 32 KiB are on their way."""
BLOCKS = 8
"""At most as many multiprocessors are taken from the engine."""

_MAX_ITEMS = 1 << 31


class PageCopy:
    """The kernel on cupy's current device, compiled for it by NVRTC."""

    def __init__(self) -> None:
        """Raises ImportError, with what to install, where there is no cupy."""
        try:
            import cupy
        except ImportError as error:
            raise ImportError(
                "copies on a GPU need cupy: pip install 'lmcache-mp[cuda13]', or 'lmcache-mp[cuda12]' for a "
                "driver before 580"
            ) from error
        self._cupy: Any = cupy
        self._kernel: Any = cupy.RawModule(code=SOURCE.read_text()).get_function("page_copy")

    def launch(
        self,
        source: NDArray[np.uint64],
        destination: NDArray[np.uint64],
        length: NDArray[np.uint64],
        stream: "cupy.cuda.Stream",
        num_blocks: int = BLOCKS,
    ) -> None:
        """Enqueue the copy of `length[i]` bytes from `source[i]` to `destination[i]`, for every i.

        Addresses are those the device sees: of its own memory, or of pinned host memory. The arrays may
        change when this returns. Raises ValueError, or what cupy raises when the launch fails.
        """
        if not len(length):
            return
        table, tiles = arguments(source, destination, length)
        with stream:
            # cupy gives the table's memory to nothing but later work of this stream.
            on_device = self._cupy.asarray(table)
            plain = (np.uint32(len(table)), np.uint32(tiles), np.uint32(TILE_BYTES))
            self._kernel((num_blocks,), (THREADS,), (on_device, *plain))


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
