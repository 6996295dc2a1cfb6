"""Which pieces a copy engine of a GPU moves and which the copy kernel, and in what batches.

A copy engine moves a large piece at the speed of the bus and takes nothing from the engine's compute, but
pays for every piece; the kernel moves many small ones at once, on multiprocessors that the engine would use.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from lmcache_kernels.page_copy import MAX_PIECES
from lmcache_server.transfer.plan import U64, Pieces, cut

SMALL_BYTES = 28 << 10
"""Shorter pieces are small. Not measured here; see docs/gpu.md for where the figure is from."""
MIN_KERNEL_PIECES = 16
"""Fewer small pieces are not worth a launch."""


NO_BORDERS: U64 = np.zeros(0, np.uint64)


class Batch(NamedTuple):
    """What one call moves: one launch of the kernel or one batch of a copy engine."""

    by_kernel: bool
    pieces: Pieces


def batches(
    whole: Pieces,
    *,
    borders: U64 = NO_BORDERS,
    kernel: bool = True,
    small_bytes: int = SMALL_BYTES,
    max_batch_pieces: int = MAX_PIECES,
) -> Iterator[Batch]:
    """Every byte of `whole` in exactly one batch, of the copy engine alone where there is no `kernel`; no
    piece over one of `borders`, addresses in L1. Batches may run in any order, or at the same time."""
    joined = Pieces(*cut(*_joined(whole), borders))
    small = joined.length < np.uint64(small_bytes)
    if not kernel or np.count_nonzero(small) < MIN_KERNEL_PIECES:
        small[:] = False
    for by_kernel in (False, True):
        chosen = Pieces(*(array[small == by_kernel] for array in joined))
        for first in range(0, len(chosen.length), max_batch_pieces):
            yield Batch(by_kernel, Pieces(*(array[first : first + max_batch_pieces] for array in chosen)))


def _joined(whole: Pieces) -> Pieces:
    """The same bytes, each run of pieces that follow each other on both sides as one piece."""
    local, remote, length = whole
    if not len(length):
        return whole
    fresh = np.ones(len(length), dtype=bool)
    fresh[1:] = (local[1:] != local[:-1] + length[:-1]) | (remote[1:] != remote[:-1] + length[:-1])
    first = np.flatnonzero(fresh)
    return Pieces(local[first], remote[first], np.add.reduceat(length, first))
