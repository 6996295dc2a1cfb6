"""What went wrong lately, for the status page: few entries, however much fails."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

MAX_FAILURES = 20
MAX_SENTENCE = 500
"""Characters of a sentence that are kept."""


@dataclass
class _Failure:
    first_s: float
    last_s: float
    count: int
    sentence: str


class Failures:
    """The latest failures. What happens to one engine again and again is one entry with a count, or an hour
    of it would leave room for nothing else."""

    def __init__(self) -> None:
        self._failures: OrderedDict[tuple[str, str], _Failure] = OrderedDict()

    def add(self, now_s: float, what: str, engine_id: str, sentence: str, count: int = 1) -> None:
        """`what` is one of few phrases, such as "load failed"; `engine_id` is empty where there is none."""
        failure = self._failures.setdefault((what, engine_id), _Failure(now_s, now_s, 0, ""))
        failure.last_s, failure.sentence = now_s, sentence[:MAX_SENTENCE]
        failure.count += count
        self._failures.move_to_end((what, engine_id))
        if len(self._failures) > MAX_FAILURES:
            self._failures.popitem(last=False)

    def report(self, now_s: float) -> list[dict[str, Any]]:
        """The latest first; ages in seconds."""
        return [
            {"what": what, "engine_id": engine_id, "sentence": failure.sentence, "count": failure.count,
             "age_s": round(now_s - failure.last_s, 3), "first_age_s": round(now_s - failure.first_s, 3)}
            for (what, engine_id), failure in reversed(self._failures.items())
        ]  # fmt: skip
