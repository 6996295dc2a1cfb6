"""Decides about tiers: what to fetch, whether that pays, and when a tier is left alone."""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lmcache_server.core.placement import Layout

FAILURES, WITHIN_S = 3, 10.0
RETRY_S, MAX_RETRY_S = 5.0, 15.0
OLD_S, SLOW_OLD_S = 60.0, 5.0
"""A speed is unknown again after OLD_S seconds; one at which a fetch does not pay after SLOW_OLD_S."""
PRESENT, READ, WRITE = "present", "read", "write"
"""Kinds of calls. A tier may fail in one and do well in another."""


class Breaker:
    """Leaves a tier alone after FAILURES of one kind of call in a row, within WITHIN_S seconds. Then one call
    tries it: after RETRY_S seconds and, while it still fails, after twice as long each time. A tier that
    answers is used again, but on trial: until a call of the kind that failed succeeds, one failure is
    enough."""

    def __init__(self) -> None:
        self.is_open = False
        self._failed_s: dict[str, deque[float]] = {}
        """By kind of call, when the last ones failed that no success has followed."""
        self._trial = ""
        """The kind of call that must succeed."""
        self._delay_s = RETRY_S
        self._retry_s = 0.0

    def tries(self, now_s: float) -> bool:
        """Whether it is time for the call that tries a tier which is left alone."""
        if not self.is_open or now_s < self._retry_s:
            return False
        self._retry_s = now_s + self._delay_s
        return True

    def answers(self) -> None:
        """The call that tried it has succeeded."""
        self.is_open = False
        self.succeeded(PRESENT)

    def succeeded(self, call: str) -> None:
        self._failed_s.pop(call, None)
        if not self.is_open and self._trial in ("", call):
            self._trial, self._delay_s = "", RETRY_S

    def failed(self, now_s: float, call: str) -> None:
        failed_s = self._failed_s.setdefault(call, deque(maxlen=FAILURES))
        failed_s.append(now_s)
        if self.is_open or self._trial == call:
            self._delay_s = min(2 * self._delay_s, MAX_RETRY_S)
            self.is_open, self._retry_s = True, now_s + self._delay_s
        elif len(failed_s) == FAILURES and now_s - failed_s[0] <= WITHIN_S:
            self._trial = call
            self.open(now_s)

    def open(self, now_s: float) -> None:
        """Leave the tier alone from now on."""
        if not self.is_open:
            self.is_open, self._retry_s = True, now_s + self._delay_s


class Wanted(NamedTuple):
    """An object that a resume needs and L1 lacks: chunk number `chunk` of the chain, written by `rank`."""

    chunk: int
    group: int
    rank: int


def wanted(
    layout: Layout, ready: Sequence[int], resume_tokens: int, computed_tokens: int
) -> Iterator[Wanted]:
    """What a resume at `resume_tokens` needs and L1 lacks, in the order of the chain. `ready` has, per chunk,
    the bits of its ready objects; the engine itself holds `computed_tokens`."""
    size, end = layout.chunk_size, resume_tokens // layout.chunk_size
    first = [
        layout.first_needed_chunk(group, resume_tokens, computed_tokens)
        for group in range(len(layout.groups))
    ]
    for chunk in range(min(first, default=end), end):
        for group, spec in enumerate(layout.groups):
            if first[group] <= chunk and spec.stored_blocks(chunk, size):
                for rank in layout.holders[group]:
                    if not ready[chunk] >> layout.bit(group, rank) & 1:
                        yield Wanted(chunk, group, rank)


class Speed:
    """How fast a tier has been read lately: bytes per second of whole fetches."""

    def __init__(self) -> None:
        self.bytes_per_s = 0.0
        """0 while unknown."""
        self._measured_s = -math.inf

    def add(self, num_bytes: int, seconds: float, now_s: float) -> None:
        rate = num_bytes / max(seconds, 1e-6)
        # The mean of the times, not of the rates: a tier that has become slow must soon count as slow.
        share = 0.7 if rate > self.bytes_per_s else 0.3
        self.bytes_per_s = 1 / ((1 - share) / self.bytes_per_s + share / rate) if self.bytes_per_s else rate
        self._measured_s = now_s

    def is_old(self, now_s: float, after_s: float = OLD_S) -> bool:
        return now_s - self._measured_s > after_s

    def seconds(self, num_bytes: int) -> float:
        """How long a fetch of so many bytes will take; 0 if that is unknown."""
        return num_bytes / self.bytes_per_s if self.bytes_per_s else 0.0
