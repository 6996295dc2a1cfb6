"""Chooses which pieces a GPU's copy engine moves and which the copy kernel moves, and in what batches.

A copy engine moves large pieces at the speed of the bus and takes no compute from vLLM, but each piece has a
fixed cost. The kernel moves many small pieces at once, on multiprocessors that vLLM would use.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from lmcache_kernels.page_copy import MAX_PIECES
from lmcache_server.transfer.plan import U64, Pieces, cut, merged

SMALL_BYTES = 28 << 10
"""Shorter pieces count as small. docs/gpu.md says where the figure comes from."""
MIN_KERNEL_PIECES = 32
"""Fewer small pieces are not worth a launch of the kernel: on an H200, 16 were not, and 64 were."""

NO_BORDERS: U64 = np.zeros(0, np.uint64)


class Batch(NamedTuple):
    """The pieces of one call: one launch of the kernel or one batch of a copy engine."""

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
    """Splits `whole` into batches that may run in any order or at the same time. Without `kernel` the copy
    engine gets all of them. No piece crosses one of `borders`, which are addresses in L1."""
    length, local, remote = merged(whole.length, whole.local, whole.remote)
    joined = Pieces(*cut(local, remote, length, borders))
    small = joined.length < np.uint64(small_bytes)
    if not kernel or np.count_nonzero(small) < MIN_KERNEL_PIECES:
        small[:] = False
    for by_kernel in (False, True):
        chosen = Pieces(*(array[small == by_kernel] for array in joined))
        for first in range(0, len(chosen.length), max_batch_pieces):
            yield Batch(by_kernel, Pieces(*(array[first : first + max_batch_pieces] for array in chosen)))
