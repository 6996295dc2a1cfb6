"""Named pins: the chunks that users keep from eviction, each under a name, until they unpin that name."""

from collections.abc import Iterable

from lmcache_server.core.cache import Cache, Gone
from lmcache_server.core.index import Chunk

MAX_NAMES = 64
MAX_PINNED = 1 << 17
"""The limit for the chunks of all names. A chunk counts once for each of its names."""
Place = tuple[bytes, bytes]
"""The namespace and the key of a chunk."""
SHARE = 2
"""One in so many frames of L1 may be pinned."""


class PinError(Exception):
    """A bound does not allow this pin; the message tells the user which, and what to do."""


class NamedPins:
    """The chunks of each name, which the cache protects while they have one."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self.names: dict[str, dict[Place, Chunk]] = {}
        """The chunks of each name, in the order in which they were pinned. No name is without chunks."""
        self._chunks: dict[Place, Chunk] = {}
        """All of these chunks."""
        cache.on_gone.append(self._forget)

    def __len__(self) -> int:
        return len(self._chunks)

    def __contains__(self, chunk: Chunk) -> bool:
        return (chunk.namespace, chunk.key) in self._chunks

    @property
    def frames(self) -> int:
        """The frames of all pinned chunks. It takes time in proportion to their number."""
        return sum(chunk.frames for chunk in self._chunks.values())

    def pin(self, name: str, namespace: bytes, keys: Iterable[bytes]) -> None:
        """Pins those chunks of a chain that are there and not being written. Raises PinError, and pins
        nothing, if that exceeds a bound."""
        known = self.names.get(name, {})
        found = (self._cache.chunk(namespace, key) for key in keys)
        there = [each for each in found if each and each.ready and (not each.reserved or each in self)]
        chunks = {(namespace, each.key): each for each in there}
        new = {place: each for place, each in chunks.items() if place not in self._chunks}
        added, frames = sum(each.frames for each in new.values()), self.frames
        if name not in self.names and len(self.names) >= MAX_NAMES:
            raise PinError(f"{MAX_NAMES} names are pinned already: unpin one of them with 'lmcache unpin'")
        if sum(map(len, self.names.values())) + len(chunks.keys() - known.keys()) > MAX_PINNED:
            raise PinError(f"{MAX_PINNED} chunks can be pinned in all: unpin some with 'lmcache unpin'")
        if added and frames + added > self._cache.total_frames // SHARE:
            percent = 100 * (frames + added) / max(self._cache.total_frames, 1)
            raise PinError(
                f"{percent:.0f} % of L1 would be pinned, and at most half of it can be: unpin something with "
                "'lmcache unpin', or give the server more memory with --l1-size-gb"
            )
        if chunks:
            self.names[name] = known | chunks
            self._chunks |= new
            self._cache.protect([*new.values()])

    def unpin(self, name: str) -> list[Chunk]:
        """Ends the pins of a name; returns its chunks that no name pins any more. Raises KeyError."""
        chunks, others = self.names.pop(name), self.names.values()
        gone = [self._chunks.pop(each) for each in chunks if not any(each in other for other in others)]
        self._cache.unprotect(gone)
        return gone

    def unpin_excess(self) -> list[str]:
        """Pinned chunks may have grown. Ends the pins of the newest names until the others take no more than
        they may; returns these names."""
        frames, ended = self.frames, list[str]()
        while frames > self._cache.total_frames // SHARE:
            ended.append(next(reversed(self.names)))
            frames -= sum(chunk.frames for chunk in self.unpin(ended[-1]))
        return ended

    def check_integrity(self) -> None:
        """Asserts that exactly the chunks with a name are pinned, and that the cache protects them."""
        assert all(self.names.values()), "a name has a chunk"
        assert {place for chunks in self.names.values() for place in chunks} == self._chunks.keys()
        assert all(chunk in self._cache.protected for chunk in self._chunks.values())

    def _forget(self, chunk: Chunk, _why: Gone) -> None:
        place = chunk.namespace, chunk.key
        if self._chunks.pop(place, None) is None:
            return
        for name, chunks in list(self.names.items()):
            chunks.pop(place, None)
            if not chunks:
                del self.names[name]
