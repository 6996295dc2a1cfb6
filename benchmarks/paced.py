"""Questions that are asked at a rate. It needs nothing but Python, so that LMCache's client can use it, too."""

import random
import time
from collections.abc import Callable
from typing import Any

WINDOW = 32
"""So many questions of a client are open while the ceiling is measured."""
STEP_S = 0.01
END_S = 60.0


def paced(
    rate: float,
    seconds: float,
    seed: int,
    ask: Callable[[], Any],
    wait: Callable[[Any, float], object],
    take: Callable[[Any], bool],
) -> list[float]:
    """Asks `rate` questions a second, or as many as WINDOW allows if that is 0. Returns the seconds of each, from when
    it was due until its answer was taken; with rate 0 only of those answered in time.

    `ask` returns what `wait` waits for, for so many seconds at most. `take` says whether it is answered, and ends it.
    """
    pick, due_s, begun_s = random.Random(seed), 0.0, time.perf_counter()
    waiting, times = list[tuple[float, Any]](), list[float]()
    while True:
        now_s = time.perf_counter() - begun_s
        is_over = now_s >= seconds
        if not is_over and now_s >= due_s and (rate or len(waiting) < WINDOW):
            waiting.append((due_s if rate else now_s, ask()))
            due_s += pick.expovariate(rate) if rate else 0.0
            continue
        if is_over and not (rate and waiting):
            for _, each in waiting:
                finish(each, wait, take)
            return times
        assert now_s < seconds + END_S, "not all questions are answered"
        pause_s = STEP_S if is_over or not rate else min(STEP_S, due_s - now_s)
        if waiting:
            wait(waiting[0][1], pause_s)
        else:
            time.sleep(pause_s)
        left = []
        for asked_s, each in waiting:
            if take(each):
                times.append(time.perf_counter() - begun_s - asked_s)
            else:
                left.append((asked_s, each))
        waiting = left


def finish(each: Any, wait: Callable[[Any, float], object], take: Callable[[Any], bool]) -> None:
    limit_s = time.perf_counter() + END_S
    while not take(each):
        assert time.perf_counter() < limit_s, "a question is not answered"
        wait(each, STEP_S)
