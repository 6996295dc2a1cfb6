"""What `lmcache.retain_s` gives to agents that wait for tools, and what it costs the others.

The cache and the option are the server's own, with the trace's time. The others are the requests of a public trace.
The agents are made up: each has a job of several turns, begins another when it ends, and waits for a tool between two
turns. The engine has no cache of its own, so it asks for every token. Nothing is copied.
"""

import gzip
import heapq
import json
import math
import random
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from section import Section

from lmcache_client.contract.control import Retain
from lmcache_client.contract.geometry import FULL, GroupSpec
from lmcache_client.contract.keys import ROOT_KEY
from lmcache_server.core.cache import Cache, Layout, Reservation
from lmcache_server.options.retention.server import Server
from lmcache_server.telemetry.metrics import Metrics

TRACE = Path(__file__).resolve().parent / "data" / "mooncake_synthetic.jsonl.gz"
CHUNK, FRAME_BYTES = 512, 64 << 10
LAYOUT = Layout(b"n" * 32, CHUNK, (GroupSpec(FULL, CHUNK, 0, "", ()),), ((0,),))
SIZES = (2_500, 5_000, 10_000)
AGENTS, SYSTEM_CHUNKS, TURNS = 24, 6, 12
FIRST_CHUNKS, TURN_CHUNKS, TOOL_S = (20, 0.6), (2, 0.6), (90.0, 1.2)
"""Log-normal: the median, and the standard deviation of the logarithm."""
RETAIN_S = 600.0
SEEDS = 3


class Request(NamedTuple):
    at_s: float
    agent: bool
    keys: tuple[bytes, ...]


def key(*parts: object) -> bytes:
    return repr(parts).encode().rjust(32, b".")[-32:]


def others() -> list[Request]:
    with gzip.open(TRACE, "rt") as file:
        rows = [json.loads(line) for line in file]
    # The last, partial block is no chunk.
    whole = [(row, row["input_length"] // CHUNK) for row in rows]
    return [
        Request(row["timestamp"] / 1e3, False, tuple(key("trace", each) for each in row["hash_ids"][:chunks]))
        for row, chunks in whole
    ]


def agents(end_s: float, seed: int) -> list[Request]:
    draw, fresh, requests = random.Random(seed), count(), list[Request]()
    system = [key("system", each) for each in range(SYSTEM_CHUNKS)]

    def new(median: float, spread: float) -> list[bytes]:
        return [
            key(seed, next(fresh)) for _ in range(1 + round(draw.lognormvariate(math.log(median), spread)))
        ]

    due = [(draw.uniform(0, TOOL_S[0]), number) for number in range(AGENTS)]
    heapq.heapify(due)
    jobs = dict[int, tuple[list[bytes], int]]()
    while due[0][0] < end_s:
        now_s, number = due[0]
        prompt, left = jobs.get(number, ([], 0))
        prompt = [*prompt, *new(*TURN_CHUNKS)] if left else [*system, *new(*FIRST_CHUNKS)]
        jobs[number] = prompt, (left or TURNS) - 1
        requests.append(Request(now_s, True, tuple(prompt)))
        heapq.heapreplace(due, (now_s + draw.lognormvariate(math.log(TOOL_S[0]), TOOL_S[1]), number))
    return requests


def replay(requests: list[Request], frames: int, retain_s: float) -> dict[bool, float]:
    """The token hit rates of the agents (True) and of the others."""
    cache, clock = Cache(FRAME_BYTES, frames), SimpleNamespace(now_s=lambda: now_s)
    sessions = SimpleNamespace(joined_layout=lambda _session: LAYOUT)
    base: Any = SimpleNamespace(cache=cache, sessions=sessions, system=clock, metrics=Metrics())
    option, session = Server(base), SimpleNamespace(session_id=1)
    asked, hit = {True: 0, False: 0}, {True: 0, False: 0}
    for now_s, is_agent, keys in requests:
        option.tick(now_s)
        found = cache.lookup(LAYOUT, keys, 0, len(keys) * CHUNK, 1, now_s)
        cache.release(found.lease_id, 1)
        held = found.resume_tokens // CHUNK
        asked[is_agent] += len(keys)
        hit[is_agent] += held
        rooms, parent = list[Reservation](), keys[held - 1] if held else ROOT_KEY
        for each in keys[held:]:
            room = cache.reserve(LAYOUT, each, 0, 0, 1, FRAME_BYTES, parent)
            if isinstance(room, Reservation):
                cache.commit(room)
                rooms.append(room)
            parent = each
        option.stored(LAYOUT, rooms)
        cache.touch(LAYOUT.namespace, keys)
        if is_agent and retain_s:
            option.retain(session, Retain(keys, retain_s))  # type: ignore[arg-type]
    return {who: hit[who] / asked[who] for who in asked}


def main() -> None:
    section = Section(
        "agents",
        "Agents that wait for tools",
        f"{AGENTS} agents beside the trace's requests; a tool takes {TOOL_S[0]:.0f} s in the median, every tenth time "
        f"seven minutes or more. With the hint, each turn asks to be retained for {RETAIN_S:.0f} s. Token hit rates, "
        f"the mean of {SEEDS} draws.",
    )
    trace, rows, gains, costs = others(), [], list[float](), list[float]()
    for frames in SIZES:
        sums = dict[tuple[bool, float], float]()
        for seed in range(SEEDS):
            requests = sorted(trace + agents(trace[-1].at_s, seed))
            for retain_s in (0.0, RETAIN_S):
                for who, rate in replay(requests, frames, retain_s).items():
                    sums[who, retain_s] = sums.get((who, retain_s), 0.0) + rate / SEEDS
        gains.append(sums[True, RETAIN_S] - sums[True, 0.0])
        costs.append(sums[False, 0.0] - sums[False, RETAIN_S])
        cells = [f"{sums[who, retain_s]:.4f}" for who in (True, False) for retain_s in (0.0, RETAIN_S)]
        rows.append((f"{frames:,}", *cells))
    columns = "chunks of L1", "agents", "agents, retained", "others", "others, agents retained"
    section.table("", columns, rows)
    best = max(gains)
    section.bar("agents hit more with the hint at every size", f"up to {best:+.4f}", min(gains) > 0)
    section.bar("the others lose at most .02", f"{max(costs):.4f} at most", max(costs) <= 0.02)
    section.save()


if __name__ == "__main__":
    main()
