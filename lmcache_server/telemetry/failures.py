"""Recent failures for the status page: a short list, however many there are."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

MAX_FAILURES = 20
MAX_SENTENCE = 500
"""Longer reasons are cut to this many characters."""


@dataclass
class _Failure:
    first_s: float
    last_s: float
    count: int = 0
    reason: str = ""


class Failures:
    """The latest failures. A failure that one engine repeats is one entry with a count; otherwise an hour of
    repeats would push out everything else."""

    def __init__(self) -> None:
        self._failures: OrderedDict[tuple[str, str], _Failure] = OrderedDict()

    def add(self, now_s: float, what: str, engine_id: str, reason: str, count: int = 1) -> None:
        """`what` is one of a few phrases, such as "load failed"; `engine_id` may be empty."""
        failure = self._failures.setdefault((what, engine_id), _Failure(now_s, now_s))
        failure.last_s, failure.reason = now_s, reason[:MAX_SENTENCE]
        failure.count += count
        self._failures.move_to_end((what, engine_id))
        if len(self._failures) > MAX_FAILURES:
            self._failures.popitem(last=False)

    def report(self, now_s: float) -> list[dict[str, Any]]:
        """All entries, the latest first; ages in seconds."""
        return [
            {"what": what, "engine_id": engine_id, "sentence": failure.reason, "count": failure.count,
             "age_s": round(now_s - failure.last_s, 3), "first_age_s": round(now_s - failure.first_s, 3)}
            for (what, engine_id), failure in reversed(self._failures.items())
        ]  # fmt: skip
