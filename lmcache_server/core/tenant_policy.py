"""Where an option meets eviction: it may bound what the chunks of a tenant take."""

import math
from collections.abc import Iterable, Mapping

from lmcache_server.core.index import Chunk


class TenantPolicy:
    """The cache calls these methods, which do nothing unless an option replaces them.

    It calls the first three only for chunks of a tenant: `chunk.tenant` is its name.
    """

    def added(self, chunk: Chunk, ahead_of: Chunk | None) -> None:
        """From now on it can be evicted: last in its part of the order, or directly ahead of another."""

    def removed(self, chunk: Chunk) -> None:
        """It cannot be evicted any more: it is in use, or has gone."""

    def grew(self, chunk: Chunk, frames: int) -> None:
        """Its objects take so many frames more, or fewer."""

    def most_frames(self, tenant: bytes) -> float:
        """How many frames the tenant of this name may have."""
        return math.inf

    def excess_frames(self, tenant: bytes, frames: int) -> int:
        """How many frames the tenant of this name must lose before it may have so many more."""
        return 0

    def line(self, tenant: bytes, once: bool) -> Iterable[Chunk]:
        """The tenant's evictable chunks, the next one first; with `once`, only those nobody will ask for."""
        return ()

    def check(self, chunks: Iterable[Chunk], writing: Mapping[Chunk, int], order: Iterable[Chunk]) -> None:
        """Asserts that its figures agree with all `chunks`, with the frames that are reserved for some of
        them (`writing`), and with those that can be evicted (`order`)."""
