"""What the hint is worth that a prompt will not come back: the trace of the replay through the real server.

A prompt that nobody repeats or continues in the rest of the trace may be sent with the hint. Half of these
prompts are, chosen at random; then also as many that do come back as make 5 % of the hints wrong.
"""

import random
from collections.abc import Collection, Sequence
from typing import Any

from replay import Request, main, rate, replay

CAPACITIES = (5_000, 10_000)
WRONG = 0.05


def never_back(requests: Sequence[Request]) -> list[int]:
    """The numbers of the requests whose last full chunk no later request has."""
    seen: set[int] = set()
    alone = []
    for number in range(len(requests) - 1, -1, -1):
        ids = requests[number].ids
        if ids and ids[-1] not in seen:
            alone.append(number)
        seen.update(ids)
    return alone[::-1]


def hinted(requests: Sequence[Request]) -> dict[str, set[int]]:
    """The numbers of the requests with the hint, by the name of the run."""
    alone, choose = never_back(requests), random.Random(0)
    half = choose.sample(alone, len(alone) // 2)
    back = sorted({number for number, request in enumerate(requests) if request.ids} - set(alone))
    wrong = choose.sample(back, round(len(half) * WRONG / (1 - WRONG)))
    return {
        "no hints": set(),
        "half of the prompts that never come back": set(half),
        f"the same, {WRONG:.0%} of the hints wrong": {*half, *wrong},
        "all prompts that never come back": set(alone),
    }


def measure(requests: Sequence[Request]) -> dict[str, Any]:
    rows, bars = [], []
    for name, once in hinted(requests).items():
        rates = [_rate(requests, capacity, once) for capacity in CAPACITIES]
        rows.append([name, f"{len(once):,}", *rates])
        print(*rows[-1], flush=True)
        if not once:
            plain = rates
        elif len(rows) == 2:
            measured = f"{', '.join(rates)} against {', '.join(plain)}"
            met = all(float(ours) > float(theirs) for ours, theirs in zip(rates, plain, strict=True))
            bars.append({"bar": "hints raise the token hit rate", "measured": measured, "met": met})
    columns = ["hints", "hinted requests", *(f"room for {capacity:,} chunks" for capacity in CAPACITIES)]
    return {"tables": [{"caption": "Token hit rates.", "columns": columns, "rows": rows}], "bars": bars}


def _rate(requests: Sequence[Request], capacity: int, once: Collection[int]) -> str:
    return rate(requests, replay(requests, capacity, loads=False, once=once, checksums=False).hits)


if __name__ == "__main__":
    main("once", "The hint that a prompt will not come back", str(__doc__), measure)
