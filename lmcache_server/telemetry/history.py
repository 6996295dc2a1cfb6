"""The last hour of some counters, for the status page: what each grew by in every few seconds."""

from collections import deque
from collections.abc import Mapping
from typing import Any

INTERVAL_S = 5.0
INTERVALS = 720
"""An hour."""


class History:
    """Growth of counters per interval; time is given, whole intervals count from the first call."""

    def __init__(self) -> None:
        self._ended = 0
        self._started_s = 0.0
        self._totals: dict[str, float] = {}
        self._grown: dict[str, deque[float]] = {}

    def update(self, now_s: float, totals: Mapping[str, float]) -> None:
        """Call it more often than every INTERVAL_S, always with the same counters. What they grew by while
        it was not called belongs to the interval that ended last."""
        if not self._totals:
            self._started_s = now_s
            self._totals = dict(totals)
            self._grown = {name: deque(maxlen=INTERVALS) for name in totals}
        ended = int((now_s - self._started_s) / INTERVAL_S)
        new = ended - self._ended
        if new <= 0:
            return
        self._ended = ended
        for name, total in totals.items():
            grown = self._grown[name]
            grown.extend([0.0] * min(new - 1, INTERVALS))
            grown.append(total - self._totals[name])
            self._totals[name] = total

    def report(self) -> dict[str, Any]:
        """Per counter what it grew by in the last of all `ended` intervals, the oldest first."""
        return {
            "interval_s": INTERVAL_S,
            "ended": self._ended,
            "growth": {name: list(map(int, grown)) for name, grown in self._grown.items()},
        }
