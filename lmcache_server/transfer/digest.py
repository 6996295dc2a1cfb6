"""The digest of an object's bytes in L1: XXH3-128, with --checksums and in records of tiers.

It finds damage, not forgery: failing memory, a bug that wrote to another object's frame, a file that somebody
changed. It does not check the copies themselves.
"""

import ctypes
from collections.abc import Iterable

import xxhash

from lmcache_server.transfer.base import CopyError


class DamagedError(CopyError):
    """What was stored has changed. `part` is the position of the object in the load."""

    def __init__(self, part: int, reason: str = "its stored pages have changed") -> None:
        super().__init__(reason)
        self.part = part


def has_changed(payload: Iterable[tuple[int, int]], stored: bytes) -> bool:
    """Whether these are not the bytes whose digest was `stored`. If that is empty, nobody knows: False."""
    return bool(stored) and digest(payload) != stored


def digest(payload: Iterable[tuple[int, int]]) -> bytes:
    """The digest of an object whose bytes lie at these (address, bytes). It lets other threads run."""
    whole = xxhash.xxh3_128()
    for address, num_bytes in payload:
        whole.update((ctypes.c_char * num_bytes).from_address(address))
    return bytes(whole.digest())
