"""The frames of L1: which ones are free, and which runs of them an object gets.

Every operation takes constant time per run. Free runs are merged with their neighbours and sorted into
classes by size: one class for each size below EXACT frames, and one for each power of two above.
"""

from collections.abc import Iterable

Runs = tuple[tuple[int, int], ...]
"""The frames of one object, in the order of its bytes: (first frame, count) pairs."""

FRAME_BYTES = 64 << 10
"""The size of L1's frames. The cache itself works with any size."""

EXACT = 64
"""Each size below this has a class of its own: then most objects get a run that an object of the same size
has freed, and few end up in pieces."""


def _size_class(frames: int) -> int:
    return frames if frames < EXACT else EXACT + (frames // EXACT).bit_length() - 1


def count_frames(runs: Runs) -> int:
    return sum([count for _, count in runs])


def _outside(start: int, count: int) -> str:
    return f"frames {start} to {start + count} are not in this pool"


class FramePool:
    """The free frames among [0, total_frames)."""

    def __init__(self, total_frames: int = 0) -> None:
        self.total_frames = 0
        self._clear(())
        self.grow(total_frames)

    @classmethod
    def around(cls, total_frames: int, taken: Iterable[Runs]) -> "FramePool":
        """Makes a pool in which exactly the frames in `taken` are not free.

        Raises ValueError if one of them lies outside the pool or is taken twice.
        """
        pool, marks, frames = cls(), bytearray(total_frames), 0
        for runs in taken:
            for start, count in runs:
                if not 0 <= start < start + count <= total_frames:
                    raise ValueError(_outside(start, count))
                marks[start : start + count] = b"\x01" * count
                frames += count
        if marks.count(1) != frames:
            raise ValueError("a frame is taken twice")
        pool.total_frames, end = total_frames, 0
        while (start := marks.find(0, end)) >= 0:
            end = marks.find(1, start)
            end = total_frames if end < 0 else end
            pool._add(start, end - start)
        return pool

    def largest_free_run(self) -> int:
        """The frames in the longest free run: as many as `free_frames` if nothing is fragmented."""
        for starts in reversed(self._starts_by_class):
            if starts:
                return max(map(self._count_by_start.__getitem__, starts))
        return 0

    def grow(self, frames: int) -> None:
        """Adds `frames` free frames at the end."""
        if frames < 0:
            raise ValueError(f"a pool cannot grow by {frames} frames")
        first = self.total_frames
        self.total_frames += frames
        self._give(first, frames)

    def set_aside(self, ranges: Runs) -> None:
        """From now on, no frame of these ranges is given out. Others that earlier calls set aside are free
        again."""
        runs = (*self.free_runs(), *self.aside)
        self._clear(ranges)
        for start, count in runs:
            self._give(start, count)

    def usable(self, runs: Runs) -> int:
        """How many of these frames are not set aside."""
        shared = [
            min(start + count, first + frames) - max(start, first)
            for start, count in runs
            for first, frames in self.ranges
        ]
        return count_frames(runs) - sum(max(frames, 0) for frames in shared)

    def _clear(self, ranges: Runs) -> None:
        self.free_frames = 0
        self._count_by_start: dict[int, int] = {}
        self._start_by_end: dict[int, int] = {}
        self._starts_by_class: list[dict[int, None]] = []
        self.ranges = ranges
        """What is set aside as soon as it is free; only to be read."""
        self.aside: list[tuple[int, int]] = []
        """The runs that are set aside: neither free nor taken."""

    def allocate(self, frames: int) -> Runs | None:
        """Takes `frames` frames and returns them. If fewer are free, takes nothing and returns None."""
        if frames <= 0:
            raise ValueError(f"an object has at least one frame, not {frames}")
        if frames > self.free_frames:
            return None
        runs = []
        while frames:
            start = self._choose(frames)
            count = self._remove(start)
            taken = min(count, frames)
            if taken < count:
                self._insert(start + taken, count - taken)
            runs.append((start, taken))
            self.free_frames -= taken
            frames -= taken
        return tuple(runs)

    def free(self, runs: Runs) -> None:
        """Gives back runs that `allocate` returned."""
        for start, count in runs:
            if not 0 <= start < start + count <= self.total_frames:
                raise ValueError(_outside(start, count))
            self._give(start, count)

    def _give(self, start: int, count: int) -> None:
        """Frees what is not set aside of a run."""
        for first, frames in self.ranges:
            begin, end = max(start, first), min(start + count, first + frames)
            if begin < end:
                self.aside.append((begin, end - begin))
                self._give(start, begin - start)
                return self._give(end, start + count - end)
        if count:
            self._add(start, count)
        return None

    def free_runs(self) -> Runs:
        """All free runs, in no particular order."""
        return tuple(self._count_by_start.items())

    def check_integrity(self) -> None:
        """Asserts that free runs are disjoint, merged, inside the pool, and indexed consistently."""
        end_before = -1
        for start, count in sorted(self._count_by_start.items()):
            assert count > 0, "a free run is empty"
            assert start > end_before, "free runs overlap or were not merged"
            assert self._start_by_end[start + count] == start
            assert start in self._starts_by_class[_size_class(count)]
            end_before = start + count
        assert end_before <= self.total_frames, "a free run ends beyond the pool"
        assert sum(self._count_by_start.values()) == self.free_frames
        assert len(self._start_by_end) == len(self._count_by_start)
        assert sum(map(len, self._starts_by_class)) == len(self._count_by_start)

    def _choose(self, frames: int) -> int:
        """The start of a free run for `frames` frames: an exact fit if its class shows one, else one of the
        largest runs, which leaves the largest remainder. Within a class the most recently freed run is taken,
        because its memory is the likeliest to be in a CPU cache."""
        exact, classes = _size_class(frames), self._starts_by_class
        if exact < len(classes) and classes[exact]:
            start = next(reversed(classes[exact]))
            if self._count_by_start[start] >= frames:
                return start
        for starts in reversed(classes):
            if starts:
                return next(reversed(starts))
        raise AssertionError("frames are free but no run is")

    def _add(self, start: int, count: int) -> None:
        """Frees a run and merges it with its neighbours."""
        assert start not in self._count_by_start, f"frame {start} is free already"
        self.free_frames += count
        before = self._start_by_end.get(start)
        if before is not None:
            count += self._remove(before)
            start = before
        if start + count in self._count_by_start:
            count += self._remove(start + count)
        self._insert(start, count)

    def _insert(self, start: int, count: int) -> None:
        size_class = _size_class(count)
        while len(self._starts_by_class) <= size_class:
            self._starts_by_class.append({})
        self._starts_by_class[size_class][start] = None
        self._count_by_start[start] = count
        self._start_by_end[start + count] = start

    def _remove(self, start: int) -> int:
        count = self._count_by_start.pop(start)
        del self._start_by_end[start + count]
        del self._starts_by_class[_size_class(count)][start]
        return count
