"""The hits that other sizes of L1 would have had.

For each size there is a ghost. It follows every lookup, and knows which chunks such an L1 would have now.
Ghosts forget the least recently used chunks first. So one list serves all: the requests, each with the chunks
that no later one has used. A ghost is a place in that list.
"""

import itertools
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MULTIPLES = (0.25, 0.5, 1, 2, 4, 10)
"""The sizes of the ghosts, as multiples of L1. One more has no limit."""
SIZES = (*map(str, MULTIPLES), "unlimited")
"""Their names in a report."""
Counts = NDArray[np.int64]
"""The tokens that were looked up and that the engine did not hold; and, for each size, how many of these its
ghost found."""
PERIOD_S = 300.0
WINDOWS = {"hour": 12, "day": 288, "start": 0}
"""By name, the number of periods; "start" stands for all since the start."""
MAX_KEYS = 1_000_000
MOST = 32
"""Times what L1 holds: no more is remembered."""
MAX_CHUNKS = 16_384
"""Of one lookup. Further ones are not counted: that would keep other clients waiting."""
MAX_RUNS = 256
"""Of one lookup: runs of chunks that the same request used last. An honest chain has few."""
MAX_NAMESPACES = 16
OTHERS = b""
"""Stands for all namespaces beyond MAX_NAMESPACES."""
_ALL = (1 << len(SIZES)) - 1


@dataclass(frozen=True)
class Sizes:
    """Of one namespace: the tokens of a chunk, and the frames that its full attention takes on all shards.
    With `sparse`, requests resume only where windows or states are stored, not at every chunk; with `states`,
    none is stored of an answer."""

    chunk_size: int
    chunk_frames: int
    sparse: bool = False
    states: bool = False


class _Ghost:
    """The chunks that an L1 of some size would have: the first `left` of the request `oldest`, and all of
    later requests. They take `frames`."""

    def __init__(self) -> None:
        self.frames = self.oldest = self.left = 0

    def has(self, request: int, chunks: int) -> int:
        """How many of a request's first `chunks` it has."""
        return chunks if request > self.oldest else min(chunks, self.left) if request == self.oldest else 0

    def take(self, request: int, chunks: int, chunk_frames: int) -> None:
        """This request loses its first `chunks`."""
        taken = self.has(request, chunks)
        self.frames -= taken * chunk_frames
        if request == self.oldest:
            self.left -= taken

    def trim(self, frames: float, requests: dict[int, tuple[list[int], int]]) -> None:
        """Forgets the oldest requests first, each from its end, until the rest fits."""
        while self.frames > frames:
            if not self.left:
                self.oldest += 1
                self.left = len(requests.get(self.oldest, ((), 0))[0])
                continue
            chunk_frames = requests[self.oldest][1]
            forgotten = min(self.left, math.ceil((self.frames - frames) / chunk_frames))
            self.left -= forgotten
            self.frames -= forgotten * chunk_frames


