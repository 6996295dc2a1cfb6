"""What `lmcache warm` makes of the server's counters. No cache is claimed to work here: see tests/engine."""

import itertools
from typing import Any

import pytest

from lmcache_server.commands import warm
from lmcache_server.commands.verify.engine import Answer
from lmcache_server.commands.verify.prompts import Case
from lmcache_server.commands.warm import Counts


class Asked:
    """Answers at once, as vLLM does before its stores have ended."""

    def ask(self, prompt: Any, _max_tokens: int) -> Answer:
        return Answer(prompt_ids=list(prompt))


def run(counts: list[Counts], prompts: int = 1) -> tuple[list[str], Counts]:
    """The counters are read in this order, and the last stays."""
    reads, lines = itertools.chain(counts, itertools.repeat(counts[-1])), list[str]()
    cases = [Case(f"line {number}", [5] * 9, [5] * 9) for number in range(prompts)]
    return lines, warm.warm(Asked(), cases, lambda: next(reads), lines.append)  # type: ignore[arg-type]


def test_a_prompt_is_over_when_its_stores_are() -> None:
    half = Counts(9, 13, 20, 30, writing=5)
    lines, total = run([Counts(1, 10, 20, 30), Counts(9, 10, 20, 30), half, half, Counts(9, 14, 22, 30)])
    assert total == Counts(8, 4, 2, 0)
    assert lines == [f"line 0, 9 tokens: {total}"]


def test_a_prompt_without_stores_is_not_waited_for_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "SETTLE_S", 0.3)
    lines, total = run([Counts(1, 2, 3, 4)], prompts=2)
    assert len(lines) == 2
    assert total == Counts(0, 0, 0, 0)


@pytest.mark.parametrize(
    ("total", "right", "words"),
    [
        (Counts(0, 7, 0, 0), True, "7 objects stored"),
        (Counts(256, 0, 0, 0), True, "256 tokens were there"),
        (Counts(0, 0, 4, 0), True, "4 there already"),
        (Counts(0, 0, 0, 0), False, "nothing was stored"),
        (Counts(256, 7, 4, 1), False, "give the server more memory"),
    ],
)
def test_the_verdict_is_about_what_the_server_holds(total: Counts, right: bool, words: str) -> None:
    verdict = warm.verdict(total)
    assert verdict[0] == right
    assert words in verdict[1]


def test_counters_of_a_status_that_are_the_same_to_a_user_are_one() -> None:
    objects = {"stored": 1, "present": 2, "busy": 3, "no_room": 4, "once": 5, "failed": 6}
    report = {"objects": objects, "tokens": {"hit": 7}, "l1": {"reserved_bytes": 8}}
    assert warm.counts(report) == Counts(7, 1, 5, 10, 8)
