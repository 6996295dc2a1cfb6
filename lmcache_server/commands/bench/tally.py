"""The sum of any number of samples, in a bounded size."""

import math
from collections import Counter

from lmcache_server.commands.bench.measure import Sample

STEPS = 100
"""A time is known to one part in this many."""


class Tally:
    """Counts samples by their times. Lost ones are counted and are in no other figure."""

    def __init__(self) -> None:
        self.lost = 0
        self.num_bytes = 0
        self.max_s = 0.0
        self._times: Counter[int] = Counter()
        """How many samples took e ** (key / STEPS) seconds."""

    def add(self, sample: Sample) -> None:
        if sample.lost:
            self.lost += 1
            return
        self._times[round(STEPS * math.log(max(sample.seconds, 1e-9)))] += 1
        self.num_bytes += sample.num_bytes
        self.max_s = max(self.max_s, sample.seconds)

    def merge(self, other: "Tally") -> None:
        self._times += other._times
        self.lost += other.lost
        self.num_bytes += other.num_bytes
        self.max_s = max(self.max_s, other.max_s)

    @property
    def count(self) -> int:
        return self._times.total()

    def quantile_s(self, share: float) -> float:
        """A time that this share of the samples, and no smaller one, took at most. 0 without samples."""
        passed = 0
        for key, count in sorted(self._times.items()):
            passed += count
            if passed >= share * self.count:
                return min(math.exp(key / STEPS), self.max_s)
        return 0.0
