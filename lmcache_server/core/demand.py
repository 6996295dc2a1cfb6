"""The hits that other sizes of L1 would have had, from the distances at which lookups find their chunks.

All remembered chunks are one list, the last used first. A lookup finds a chunk in an L1 of some size exactly
if the chunk and all that were used after it fit into that size. So one pass over the live traffic gives the
hits of every size. (Mattson and others, "Evaluation techniques for storage hierarchies", 1970.)
"""

import itertools
import math
from collections import Counter, defaultdict, deque
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field

STEPS_PER_OCTAVE = 32
"""How finely distances are counted: in steps of 2.2 %."""
PERIOD_S = 300.0
WINDOWS = {"hour": (PERIOD_S, 12), "day": (3600.0, 24), "start": (math.inf, 1)}
"""By name, the seconds of a period and the number of periods; "start" stands for all since the start."""
MAX_KEYS = 1_000_000
MAX_CHUNKS = 16_384
"""Of one lookup. Further ones are not counted: that would keep other clients waiting."""
MAX_RUNS = 256
"""Of one lookup: runs of chunks that the same request used last. An honest chain has few."""
MAX_NAMESPACES = 16
OTHERS = b""
"""Stands for all namespaces beyond MAX_NAMESPACES."""
_FAN_BITS = 6
_FAN = 1 << _FAN_BITS


@dataclass(frozen=True)
class Sizes:
    """Of one namespace: the tokens of a chunk, and the frames that its full attention takes on all shards.
    With `sparse`, requests resume only where windows or states are stored, not at every chunk; with `states`,
    none is stored of an answer."""

    chunk_size: int
    chunk_frames: int
    sparse: bool = False
    states: bool = False


@dataclass
class Curve:
    """The tokens that were looked up and that the engine did not hold; and of these, by distance, the tokens
    that a large enough L1 would have found."""

    tokens: int = 0
    found: Counter[int] = field(default_factory=Counter)

    def add(self, other: "Curve", sign: int = 1) -> None:
        self.tokens += sign * other.tokens
        for place, tokens in other.found.items():
            self.found[place] += sign * tokens

    def hits(self, frames: float) -> float:
        """The tokens that an L1 of so many frames would have found."""
        if frames <= 0:
            return 0.0
        step = STEPS_PER_OCTAVE * math.log2(frames)
        whole = sum(tokens for place, tokens in self.found.items() if place < math.floor(step))
        return whole + self.found.get(math.floor(step), 0) * (step - math.floor(step))

    @property
    def all_hits(self) -> int:
        """The tokens that an L1 without limit would have found."""
        return self.found.total()


