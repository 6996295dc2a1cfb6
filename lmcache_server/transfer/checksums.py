"""Checksums of the pages in L1: CRC-32, four bytes per page.

They detect damage to L1 between a store and a load: failing memory, a bug that wrote to another object's
frame, a file that somebody changed. They do not check the copies themselves.
"""

import ctypes
import zlib
from collections.abc import Sequence

import numpy as np

from lmcache_client.contract.geometry import Region
from lmcache_server.core.packed import CHECKSUM_BYTES
from lmcache_server.transfer.base import CopyError
from lmcache_server.transfer.plan import ObjectCopy, Pieces


class DamagedError(CopyError):
    """A page differs from what was stored. `part` is the position of its object in the load."""

    def __init__(self, part: int, region: int, page: int) -> None:
        super().__init__(f"the stored page of block {page} in region {region} is damaged")
        self.part = part


def checksums(pieces: Pieces, page: ObjectCopy, regions: Sequence[Region]) -> bytes:
    """The checksum of each page in `pieces`: region after region and, within a region, block after block.

    The pieces are in the order of the pages. A page that lies in several runs of frames has several pieces.
    """
    sums = []
    current = missing = 0
    sizes = iter(np.repeat([region.page_bytes for region in regions], len(page.block_ids)).tolist())
    for address, length in zip(pieces.local.tolist(), pieces.length.tolist(), strict=True):
        if not missing:
            current, missing = 0, next(sizes)
        # zlib releases the GIL for more than a few KiB.
        current = zlib.crc32((ctypes.c_char * length).from_address(address), current)
        missing -= length
        if not missing:
            sums.append(current)
    return np.array(sums, dtype="<u4").tobytes()


def check(part: int, pieces: Pieces, page: ObjectCopy, regions: Sequence[Region], stored: bytes) -> None:
    """Raises DamagedError if a page in `pieces` does not match its checksum. `stored` has the checksums of
    the whole object, or is empty if they are unknown."""
    if not stored:
        return
    if len(stored) != CHECKSUM_BYTES * len(regions) * page.num_blocks:  # from an index that is not ours
        raise DamagedError(part, 0, page.first_page)
    right = np.frombuffer(stored, dtype="<u4").reshape(len(regions), page.num_blocks)
    right = right[:, page.first_page : page.first_page + len(page.block_ids)]
    actual = np.frombuffer(checksums(pieces, page, regions), dtype="<u4").reshape(right.shape)
    if (wrong := np.argwhere(actual != right)).size:
        region, index = wrong[0].tolist()
        raise DamagedError(part, region, page.first_page + index)
