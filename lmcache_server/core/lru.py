"""The order in which chunks are evicted: the least recently used goes first."""

from collections.abc import Iterable, Iterator, Sequence

from lmcache_server.core.index import Chunk


class EvictionOrder:
    """A linked list through the chunks, so that adding or removing one takes constant time.

    It has no pinned chunks: the one at the front can always be evicted.
    """

    def __init__(self) -> None:
        self._ends = Chunk(b"", b"")
        self._ends.older = self._ends.newer = self._ends
        self.frames = 0
        """The frames that evicting every member would free."""

    def __iter__(self) -> Iterator[Chunk]:
        """From the least to the most recently used."""
        chunk = self._ends.newer
        while chunk is not None and chunk is not self._ends:
            yield chunk
            chunk = chunk.newer

    def __contains__(self, chunk: Chunk) -> bool:
        return chunk.newer is not None

    def add(self, chunk: Chunk, ahead_of: Chunk | None = None) -> None:
        """Puts a chunk last in line for eviction, or directly ahead of the member `ahead_of`."""
        assert chunk.newer is None, "a chunk is in the order once"
        newer = self._ends if ahead_of is None else ahead_of
        older = newer.older
        assert older is not None, "`ahead_of` is not in the order"
        chunk.older, chunk.newer = older, newer
        older.newer = newer.older = chunk
        self.frames += chunk.frames

    def add_all(self, chunks: Iterable[Chunk]) -> None:
        """Puts chunks last in line, the last of them at the very end."""
        for chunk in chunks:
            self.add(chunk)

    def renew(self, chain: Sequence[Chunk]) -> None:
        """Moves members to the end of the line, the first of them to the very end."""
        last = self._ends.older
        for chunk in chain:
            if last is not chunk:
                break
            last = chunk.older
        else:
            return
        self.remove(chain)
        self.add_all(reversed(chain))

    def remove(self, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            older, newer = chunk.older, chunk.newer
            assert older is not None, "not in the order"
            assert newer is not None, "not in the order"
            older.newer, newer.older = newer, older
            chunk.older = chunk.newer = None
            self.frames -= chunk.frames
