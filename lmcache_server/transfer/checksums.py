"""Checksums of pages as they lie in L1: CRC-32, four bytes a page.

They find what happened to L1 between a store and a load: memory that failed, a fault of this server that
wrote to a frame of another object, a file that was changed. They say nothing of the copies themselves.
"""

import ctypes
import zlib
from collections.abc import Sequence

import numpy as np

from lmcache_client.contract.geometry import Region
from lmcache_server.transfer.base import CopyError
from lmcache_server.transfer.plan import ObjectCopy, Pieces


class DamagedError(CopyError):
    """A page is not what was stored; `part` is the position of its object among those to be loaded."""

    def __init__(self, part: int, region: int, page: int) -> None:
        super().__init__(f"the stored page of block {page} in region {region} is damaged")
        self.part = part


def checksums(pieces: Pieces, page: ObjectCopy, regions: Sequence[Region]) -> bytes:
    """The checksum of each page that `pieces` are made of: region after region, in it block after block.

    Pieces follow the pages in order; a page that lies in two runs of frames is two pieces or more.
    """
    found = []
    current = missing = 0
    sizes = iter(np.repeat([region.page_bytes for region in regions], len(page.block_ids)).tolist())
    for address, length in zip(pieces.local.tolist(), pieces.length.tolist(), strict=True):
        if not missing:
            current, missing = 0, next(sizes)
        # Of more than a few KiB at a time zlib lets other threads run.
        current = zlib.crc32((ctypes.c_char * length).from_address(address), current)
        missing -= length
        if not missing:
            found.append(current)
    return np.array(found, dtype="<u4").tobytes()


def check(part: int, pieces: Pieces, page: ObjectCopy, regions: Sequence[Region], stored: bytes) -> None:
    """Raises DamagedError unless the pages that `pieces` are made of are those stored with the checksums
    `stored` (of the whole object; empty: unknown)."""
    if not stored:
        return
    right = np.frombuffer(stored, dtype="<u4").reshape(len(regions), page.num_blocks)
    right = right[:, page.first_page : page.first_page + len(page.block_ids)]
    found = np.frombuffer(checksums(pieces, page, regions), dtype="<u4").reshape(right.shape)
    if (wrong := np.argwhere(found != right)).size:
        region, index = wrong[0].tolist()
        raise DamagedError(part, region, page.first_page + index)