class Demand:
    """The ghosts, and their hits by namespace. At most `max_keys` chunks are remembered."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self.max_keys = max_keys
        self.l1_frames = math.inf
        """The size of L1 that MULTIPLES multiply."""
        self._ghosts = [_Ghost() for _ in SIZES]
        self._uses: dict[int, int] = {}
        """By chunk, the number of the request that used it last."""
        self._requests: dict[int, tuple[list[int], int]] = {}
        """By request, the chunks that no later one has used, and the frames of a chunk."""
        self._stored: dict[int, int] = {}
        """By chunk, a bit for each ghost with windows and states at the chunk's end."""
        self._first, self._last, self._listed = 1, 0, 0
        """The first and the last request number, and how many chunks all have; some count twice."""
        self._forgot = False
        self._periods: deque[tuple[int, dict[bytes, Counts]]] = deque(maxlen=WINDOWS["day"])
        self._since_start: dict[bytes, Counts] = {}
        """What was counted, by namespace: in each period with a lookup, and in total."""

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
        limit_tokens = min(limit_tokens, MAX_CHUNKS * sizes.chunk_size)
        names = _names(namespace, keys[: limit_tokens // sizes.chunk_size])
        if not names:
            return
        hits = held = self._take(names)
        if sizes.sparse:
            hits = self._resume(names, held)
        behind = computed_tokens // sizes.chunk_size
        found = [max(chunks - behind, 0) * sizes.chunk_size for chunks in hits]
        self._count(namespace, np.array([max(limit_tokens - computed_tokens, 0), *found]), now_s)
        self._use(names, sizes.chunk_frames)

    def completed(self, namespace: bytes, sizes: Sizes, keys: Sequence[bytes]) -> None:
        """Counts the chunks that a request has completed by its end, of which `keys` is the whole chain."""
        names = reversed(_names(namespace, keys[:MAX_CHUNKS]))
        if new := list(itertools.takewhile(lambda name: name not in self._uses, names)):
            self._use(new[::-1], sizes.chunk_frames)
            if sizes.sparse and not sizes.states:
                self._stored.update(dict.fromkeys(new, _ALL))

    def _take(self, names: list[int]) -> list[int]:
        """Takes these chunks from the requests that used them last. Returns how many of the first ones each
        ghost has without a gap."""
        held, first = [0] * len(SIZES), 0
        uses = [*map(self._uses.get, names), None]
        # A request that used a chunk has used all before it, so its chunks lie side by side.
        for request, run in itertools.islice(itertools.groupby(uses[: uses.index(None)]), MAX_RUNS):
            assert request is not None
            chunks = len(list(run))
            left, chunk_frames = self._requests.get(request, ([], 0))
            # Keys that form no chain are not moved.
            is_first = left[:chunks] == names[first : first + chunks]
            for number, ghost in enumerate(self._ghosts):
                held[number] += ghost.has(request, chunks) if held[number] == first else 0
                if is_first:
                    ghost.take(request, chunks, chunk_frames)
            if is_first:
                del left[:chunks]
                self._listed -= chunks
            if not left:
                self._requests.pop(request, None)
            first += chunks
        return held

    def _resume(self, names: list[int], held: list[int]) -> list[int]:
        """Each ghost has `held` of these chunks. Returns after how many it last has windows and states."""
        resumed = [0] * len(SIZES)
        for count, name in enumerate(names[: max(held)], 1):
            if stored := self._stored.get(name, 0):
                # A ghost that forgot the chunk and got it back lacks them.
                stored &= sum(1 << ghost for ghost, chunks in enumerate(held) if chunks >= count)
                self._stored[name] = stored
                resumed = [count if stored >> ghost & 1 else last for ghost, last in enumerate(resumed)]
        # They are stored where a prompt leaves L1's chunks, and at its end.
        for ghost, chunks in enumerate(held):
            if chunks:
                self._stored[names[chunks - 1]] = self._stored.get(names[chunks - 1], 0) | 1 << ghost
        self._stored[names[-1]] = _ALL
        return resumed

    def _use(self, names: list[int], chunk_frames: int) -> None:
        """Adds a request for these chunks, which none has. Forgets others, if it must."""
        self._last += 1
        self._requests[self._last] = names, chunk_frames
        self._uses.update(dict.fromkeys(names, self._last))
        limits = *(multiple * self.l1_frames for multiple in MULTIPLES), math.inf
        for ghost, limit in zip(self._ghosts, limits, strict=True):
            ghost.frames += len(names) * chunk_frames
            ghost.trim(limit, self._requests)
        self._listed += len(names)
        while self._listed > self.max_keys or self._ghosts[-1].frames > MOST * self.l1_frames:
            self._forgot = True
            old, frames = self._requests.pop(self._first, ([], 0))
            self._listed -= len(old)
            for ghost in self._ghosts:
                ghost.take(self._first, len(old), frames)
            for name in old:
                if self._uses.get(name) == self._first:
                    del self._uses[name]
                    self._stored.pop(name, None)
            self._first += 1

    def _count(self, namespace: bytes, counted: Counts, now_s: float) -> None:
        period = int(now_s // PERIOD_S)
        if not self._periods or self._periods[-1][0] != period:
            self._periods.append((period, {}))
        for counts in (self._periods[-1][1], self._since_start):
            _add(counts, namespace, counted)

    def window(self, name: str, now_s: float) -> dict[bytes, Counts]:
        """By namespace, the lookups of about the last hour or day, or all (see WINDOWS)."""
        if name == "start":
            return self._since_start
        window: dict[bytes, Counts] = {}
        for period, counts in self._periods:
            for namespace, counted in counts.items() if period > now_s // PERIOD_S - WINDOWS[name] else ():
                _add(window, namespace, counted)
        return window

    def exact_frames(self) -> int | None:
        """Ghosts up to this size are exact; None if nothing was forgotten."""
        return self._ghosts[-1].frames if self._forgot else None


def rates(counts: Iterable[Counts]) -> dict[str, Any]:
    """The tokens and hit rates of all these together, as JSON values."""
    tokens, *hits = sum(counts, np.zeros(1 + len(SIZES), np.int64)).tolist()
    shares = [round(each / max(tokens, 1), 4) for each in hits]
    return {"tokens": tokens, "hit_rates": dict(zip(SIZES, shares, strict=True))}


def _add(counts: dict[bytes, Counts], namespace: bytes, counted: Counts) -> None:
    name = namespace if namespace in counts or len(counts) < MAX_NAMESPACES else OTHERS
    counts[name] = counts[name] + counted if name in counts else counted


def _names(namespace: bytes, keys: Sequence[bytes]) -> list[int]:
    """Short names take less memory than keys. Two chunks hardly ever share one. A chain repeats no key, but a
    client may."""
    seed = hash(namespace)
    return list(dict.fromkeys(seed ^ hash(key) for key in keys))
