"""What to fetch from tiers: what a resume needs and L1 lacks, if that pays at the speed of the tiers."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lmcache_server.core.layout import Layout

OLD_S, SLOW_OLD_S = 60.0, 5.0
"""A speed is unknown again after OLD_S seconds; one at which a fetch does not pay after SLOW_OLD_S."""
UNKNOWN_SHARE = 0.05
"""While nobody knows how fast a tier is, a request waits for this share of the time that computing takes."""


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
    groups = range(len(layout.groups))
    first = [layout.first_needed_chunk(group, resume_tokens, computed_tokens) for group in groups]
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
        self.tried_s = -math.inf
        """When the fetch began that measures it now. Its reads may hang, so after OLD_S another may measure
        it."""

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


class Choice(NamedTuple):
    """A fetch for which the request waits, at most `wait_s`. It will tell the speeds that are `unknown`."""

    wait_s: float
    unknown: list[Speed]


def choose(reads: Sequence[tuple[Speed, int, float]], saved_s: float, now_s: float) -> Choice | None:
    """Whether to fetch what takes `saved_s` to compute. `reads` has, of each tier: its speed, the bytes to
    read, and how long a limit lets them wait."""
    seconds = sum(max(speed.seconds(num_bytes), delay_s) for speed, num_bytes, delay_s in reads)
    is_slow = sum(speed.seconds(num_bytes) for speed, num_bytes, _ in reads) > saved_s
    unknown = [speed for speed, *_ in reads if speed.is_old(now_s, SLOW_OLD_S if is_slow else OLD_S)]
    if any(now_s - speed.tried_s < OLD_S for speed in unknown) or (seconds > saved_s and not unknown):
        return None
    wait_s = saved_s * (UNKNOWN_SHARE if unknown else 1.0)
    return Choice(wait_s if seconds <= saved_s else 0.0, unknown)
