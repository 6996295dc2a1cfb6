"""Chooses which pieces a GPU's copy engine moves and which the copy kernel moves, and in what batches.

A copy engine moves large pieces at the speed of the bus and takes no compute from vLLM, but each piece has a
fixed cost. The kernel moves many small pieces at once, on multiprocessors that vLLM would use.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from lmcache_kernels.page_copy import MAX_PIECES
from lmcache_server.transfer.plan import Pieces, adjacent, first_of_later_slices, merged

SMALL_BYTES = 28 << 10
"""Shorter pieces count as small. docs/gpu.md says where the figure comes from."""
MIN_KERNEL_PIECES = 32
"""Fewer small pieces are not worth a launch of the kernel: on an H200, 16 were not, and 64 were."""


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
    """Splits joined pieces into batches that may run in any order or at the same time."""
    small = whole.length < np.uint64(small_bytes)
    if np.count_nonzero(small) < MIN_KERNEL_PIECES:
        small[:] = False
    for by_kernel in (False, True):
        chosen = Pieces(*(array[small == by_kernel] for array in whole))
        for first in range(0, len(chosen.length), max_batch_pieces):
            yield Batch(by_kernel, Pieces(*(array[first : first + max_batch_pieces] for array in chosen)))
