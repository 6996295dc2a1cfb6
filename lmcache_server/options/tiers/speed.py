"""How fast a tier is. fetches.py judges by it whether a fetch pays."""

import math

OLD_S, SLOW_OLD_S = 60.0, 5.0
"""A speed is unknown again after OLD_S seconds; one at which a fetch does not pay after SLOW_OLD_S."""


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
