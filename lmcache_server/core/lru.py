"""The order in which chunks are evicted: least recently used first."""

from collections.abc import Iterable, Iterator, Sequence

from lmcache_server.core.index import Chunk


class EvictionOrder:
    """A linked list through the chunks, so that every operation takes constant time.

    Chunks that something pins are not members: whatever is at the front can be evicted.
    """

    def __init__(self) -> None:
        self._ends = Chunk(b"", b"")
        self._ends.older = self._ends.newer = self._ends
        self.frames = 0
        """Frames of all members: what evicting everything would free."""

    def __iter__(self) -> Iterator[Chunk]:
        """From the least to the most recently used."""
        chunk = self._ends.newer
        while chunk is not None and chunk is not self._ends:
            yield chunk
            chunk = chunk.newer

    def __contains__(self, chunk: Chunk) -> bool:
        return chunk.newer is not None

    def oldest(self) -> Chunk | None:
        chunk = self._ends.newer
        return None if chunk is self._ends else chunk

    def add(self, chunk: Chunk, ahead_of: Chunk | None = None) -> None:
        """Puts a chunk last in line for eviction, or directly ahead of a chunk that is in line."""
        assert chunk.newer is None, "a chunk is in the order once"
        newer = self._ends if ahead_of is None else ahead_of
        older = newer.older
        assert older is not None, "what it goes ahead of is in the order"
        chunk.older, chunk.newer = older, newer
        older.newer = newer.older = chunk
        self.frames += chunk.frames

    def add_all(self, chunks: Iterable[Chunk]) -> None:
        """Puts chunks last in line, the last of them behind the others."""
        for chunk in chunks:
            self.add(chunk)

    def renew(self, chain: Sequence[Chunk]) -> None:
        """Makes members the last in line, the first of them behind the others."""
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
