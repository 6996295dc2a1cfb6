"""The last hour of some counters for the status page: how much each grew in every interval."""

from collections import deque
from collections.abc import Mapping
from typing import Any

INTERVAL_S = 5.0
INTERVALS = 720
"""An hour."""


class History:
    """Growth of counters per interval. The first update starts the first interval."""

    def __init__(self) -> None:
        self._ended = 0
        self._started_s = 0.0
        self._totals: dict[str, float] = {}
        self._growth: dict[str, deque[float]] = {}

    def update(self, now_s: float, totals: Mapping[str, float]) -> None:
        """Call this more often than every INTERVAL_S, always with the same counters. Growth during a longer
        pause counts for the interval that ended last."""
        if not self._totals:
            self._started_s = now_s
            self._totals = dict(totals)
            self._growth = {name: deque(maxlen=INTERVALS) for name in totals}
        new = int((now_s - self._started_s) / INTERVAL_S) - self._ended
        if new <= 0:
            return
        self._ended += new
        for name, total in totals.items():
            self._growth[name] += [0.0] * min(new - 1, INTERVALS) + [total - self._totals[name]]
        self._totals = dict(totals)

    def report(self) -> dict[str, Any]:
        """The growth of each counter in the last of `ended` intervals, the oldest first."""
        growth = {name: list(map(int, values)) for name, values in self._growth.items()}
        return {"interval_s": INTERVAL_S, "ended": self._ended, "growth": growth}
