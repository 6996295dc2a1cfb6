"""The order in which chunks are evicted: the least recently used goes first."""

import itertools
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Sequence

from lmcache_server.core.index import Chunk
from lmcache_server.core.tenant_policy import TenantPolicy


class EvictionOrder:
    """A linked list through the chunks, so that adding or removing one takes constant time.

    It has no chunks in use: the one at the front can always be evicted. It has two parts. Chunks that nobody
    will ask for again (`Chunk.once`) lie in the first.
    """

    def __init__(self) -> None:
        self.tenant_policy = TenantPolicy()
        self._ends, self._border = Chunk(b"", b""), Chunk(b"", b"")
        self._ends.older = self._ends.newer = self._border
        self._border.older = self._border.newer = self._ends
        self.frames = 0
        """The frames that evicting every member would free."""
        self.once_frames = 0
        """The frames of the members that nobody will ask for again."""

    def __iter__(self) -> Iterator[Chunk]:
        """From the least to the most recently used."""
        return itertools.chain(self.once(), self.others())

    def once(self) -> Iterator[Chunk]:
        """The first part of the line: chunks that nobody will ask for again, or that nobody can use."""
        return _between(self._ends, self._border)

    def others(self) -> Iterator[Chunk]:
        """The second part of the line."""
        return _between(self._border, self._ends)

    def __contains__(self, chunk: Chunk) -> bool:
        return chunk.newer is not None

    def place(self, chunk: Chunk, parent: Chunk | None) -> Chunk | None:
        """Where a chunk goes: directly ahead of the returned member, or last in its part if None. `parent` is
        None if its parent is not in L1."""
        if parent is None:
            # A chunk without its parent is seldom of use: it is evicted first.
            return self._ends.newer
        is_ahead = parent in self and (parent.once or not chunk.once)
        return parent if is_ahead else None

    def add(self, chunk: Chunk, ahead_of: Chunk | None = None) -> None:
        """Puts a chunk last in its part of the line, or directly ahead of the member `ahead_of`."""
        assert chunk.newer is None, "a chunk is in the order once"
        newer = ahead_of or (self._border if chunk.once else self._ends)
        older = newer.older
        assert older is not None, "`ahead_of` is not in the order"
        chunk.older, chunk.newer = older, newer
        older.newer = newer.older = chunk
        self.frames += chunk.frames
        self.once_frames += chunk.frames if chunk.once else 0
        if chunk.tenant:
            self.tenant_policy.added(chunk, ahead_of)

    def renew(self, chain: Sequence[Chunk]) -> None:
        """Moves members to the end of their part of the line, the first of them to its very end."""
        last = self._ends.older
        for chunk in chain:
            if last is not chunk:
                break
            last = chunk.older
        else:
            return
        self.remove(chain)
        for chunk in reversed(chain):
            self.add(chunk)

    def remove(self, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            older, newer = chunk.older, chunk.newer
            assert older is not None, "not in the order"
            assert newer is not None, "not in the order"
            older.newer, newer.older = newer, older
            chunk.older = chunk.newer = None
            self.frames -= chunk.frames
            self.once_frames -= chunk.frames if chunk.once else 0
            if chunk.tenant:
                self.tenant_policy.removed(chunk)

    def keep(self, chunk: Chunk) -> None:
        """Somebody asked for this chunk again: from now on it belongs to the others. It moves when it is
        renewed."""
        self.once_frames -= chunk.frames if chunk.once and chunk in self else 0
        chunk.once = False


def _between(start: Chunk, end: Chunk) -> Iterator[Chunk]:
    chunk = start.newer
    while chunk is not None and chunk is not end:
        yield chunk
        chunk = chunk.newer


def find_victims(
    missing: int,
    line: Iterable[Chunk],
    own: Chunk | None,
    parent: Chunk | None,
    held: Container[Chunk] = (),
    frames: Callable[[Chunk], int] = operator.attrgetter("frames"),
) -> list[Chunk] | None:
    """The chunks of `line` whose eviction frees `missing` frames; None if that cannot be done. The chunk
    `own`, its parent, the chunks behind its parent and those in `held` are never among them. `frames` tells
    how many an eviction frees."""
    victims: list[Chunk] = []
    for chunk in line:
        if missing <= 0:
            break
        if chunk is parent:
            return None
        if chunk is not own and chunk not in held:
            victims.append(chunk)
            missing -= frames(chunk)
    return victims if missing <= 0 else None