class Demand:
    """The distances of all lookups, by namespace.

    It remembers at most `max_keys` chunks and requests, and `max_frames` frames. It forgets what was used
    longest ago: that counts as new. A distance below `least_frames` counts as `least_frames`.
    """

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self.max_keys = max_keys
        self.max_frames = 1 << 60
        self.least_frames = 1
        self._stack = _Stack()
        self._uses: defaultdict[bytes, dict[int, int]] = defaultdict(dict)
        """By namespace and chunk, the number of the request that used it last."""
        self._resumable: defaultdict[bytes, dict[int, int]] = defaultdict(dict)
        """The chunks at whose end windows and states were stored; for each, the place of the least L1 that
        still has them."""
        self._forgot = False
        self._windows = {name: Window(*sizes) for name, sizes in WINDOWS.items()}
        self._open: defaultdict[bytes, Curve] = defaultdict(Curve)
        """What the windows do not have yet: the lookups of this period."""
        self._period = 0.0

    def __len__(self) -> int:
        """How many chunks it remembers."""
        return sum(map(len, self._uses.values()))

    def looked_up(
        self,
        namespace: bytes,
        sizes: Sizes,
        keys: Sequence[bytes],
        computed_tokens: int,
        limit_tokens: int,
        now_s: float,
    ) -> None:
        """Counts a lookup of the chain `keys`, of which the engine itself holds `computed_tokens`."""
        # Short names take less memory than keys. Two chunks hardly ever have the same.
        limit_tokens = min(limit_tokens, MAX_CHUNKS * sizes.chunk_size)
        names = list(map(hash, keys[: limit_tokens // sizes.chunk_size]))
        if not names:
            return
        if (period := now_s // PERIOD_S) != self._period or len(self._open) >= MAX_NAMESPACES:
            self._close()
            self._period = period
        curve, resumable = self._open[namespace], self._resumable[namespace]
        curve.tokens += max(limit_tokens - computed_tokens, 0)
        uses = [*map(self._uses[namespace].get, names), None]
        total = uses.index(None)
        behind, first, place, newer = computed_tokens // sizes.chunk_size, 0, 0, 0
        found: list[tuple[int, int]] = []
        # A request that used a chunk has used all before it, so its chunks lie side by side.
        for request, run in itertools.islice(itertools.groupby(uses[:total]), MAX_RUNS):
            end = first + len(list(run))
            assert request is not None
            self._stack.take(request, names[first:end])
            newer, chunk = self._stack.newer(request), max(first, behind)
            for stop in self._stops(newer, sizes, range(chunk, end), names, resumable):
                place = max(place, self._place(newer + stop * sizes.chunk_frames))
                found.append((place, stop))
            first = end
        if sizes.sparse:
            # A smaller L1 has lost chunks with their windows and states, and the chunks alone came back.
            found = sorted((max(place, resumable[names[stop - 1]]), stop) for place, stop in found)
            resumable.update((names[stop - 1], least) for least, stop in found)
            # They are stored where a prompt parts from what L1 has, and at its end.
            if total:
                place, fork = max(place, self._place(newer + total * sizes.chunk_frames)), names[total - 1]
                resumable[fork] = min(resumable.get(fork, place), place)
            resumable[names[-1]] = 0
        for place, stop in found:
            if stop > behind:
                curve.found[place] += (stop - behind) * sizes.chunk_size
                behind = stop
        self._use(namespace, sizes, names)

    def _stops(
        self, newer: int, sizes: Sizes, chunks: range, names: Sequence[int], resumable: Container[int]
    ) -> Iterator[int]:
        """The numbers of chunks after which a lookup can resume: of those whose distances count at the same
        place, the last."""
        if sizes.sparse:
            yield from (chunk + 1 for chunk in chunks if names[chunk] in resumable)
            return
        stop = chunks.start
        while stop < chunks.stop:
            place = self._place(newer + (stop + 1) * sizes.chunk_frames)
            end = (2 ** ((place + 1) / STEPS_PER_OCTAVE) - newer) // sizes.chunk_frames
            stop = min(max(int(end), stop + 1), chunks.stop)
            yield stop

    def _place(self, frames: int) -> int:
        """Where this distance counts."""
        return math.floor(STEPS_PER_OCTAVE * math.log2(max(frames, self.least_frames)))

    def completed(self, namespace: bytes, sizes: Sizes, keys: Sequence[bytes]) -> None:
        """Counts the chunks that a request has completed by its end, of which `keys` is the whole chain."""
        uses = self._uses[namespace]
        new = list(itertools.takewhile(lambda name: name not in uses, map(hash, reversed(keys[:MAX_CHUNKS]))))
        if new:
            self._use(namespace, sizes, new[::-1])
            if sizes.sparse and not sizes.states:
                self._resumable[namespace].update(dict.fromkeys(new, 0))

    def _use(self, namespace: bytes, sizes: Sizes, names: list[int]) -> None:
        """These chunks, which no request in the stack has, were used now. Forgets others, if it must."""
        stack = self._stack
        request = stack.push(namespace, names, sizes.chunk_frames)
        self._uses[namespace].update(dict.fromkeys(names, request))
        while stack.chunks > self.max_keys or stack.frames > self.max_frames:
            self._forgot = True
            request, namespace, names = stack.pop()
            uses = self._uses[namespace]
            for name in names:
                if uses.get(name) == request:
                    del uses[name]
                    self._resumable[namespace].pop(name, None)
            if not uses:
                del self._uses[namespace]
                self._resumable.pop(namespace, None)

    def window(self, name: str, now_s: float) -> "Window":
        """The lookups of about the last hour or day, or all (see WINDOWS)."""
        self._close()
        self._windows[name].advance(now_s)
        return self._windows[name]

    def _close(self) -> None:
        for namespace, curve in self._open.items():
            for window in self._windows.values():
                window.add(namespace, curve, self._period * PERIOD_S)
        self._open.clear()

    def exact_frames(self) -> int | None:
        """Up to this size the curves are exact; None if nothing was forgotten."""
        return self._stack.frames if self._forgot else None


class Window:
    """The sum of the last `periods` periods of `period_s` seconds: of all lookups, and by namespace."""

    def __init__(self, period_s: float, periods: int) -> None:
        self.together = Curve()
        self.curves: dict[bytes, Curve] = {}
        self._period_s = period_s
        self._period = 0
        self._periods: deque[dict[bytes, Curve]] = deque({} for _ in range(periods))

    def add(self, namespace: bytes, curve: Curve, now_s: float) -> None:
        self.advance(now_s)
        if namespace not in self.curves and len(self.curves) >= MAX_NAMESPACES:
            namespace = OTHERS
        self.together.add(curve)
        for curves in (self._periods[-1], self.curves):
            curves.setdefault(namespace, Curve()).add(curve)

    def advance(self, now_s: float) -> None:
        """Forgets the periods that have left the window."""
        period = math.floor(now_s / self._period_s)
        for _ in range(min(period - self._period, len(self._periods))):
            self._periods.append({})
            for namespace, curve in self._periods.popleft().items():
                self.together.add(curve, -1)
                self.curves[namespace].add(curve, -1)
                if not self.curves[namespace].tokens:
                    del self.curves[namespace]
        self._period = max(period, self._period)


class _Stack:
    """The requests that were the last to use some chunks, by number, each with these chunks. To be quick,
    their frames are also summed up over _FAN requests, and over higher powers of it. A request without
    chunks takes no memory."""

    def __init__(self) -> None:
        self.frames = self.chunks = 0
        """Of all requests."""
        self._oldest = self._next = 0
        """The numbers of the first request that `pop` may return, and of the next one."""
        self._requests: dict[int, tuple[bytes, list[int], int]] = {}
        """The namespace, the chunks, and the frames of each chunk."""
        self._levels: tuple[dict[int, list[int]], ...] = ({}, {}, {})
        """Lists of _FAN sums by the number of the list. A sum is of 1, _FAN or _FAN**2 requests."""

    def push(self, namespace: bytes, names: list[int], chunk_frames: int) -> int:
        """Adds a request that is the last to use these chunks of so many frames; returns its number."""
        request = self._next
        self._next += 1
        if names:
            self._requests[request] = namespace, names, chunk_frames
            self._count(request, len(names), chunk_frames)
        return request

    def take(self, request: int, names: list[int]) -> None:
        """The first chunks of this request are used by another. Unless they are these, nothing changes: keys
        that are no chain are not worth more."""
        _, left, chunk_frames = self._requests.get(request, (b"", [], 0))
        if left[: len(names)] == names:
            del left[: len(names)]
            self._count(request, -len(names), chunk_frames)
            if not left:
                del self._requests[request]

    def pop(self) -> tuple[int, bytes, list[int]]:
        """Forgets the oldest request; returns its number, its namespace and its chunks."""
        while self._oldest not in self._requests:
            self._oldest += 1
        namespace, names, chunk_frames = self._requests.pop(self._oldest)
        self._count(self._oldest, -len(names), chunk_frames)
        return self._oldest, namespace, names

    def newer(self, request: int) -> int:
        """The frames of all requests after this one."""
        place, frames = request + 1, 0
        for level in self._levels:
            block = place >> _FAN_BITS
            frames += sum(level.get(block, ())[place & _FAN - 1 :])
            place = block + 1
        return frames + sum(sum(sums) for block, sums in self._levels[-1].items() if block >= place)

    def _count(self, request: int, chunks: int, chunk_frames: int) -> None:
        frames = chunks * chunk_frames
        self.chunks += chunks
        self.frames += frames
        block = request
        for level in self._levels:
            place, block = block & _FAN - 1, block >> _FAN_BITS
            sums = level.get(block) or level.setdefault(block, [0] * _FAN)
            sums[place] += frames
            if not sums[place] and not any(sums):
                del level[block]
