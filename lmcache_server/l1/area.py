"""Memory that this process and another one both map, and what L1 can lie in instead of memory of its own."""

import fcntl
import mmap
import os
from collections.abc import Callable
from typing import NamedTuple, Protocol

Grow = Callable[[int], object]
"""Called with the number of frames by which L1 has grown."""


class Area(NamedTuple):
    """`num_bytes` at `address` here are those at `offset` of a file."""

    descriptor: int
    offset: int
    address: int
    num_bytes: int


class Backing(Protocol):
    """What an option lets L1 lie in."""

    in_memory: bool
    """Whether touching all of it in advance reads and writes no disk."""

    def map(self) -> mmap.mmap:
        """Raises StartError."""

    def area(self, address: int, num_bytes: int) -> Area:
        """How another process maps it, which is mapped at `address` here."""

    def check(self) -> None:
        """Raises CopyError if it may not be touched any more. Any thread may ask."""

    def take(self, start: int, end: int, grow: Grow) -> bool:
        """Makes these bytes usable, and calls `grow` with the number of frames that this adds. Logs and
        returns False if there is no space."""

    def close(self) -> None: ...


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
