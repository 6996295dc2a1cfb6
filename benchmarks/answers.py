"""What answers cost, and what they are worth, if they are stored: the trace of the replay through the real server.

Each request of the trace also gets an answer. The trace has its length, which is rounded up to whole chunks. If answers
are a part of the next prompt, the answer is what the next prompt has behind this one. Thinking models drop their
thoughts: then no later prompt has any of the answer, and it is longer. Three servers see the same requests: one is
given prompts only, one everything alike, and one answers as the connector stores them, which are the first to be
evicted until a later prompt reads them.
"""

import gzip
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from replay import CHUNK, TRACE, Request, main, rate, replay

CAPACITY = 10_000
THINKING = 15
"""So many times as long is an answer with its thoughts."""
LOSS = 0.0002


class Answers(NamedTuple):
    """Of each request, the ids of the chunks of its answer."""

    name: str
    ids: list[tuple[int, ...]]


def output_tokens() -> list[int]:
    with gzip.open(TRACE, "rt") as lines:
        return [json.loads(line)["output_length"] for line in lines]


def continued(requests: Sequence[Request], chunks: Sequence[int]) -> list[tuple[int, ...]]:
    """Answers of so many chunks each, which the next prompt that begins with this one has behind it. An answer
    that nobody continues has ids of its own."""
    behind: dict[tuple[int, ...], tuple[int, ...]] = {}
    answers = []
    fresh = 1 << 40
    for request, count in zip(reversed(requests), reversed(chunks), strict=True):
        answers.append((*behind.get(request.ids, ()), *range(fresh, fresh + count))[:count])
        fresh += count
        for end in range(1, len(request.ids)):
            behind[request.ids[:end]] = request.ids[end:]
    return answers[::-1]


def dropped(chunks: Sequence[int]) -> list[tuple[int, ...]]:
    """Answers that no later prompt has."""
    starts = [(1 << 40) + sum(chunks[:number]) for number in range(len(chunks))]
    return [tuple(range(start, start + count)) for start, count in zip(starts, chunks, strict=True)]


def measure(requests: Sequence[Request]) -> dict[str, Any]:
    tokens = output_tokens()
    chunks, long = ([-(-times * each // CHUNK) for each in tokens] for times in (1, THINKING))
    kinds = (
        Answers("answers are part of the next prompt", continued(requests, chunks)),
        Answers("answers are dropped", dropped(chunks)),
        Answers(f"dropped, and {THINKING} times as long", dropped(long)),
    )
    rows, bars = [], []
    for kind in kinds:
        policies: list[dict[str, Any]] = [
            {},
            {"answers": kind.ids, "answers_once": False},
            {"answers": kind.ids, "answers_once": True},
        ]
        rates = [
            rate(requests, replay(requests, CAPACITY, loads=False, checksums=False, **policy).hits)
            for policy in policies
        ]
        rows.append([kind.name, f"{sum(map(len, kind.ids)):,}", *rates])
        print(*rows[-1], flush=True)
        prompts, _, ours = map(float, rates)
        bar = f"{kind.name}: at most {LOSS} below prompts only"
        bars.append({"bar": bar, "measured": f"{ours} against {prompts}", "met": ours >= prompts - LOSS})
    columns = ["", "chunks of answers", "prompts only", "everything alike", "answers first out, as stored"]
    caption = f"Token hit rates, room for {CAPACITY:,} chunks."
    return {"tables": [{"caption": caption, "columns": columns, "rows": rows}], "bars": bars}


if __name__ == "__main__":
    main("answers", "Answers must not push prompts out", str(__doc__), measure)
