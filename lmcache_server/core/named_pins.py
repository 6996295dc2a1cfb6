"""Named pins: the chunks that users keep from eviction, each under a name, until they unpin that name."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from lmcache_server.core.index import Chunk

MAX_NAMES = 64
MAX_PINNED = 1 << 17
"""The limit for the chunks of all names. A chunk counts once for each of its names."""
SHARE = 2
"""One in so many frames of L1 may be pinned."""


class PinError(Exception):
    """A bound does not allow this pin; the message tells the user which, and what to do."""


class NamedPins:
    """The chunks of each name. While a chunk has a name in this table, the caller pins it, once."""

    def __init__(self) -> None:
        self.names: dict[str, dict[Chunk, None]] = {}
        """The chunks of each name, in the order in which they were pinned. No name is without chunks."""
        self.frames = 0
        """The frames of all pinned chunks."""
        self._frames: dict[Chunk, int] = {}
        """For each pinned chunk, its frames: those of ready objects and those reserved since it is pinned."""

    def __len__(self) -> int:
        return len(self._frames)

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._frames)

    def __contains__(self, chunk: Chunk) -> bool:
        return chunk in self._frames

    def add(self, name: str, chunks: Sequence[Chunk], total_frames: int) -> list[Chunk]:
        """Pins chunks without reserved objects, or chunks that are pinned already, in an L1 of `total_frames`
        frames. Returns those that were not pinned. Raises PinError, and changes nothing, beyond a bound."""
        known = self.names.get(name, {})
        new = [chunk for chunk in dict.fromkeys(chunks) if chunk not in self._frames]
        frames = sum(chunk.frames for chunk in new)
        if name not in self.names and len(self.names) >= MAX_NAMES:
            raise PinError(f"{MAX_NAMES} names are pinned already: unpin one of them with 'lmcache unpin'")
        added = len(set(chunks) - known.keys())
        if sum(map(len, self.names.values())) + added > MAX_PINNED:
            raise PinError(f"{MAX_PINNED} chunks can be pinned in all: unpin some with 'lmcache unpin'")
        if frames and self.frames + frames > total_frames // SHARE:
            percent = 100 * (self.frames + frames) / max(total_frames, 1)
            raise PinError(
                f"{percent:.0f} % of L1 would be pinned, and at most half of it can be: unpin something with "
                "'lmcache unpin', or give the server more memory with --l1-size-gb"
            )
        if chunks:
            self.names[name] = known | dict.fromkeys(chunks)
        self._frames |= {chunk: chunk.frames for chunk in new}
        self.frames += frames
        return new

    def remove(self, name: str) -> list[Chunk]:
        """Takes a name out of the table. Returns its chunks that no other name has. Raises KeyError."""
        chunks = self.names.pop(name)
        others = self.names.values()
        gone = [chunk for chunk in chunks if not any(chunk in other for other in others)]
        for chunk in gone:
            self.frames -= self._frames.pop(chunk)
        return gone

    def forget(self, chunk: Chunk) -> bool:
        """Takes a chunk out of all names; returns whether it was pinned."""
        if chunk not in self._frames:
            return False
        self.frames -= self._frames.pop(chunk)
        for name, chunks in list(self.names.items()):
            chunks.pop(chunk, None)
            if not chunks:
                del self.names[name]
        return True

    def has_room(self, chunk: Chunk, frames: int, total_frames: int) -> bool:
        """Whether a chunk may get so many frames more; any that is not pinned may."""
        return chunk not in self._frames or self.frames + frames <= total_frames // SHARE

    def grow(self, chunk: Chunk, frames: int) -> None:
        """A pinned chunk gets so many frames more, or has fewer again; for others nothing changes."""
        if chunk in self._frames:
            self._frames[chunk] += frames
            self.frames += frames

    def check_integrity(self, reserved: Mapping[Chunk, int], total_frames: int) -> None:
        """Asserts the invariants; `reserved` has the frames of the reservations of each chunk."""
        named: Iterable[Chunk] = {chunk for chunks in self.names.values() for chunk in chunks}
        assert named == self._frames.keys(), "a pinned chunk has a name"
        assert all(self.names.values()), "a name has a chunk"
        for chunk, frames in self._frames.items():
            assert chunk.ready, "only ready chunks are pinned"
            assert frames == chunk.frames + reserved.get(chunk, 0)
        assert self.frames == sum(self._frames.values()) <= total_frames // SHARE, "half of L1 is not pinned"
