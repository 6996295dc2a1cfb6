"""Memory that this process and another one both map."""

import fcntl
import mmap
import os
from typing import NamedTuple


class Area(NamedTuple):
    """`num_bytes` at `address` here are those at `offset` of a file."""

    descriptor: int
    offset: int
    address: int
    num_bytes: int


def shared_memory(name: str, num_bytes: int, flags: int = 0) -> tuple[int, mmap.mmap]:
    """New memory, and the descriptor by which others map it. `flags` are more of memfd_create(2). Raises
    OSError."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    try:
        os.ftruncate(descriptor, num_bytes)
        # Nobody may cut it short: whoever touches what is gone is killed.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return descriptor, mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED)
    except BaseException:
        os.close(descriptor)
        raise
