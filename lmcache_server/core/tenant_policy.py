"""Where an option meets eviction: it may bound what the chunks of a tenant take."""

import math
from collections.abc import Container, Iterable, Mapping

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

    def victims(
        self,
        tenant: bytes,
        frames: int,
        own: Chunk | None,
        parent: Chunk | None,
        once: bool,
        held: Container[Chunk],
    ) -> list[Chunk] | None:
        """What must go so that the tenant of this name may have so many frames more, of its own chunks; None
        if that cannot be done. The others are as in find_victims."""
        return []

    def next_victims(self, tenant: bytes, share: float) -> Iterable[Chunk]:
        """What the tenant of this name loses next, if it has more than this share of what it may have."""
        return ()

    def check(self, chunks: Iterable[Chunk], writing: Mapping[Chunk, int], order: Iterable[Chunk]) -> None:
        """Asserts that it knows of `chunks`, of which those of `order` can be evicted. `writing` has reserved
        frames."""
