"""When a tier that fails is left alone, and when it is tried again."""

from collections import deque

FAILURES, WITHIN_S = 3, 10.0
RETRY_S, MAX_RETRY_S = 5.0, 15.0
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
        self.trial: set[str] = set()
        """The kinds of calls that had failed, until one of the kind succeeds."""
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
        if not self.is_open:
            self.trial.discard(call)
            self._delay_s = self._delay_s if self.trial else RETRY_S

    def failed(self, now_s: float, call: str) -> None:
        failed_s = self._failed_s.setdefault(call, deque(maxlen=FAILURES))
        failed_s.append(now_s)
        if self.is_open or call in self.trial:
            self._delay_s = min(2 * self._delay_s, MAX_RETRY_S)
            self.is_open, self._retry_s = True, now_s + self._delay_s
        elif len(failed_s) == FAILURES and now_s - failed_s[0] <= WITHIN_S:
            self.trial.add(call)
            self.open(now_s)

    def open(self, now_s: float) -> None:
        """Leave the tier alone from now on."""
        if not self.is_open:
            self.is_open, self._retry_s = True, now_s + self._delay_s
