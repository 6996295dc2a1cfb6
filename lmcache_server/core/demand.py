"""The hits that other sizes of L1 would have had, from the distances at which lookups find their chunks.

All remembered chunks are one list, the last used first. A lookup finds a chunk in an L1 of some size exactly
if the chunk and all that were used after it fit into that size. So one pass over the live traffic gives the
hits of every size. (Mattson and others, "Evaluation techniques for storage hierarchies", 1970.)
"""

import itertools
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

STEPS_PER_OCTAVE = 32
"""How finely distances are counted: in steps of 2.2 %."""
WINDOWS = {"hour": (300.0, 12), "day": (3600.0, 24), "start": (math.inf, 1)}
"""By name, the seconds of a period and the number of periods; "start" stands for all since the start."""
MAX_KEYS = 1_000_000
MAX_NAMESPACES = 16
OTHERS = b""
"""Stands for all namespaces beyond MAX_NAMESPACES."""
_BLOCK = 256


@dataclass(frozen=True)
class Sizes:
    """Of one namespace: the tokens of a chunk, and the frames that its full attention takes on all shards.
    With `sparse`, requests resume only where windows or states are stored, not at every chunk."""

    chunk_size: int
    chunk_frames: int
    sparse: bool = False


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

    It remembers at most `max_keys` chunks and `max_frames` frames, and forgets the least recently used. A
    chunk that was forgotten counts as new. A distance below `least_frames` counts as `least_frames`.
    """

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self.max_keys = max_keys
        self.max_frames = 1 << 60
        self.least_frames = 1
        self._uses: OrderedDict[int, int] = OrderedDict()
        """By chunk, the number of the request that used it last; the least recently used comes first."""
        self._resumable: set[int] = set()
        """The chunks at whose end windows and states were stored."""
        self._stack = _Stack()
        self._windows = {name: Window(*sizes) for name, sizes in WINDOWS.items()}

    def __len__(self) -> int:
        """How many chunks it remembers."""
        return len(self._uses)

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
        names = _names(namespace, keys[: limit_tokens // sizes.chunk_size])
        uses = list(map(self._uses.get, names))
        known = uses.index(None) if None in uses else len(uses)
        grouped = itertools.groupby(uses[:known])
        runs = [(request, len(list(run))) for request, run in grouped if request is not None]
        found = self._found(names, runs, sizes, computed_tokens // sizes.chunk_size)
        for request, chunks in runs:
            self._stack.take(request, chunks)
        latest = self._stack.push(sizes.chunk_frames, len(names))
        # The head of the chain is used last, as the cache does it.
        names.reverse()
        self._uses.update(dict.fromkeys(names, latest))
        deque(map(self._uses.move_to_end, names), maxlen=0)
        if sizes.sparse and names:
            # Windows and states are stored at the end of a prompt, and where it parts from known prompts.
            self._resumable.update((names[0], names[-known]))
        curve = Curve(max(limit_tokens - computed_tokens, 0))
        for place, tokens in found:
            curve.found[place] += tokens
        for window in self._windows.values():
            window.add(namespace, curve, now_s)
        self._forget()

    def _found(
        self, names: Sequence[int], runs: Iterable[tuple[int, int]], sizes: Sizes, behind: int
    ) -> list[tuple[int, int]]:
        """(place of the distance, tokens) for the resume points after the first `behind` chunks. `runs` are
        (request that used them last, number) of the known chunks."""
        found, first, place = [], 0, 0
        for request, chunks in runs:
            newer = self._stack.newer(request) - first * sizes.chunk_frames
            chain: Sequence[int] = range(max(first, behind), first + chunks)
            if sizes.sparse:
                chain = [chunk for chunk in chain if names[chunk] in self._resumable]
            elif chain and self._place(newer, sizes, chain[0]) == self._place(newer, sizes, chain[-1]):
                chain = chain[-1:]
            for chunk in chain:
                place = max(place, self._place(newer, sizes, chunk))
                found.append((place, (chunk + 1 - behind) * sizes.chunk_size))
                behind = chunk + 1
            first += chunks
        return found

    def _place(self, newer: int, sizes: Sizes, chunk: int) -> int:
        """Where a chunk with this number counts, if `newer` frames lie before the chain."""
        frames = max(newer + (chunk + 1) * sizes.chunk_frames, self.least_frames)
        return math.floor(STEPS_PER_OCTAVE * math.log2(frames))

    def completed(self, namespace: bytes, sizes: Sizes, keys: Sequence[bytes]) -> None:
        """Counts the chunks that a request has completed by its end, of which `keys` is the whole chain."""
        mark, new = hash(namespace), list[int]()
        for key in reversed(keys):
            if (name := hash(key) ^ mark) in self._uses:
                break
            new.append(name)
        if new:
            self._uses.update(dict.fromkeys(new, self._stack.push(sizes.chunk_frames, len(new))))
            if sizes.sparse:
                self._resumable.update(new)
            self._forget()

    def window(self, name: str, now_s: float) -> "Window":
        """The lookups of about the last hour or day, or all (see WINDOWS)."""
        self._windows[name].advance(now_s)
        return self._windows[name]

    def exact_frames(self) -> int | None:
        """Up to this size the curves are exact; None if nothing was forgotten."""
        return self._stack.frames if self._stack.forgot else None

    def _forget(self) -> None:
        while len(self._uses) > self.max_keys or self._stack.frames > self.max_frames:
            name, request = self._uses.popitem(last=False)
            self._resumable.discard(name)
            self._stack.take(request, 1)
            self._stack.forgot = True


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
    """The frames of the chunks that each request was the last to use, summed over all later requests. To be
    quick, requests lie in blocks, and each block has its sum."""

    def __init__(self) -> None:
        self.frames = 0
        self.forgot = False
        self._next = 0
        self._first_block = 0
        self._sums: list[int] = []
        self._blocks: list[list[int]] = []
        self._sizes: list[list[int]] = []

    def push(self, chunk_frames: int, chunks: int) -> int:
        """Adds a request that is the last to use so many chunks; returns its number."""
        if self._next % _BLOCK == 0:
            self._sums.append(0)
            self._blocks.append([])
            self._sizes.append([])
        self._blocks[-1].append(chunk_frames * chunks)
        self._sizes[-1].append(chunk_frames)
        self._sums[-1] += chunk_frames * chunks
        self.frames += chunk_frames * chunks
        self._next += 1
        return self._next - 1

    def take(self, request: int, chunks: int) -> None:
        """Some of this request's chunks were used by another, or are forgotten."""
        block, place = self._place(request)
        frames = chunks * self._sizes[block][place]
        self._blocks[block][place] -= frames
        self._sums[block] -= frames
        self.frames -= frames
        while len(self._sums) > 1 and not self._sums[0]:
            self._first_block += 1
            for column in (self._sums, self._blocks, self._sizes):
                del column[0]

    def newer(self, request: int) -> int:
        """The frames of all requests after this one."""
        block, place = self._place(request)
        return sum(self._sums[block + 1 :]) + sum(self._blocks[block][place + 1 :])

    def _place(self, request: int) -> tuple[int, int]:
        block, place = divmod(request, _BLOCK)
        return block - self._first_block, place


def _names(namespace: bytes, keys: Sequence[bytes]) -> list[int]:
    """Short names of chunks, which take less memory than keys. Two hardly ever have the same."""
    mark = hash(namespace)
    return [hash(key) ^ mark for key in keys]
