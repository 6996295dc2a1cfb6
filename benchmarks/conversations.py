"""How many conversations at a time can an L1 of 100 GB hold, if the model is a hybrid one?

The model is Gemma 3 27B in bfloat16. For a chunk of 512 tokens, full attention takes 40 MiB, and the windows of 1,024
tokens take 208 MiB. In the benchmark's server, a frame of 64 KiB stands for 40 MiB. So L1 has 2,560 frames, and the
windows at a chunk take five. Each request does what the connector does, and the connector's own rule decides which
objects it stores. The engine has no cache of its own here, so it asks the server for every token.

The conversations are made up. Each person holds one conversation at a time, and begins another when it ends. All
conversations begin with the same system prompt of 1,500 tokens, like those of an assistant with some tools. The first
message has a document (median 3,000 tokens) or, in long conversations, a part of a program (median 12,000). Later
messages have a median of 80 tokens, and answers have a median of 300. A conversation has 8 turns on average. People
think for a minute (median), and every tenth time for seven minutes or more. One turn in ten asks for another answer to
the same prompt, and one in twenty changes an earlier question.
"""

import heapq
import itertools
import math
import random
from typing import Any

from admission import WINDOWS, Arm
from admission import replay as replayed
from replay import CHUNK, Request, main, oracle, rate

FRAME_MIB = 40
FRAMES = 100 * 1024 // FRAME_MIB
PEOPLE = (8, 16, 32, 64, 128)
DOCUMENTS = {"short": (3000, 0.8), "long": (12_000, 0.8)}
REQUESTS = 16
"""Of each person."""
SYSTEM_TOKENS = 1500
MOST_TOKENS = 65_536
TURNS = 8
QUESTION, ANSWER, THINKING_S = (80, 1.0), (300, 0.7), (60.0, 1.5)
"""Like DOCUMENTS, log-normal: the median, and the standard deviation of the logarithm."""
ANOTHER_ANSWER, EARLIER_QUESTION = 0.1, 0.05
NEARLY = 0.9
"""L1 holds so many conversations if its hits are this share of those of an L1 without limit."""
ARMS = (
    Arm("everything (`lmcache.mp.store_everything`)", WINDOWS, False),
    Arm("the rule (default)", WINDOWS, True),
)


def conversations(people: int, document: tuple[float, float], seed: int = 0) -> list[Request]:
    """The requests of so many people, in the order of their arrival. `ids` are those of the full chunks of a
    prompt and its answer."""
    draw, fresh = random.Random(seed), itertools.count()
    chunks: dict[tuple[int, tuple[int, ...]], int] = {}

    def size(median: float, spread: float) -> float:
        return draw.lognormvariate(math.log(median), spread)

    def text(median: float, spread: float) -> list[int]:
        return [next(fresh)] * (1 + round(size(median, spread)))

    system = text(SYSTEM_TOKENS, 0)
    arrivals = [(size(*THINKING_S), person) for person in range(people)]
    heapq.heapify(arrivals)
    # Of each person's conversation, the prompts and answers of all turns so far.
    turns: list[list[tuple[list[int], list[int]]]] = [[] for _ in range(people)]
    requests = []
    while len(requests) < people * REQUESTS:
        now_s, person = arrivals[0]
        held, chance = turns[person], draw.random()
        if not held or draw.random() < 1 / TURNS or len(held[-1][0]) > MOST_TOKENS:
            held[:], prompt = [], system + text(*document)
        elif chance < ANOTHER_ANSWER:
            prompt, _ = held.pop()
        else:
            if chance < ANOTHER_ANSWER + EARLIER_QUESTION:
                del held[draw.randrange(len(held)) + 1 :]
            prompt = [*itertools.chain(*held[-1]), *text(*QUESTION)]
        held.append((prompt, text(*ANSWER)))
        whole, ids, last = [*prompt, *held[-1][1]], list[int](), -1
        for start in range(0, len(whole) - CHUNK + 1, CHUNK):
            last = chunks.setdefault((last, tuple(whole[start : start + CHUNK])), len(chunks))
            ids.append(last)
        requests.append(Request(len(prompt), tuple(ids)))
        heapq.heapreplace(arrivals, (now_s + size(*THINKING_S), person))
    return requests


def measure(_trace: Any) -> dict[str, Any]:
    tables, bars = [], []
    for kind, document in DOCUMENTS.items():
        rows, held = [], dict[str, int]()
        for people in PEOPLE:
            requests = conversations(people, document)
            most = float(rate(requests, oracle(requests, 1 << 40)[0]))
            tokens = sum(request.tokens for request in requests) / len(requests)
            row = [f"{people}", f"{len(requests):,}", f"{tokens:,.0f}"]
            for arm in ARMS:
                outcome = replayed(requests, arm, FRAMES)
                row += [outcome.hit_rate, f"{outcome.frames_written * FRAME_MIB / 1024 / len(requests):.2f}"]
                if float(outcome.hit_rate) >= NEARLY * most:
                    held[arm.name] = people
            rows.append([*row, f"{most:.4f}"])
            print(kind, *rows[-1], flush=True)
        columns = ["conversations at a time", "requests", "tokens of a prompt"]
        columns += [text for arm in ARMS for text in (f"{arm.name}: token hit rate", "GB written a request")]
        columns.append("token hit rate without limit")
        tables.append({"caption": f"{kind.title()} conversations.", "columns": columns, "rows": rows})
        everything, rule = (held.get(arm.name, 0) for arm in ARMS)
        bar = f"{kind} conversations that get at least {NEARLY:.0%} of all possible hits: more with the rule"
        measured = f"{rule} at a time, {everything} if everything is stored"
        bars.append({"bar": bar, "measured": measured, "met": rule > everything})
    return {"tables": tables, "bars": bars}


if __name__ == "__main__":
    main("conversations", "Conversations with a hybrid model in 100 GB", str(__doc__), measure)
