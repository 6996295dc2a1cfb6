"""A public trace through the real server, beside a least-recently-used cache of a few lines.

Each request does what the connector does: look up, load, release the lease, store what is missing, end. A
chunk of 512 tokens is one page of one frame, so L1 has room for as many chunks as it has frames. The bytes
are really copied, and every page that is loaded is checked for its chunk's stamp.
"""

import argparse
import gzip
import hashlib
import json
import math
import statistics
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from harness.rawclient import RawEngine, group  # noqa: E402
from harness.server import LMCacheServer  # noqa: E402

from lmcache_client.contract import messages  # noqa: E402
from lmcache_client.contract.codec import packed  # noqa: E402
from lmcache_client.contract.keys import ROOT_KEY  # noqa: E402
from lmcache_client.server_channel import Channel, ChannelError  # noqa: E402

TRACE = ROOT / "benchmarks/data/mooncake_synthetic.jsonl.gz"
CHUNK = 512
FRAME_BYTES = 64 << 10
STEP_CHUNKS = 8192 // CHUNK
TIMEOUT_S = 60.0
FIXED = 10_000
ALL = 0
TEXT = (
    "3,993 requests of Mooncake's synthetic trace (FAST '25), one after the other, through the real server as the "
    "connector does it: lookup, load (in one run), store what is missing, end. Pages of 64 KiB are really copied. "
    "The oracle is a least-recently-used cache in the script."
)
CAPACITIES = (2_500, 5_000, FIXED, 20_000, ALL)
"""In chunks; ALL stands for room for every chunk of the trace."""
KNOWN = {FIXED: "0.4430", ALL: "0.6504"}
"""Token hit rates that were computed elsewhere for this trace, by the rule of `oracle`."""
SAMPLES = 20
FLAT = 0.05
"""By how much the memory beside L1 may grow once L1 is full."""


@dataclass(frozen=True)
class Request:
    """`blocks` are the ids of its chunks, of which the last need not be full."""

    tokens: int
    blocks: tuple[int, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        """Those of its full chunks."""
        return self.blocks[: self.tokens // CHUNK]


@dataclass
class Outcome:
    """`hits` are tokens per request; `memory` is (share of the requests, bytes beside L1)."""

    hits: list[int] = field(default_factory=list)
    lookups_s: list[float] = field(default_factory=list)
    wall_s: float = 0.0
    dropped: int = 0
    memory: list[tuple[float, int]] = field(default_factory=list)
    planned: dict[float, float] = field(default_factory=dict)
    """The hit rates that the server would expect of other sizes of L1, as multiples of its own."""


def load(path: Path = TRACE) -> list[Request]:
    with gzip.open(path, "rt") as lines:
        rows = map(json.loads, lines)
        return [Request(row["input_length"], tuple(row["hash_ids"])) for row in rows]


def times(path: Path = TRACE) -> list[float]:
    """When each request arrives, in seconds from the first."""
    with gzip.open(path, "rt") as lines:
        return [json.loads(line)["timestamp"] / 1000 for line in lines]


def rate(requests: Sequence[Request], hits: Sequence[int]) -> str:
    """Hit tokens of all tokens, to four digits."""
    return f"{sum(hits) / sum(request.tokens for request in requests):.4f}"


def oracle(requests: Sequence[Request], capacity: int) -> tuple[list[int], int]:
    """(hit tokens of each request, number of the request at which the cache was full): longest resident
    prefix, least recently used, touched tail first, every full chunk inserted at once."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits, full = [], len(requests)
    for number, request in enumerate(requests):
        held = [each in cache for each in request.ids] + [False]
        hits.append(CHUNK * held.index(False))
        for each in reversed(request.ids):
            cache[each] = None
            cache.move_to_end(each)
        while len(cache) > capacity:
            full = min(full, number)
            cache.popitem(last=False)
    return hits, full


def ask(channel: Channel, message: messages.Message) -> Any:
    """The reply, seen when it comes; a channel's `call` looks once a millisecond."""
    pending = channel.submit(message, TIMEOUT_S)
    channel.poll(pending, TIMEOUT_S)
    if pending.reply is None:
        raise pending.error or ChannelError("no answer")
    return pending.reply


class Client:
    """An engine with blocks for one request at a time: its chunk i is in block i + 1."""

    def __init__(
        self,
        server: LMCacheServer,
        requests: Sequence[Request],
        loads: bool,
        page_bytes: int = FRAME_BYTES,
        most_answers: int = 0,
    ) -> None:
        """Room for `most_answers` chunks of an answer."""
        blocks = 1 + max(len(request.ids) for request in requests) + most_answers
        spec = group("full", CHUNK, layers=1, page_bytes=page_bytes)
        self.engine = RawEngine(server.address, (spec,), blocks).start()
        # The first and the last eight bytes of every page say of which chunk it is.
        self.stamps = self.engine.memory.view(np.int64).reshape(blocks, -1)[1:, :: page_bytes // 8 - 1]
        self.outcome, self.loads = Outcome(), loads

    def serve(
        self, request: Request, once: bool = False, answer: Sequence[int] = (), answers_once: bool = True
    ) -> None:
        """One request from its arrival to its end, as the connector does it; `once` is the hint that its
        prompt will not come back. `answer` has the ids of its answer's chunks."""
        prompt_ids, ids = request.ids, (*request.ids, *answer)
        limit = (request.tokens - 1) // CHUNK
        keys = tuple(hashlib.sha256(each.to_bytes(8, "little")).digest() for each in ids)
        hit, held = 0, b""
        if limit:
            started_s = time.perf_counter()
            question = messages.Lookup("", keys[:limit], 0, limit * CHUNK, request.tokens, once=once)
            found: messages.Found = ask(self.engine.scheduler, question)
            self.outcome.lookups_s.append(time.perf_counter() - started_s)
            hit, held = found.resume_tokens // CHUNK, found.held[0]
            if hit and self.loads:
                self._load(found, keys[hit - 1], ids[:hit])
            if hit:
                ask(self.engine.scheduler, messages.Release((found.lease_id,), ()))
        self.outcome.hits.append(hit * CHUNK)
        self.stamps[: len(ids)] = np.array(ids)[:, None]
        end = len(prompt_ids)
        for start in range(hit, end, STEP_CHUNKS):
            step = range(start, min(start + STEP_CHUNKS, end))
            missing = [i for i in step if not (i // 8 < len(held) and held[i // 8] >> i % 8 & 1)]
            self._store(keys, missing, once)
        for chunk in range(end, len(ids)):
            self._store(keys, [chunk], once or answers_once)
        if keys and not once:
            ask(self.engine.scheduler, messages.Release((), keys[:end] if answers_once else keys))

    def _load(self, found: messages.Found, key: bytes, ids: Sequence[int]) -> None:
        self.stamps[:] = -1
        blocks = (packed(range(1, len(ids) + 1)),)
        ask(self.engine.worker, messages.Load("", found.lease_id, key, found.resume_tokens, 0, blocks))
        if (self.stamps[: len(ids)] != np.array(ids)[:, None]).any():
            raise RuntimeError("a page of another chunk was loaded")

    def _store(self, keys: Sequence[bytes], chunks: Sequence[int], once: bool) -> None:
        if chunks:
            parents = (ROOT_KEY, *keys)
            objects = tuple(messages.StoreObject(keys[i], parents[i], i, 0, packed((i + 1,))) for i in chunks)
            self.outcome.dropped += ask(self.engine.worker, messages.Store(objects, (), once)).dropped


def replay(
    requests: Sequence[Request],
    capacity: int,
    loads: bool = True,
    once: Collection[int] = (),
    answers: Sequence[Sequence[int]] = (),
    answers_once: bool = True,
    **flags: Any,
) -> Outcome:
    """The requests, one after the other, through a new server with room for `capacity` chunks. `once` has the
    numbers, from 0, of those with the hint that their prompt will not come back; `answers` what is generated
    for each, which is the first to be evicted if `answers_once`."""
    with LMCacheServer(l1_size_gb=capacity * FRAME_BYTES / (1 << 30), chunk_size=CHUNK, **flags) as server:
        server.wait_until_populated()
        if (l1_bytes := server.status()["l1"]["total_bytes"]) != capacity * FRAME_BYTES:
            raise RuntimeError(f"L1 has {l1_bytes} bytes, not room for {capacity} chunks")
        client = Client(server, requests, loads, most_answers=max(map(len, answers), default=0))
        outcome = client.outcome
        due = {len(requests) * i // SAMPLES for i in range(1, SAMPLES + 1)}
        started_s = time.perf_counter()
        for number, request in enumerate(requests, 1):
            answer = answers[number - 1] if answers else ()
            client.serve(request, number - 1 in once, answer, answers_once)
            if number in due:
                outcome.memory.append((number / len(requests), server.rss_bytes() - l1_bytes))
        outcome.wall_s = time.perf_counter() - started_s
        outcome.planned = planned(server, requests)
        if server.tokens("hit") != sum(outcome.hits):
            raise RuntimeError("the server counted other hits than it gave")
        client.engine.close()
        server.wait_at_rest()
    return outcome


def planned(server: LMCacheServer, requests: Sequence[Request]) -> dict[float, float]:
    """What `lmcache plan` says, as shares of all tokens: it leaves out those behind the last whole chunk."""
    window = server.status()["demand"]["windows"]["start"]
    share = window["tokens"] / sum(request.tokens for request in requests)
    return {
        float(name.replace("unlimited", "inf")): rate * share for name, rate in window["hit_rates"].items()
    }


def measure(requests: Sequence[Request]) -> dict[str, Any]:
    """All runs, as bars, tables and plots."""
    rows, bars, oracles, servers, plans = [], [], [], [], dict[float, float]()
    mib, full_at = list[list[float]](), 0.0
    for capacity in CAPACITIES:
        name = f"{capacity:,}" if capacity else "all"
        room = capacity or len({each for request in requests for each in request.ids})
        expected, full = oracle(requests, room)
        # Loads change nothing in what is kept, and take their time.
        outcome = replay(requests, room, loads=capacity == FIXED, checksums=False)
        theirs, ours = rate(requests, expected), rate(requests, outcome.hits)
        differ = sum(a != b for a, b in zip(expected, outcome.hits, strict=True))
        if known := KNOWN.get(capacity):
            bar = f"the oracle finds the known rate, room for {name} chunks"
            bars.append({"bar": bar, "measured": f"{theirs} against {known}", "met": theirs == known})
        bar = f"hit rate equals the oracle to four digits, room for {name} chunks"
        measured = f"{ours} against {theirs}; {differ} of {len(requests):,} requests hit otherwise"
        bars.append({"bar": bar, "measured": measured, "met": ours == theirs})
        cuts = statistics.quantiles([1e6 * each for each in outcome.lookups_s], n=100)
        numbers = (differ, outcome.dropped, len(outcome.lookups_s) / outcome.wall_s, cuts[49], cuts[98])
        rows.append([name, theirs, ours, *(f"{number:,.0f}" for number in numbers)])
        oracles.append([room, float(theirs)])
        servers.append([room, float(ours)])
        if capacity == FIXED:
            plans = outcome.planned
            mib = [[100 * share, size / (1 << 20)] for share, size in outcome.memory]
            full_at = 100 * full / len(requests)
        print(f"room for {name} chunks: oracle {theirs}, server {ours}, {outcome.wall_s:.1f} s", flush=True)
    errors = [
        abs(plans[room / FIXED if ALL < room < FIXED * 4 else math.inf] - hits) for room, hits in servers
    ]
    bar = "`lmcache plan` of one run against servers of all sizes: hit rate off by at most .001"
    measured = f"at most {max(errors):.4f}"
    bars.append({"bar": bar, "measured": measured, "met": max(errors) <= 0.001})
    first, *later = [size for share, size in mib if share >= full_at]
    growth = max(later) / first - 1
    bar = f"memory beside L1 grows by less than {FLAT:.0%} once L1 is full"
    measured = f"{first:.1f} MiB, at most {max(later):.1f} MiB later ({growth:+.1%})"
    bars.append({"bar": bar, "measured": measured, "met": growth < FLAT})
    columns = ["room, chunks", "oracle", "server", "requests that differ", "objects dropped"]
    columns += ["lookups/s over the run", "lookup p50, µs", "p99, µs"]
    caption = f"Memory beside L1, room for {FIXED:,} chunks; L1 is full after {full_at:.0f} % of the run."
    quarters = [[f"{share:.0f}", f"{size:.1f}"] for share, size in mib[SAMPLES // 4 - 1 :: SAMPLES // 4]]
    return {
        "tables": [
            {"caption": "Token hit rates and speed.", "columns": columns, "rows": rows},
            {"caption": caption, "columns": ["share of the run, %", "MiB"], "rows": quarters},
        ],
        "bars": bars,
        "plots": [
            plot("hit-rate", "room, chunks of 512 tokens", "token hit rate", oracle=oracles, server=servers),
            plot("memory", "share of the run, %", "memory beside L1, MiB", server=mib),
        ],
    }


def plot(name: str, x: str, y: str, **series: list[list[float]]) -> dict[str, Any]:
    head = {"name": f"replay-{name}", "title": f"Replay of a trace: {y}", "x": x, "y": y}
    return {**head, "log_x": "chunks" in x, "log_y": False, "series": series}


def main(name: str, title: str, text: str, measure: Callable[[Sequence[Request]], dict[str, Any]]) -> None:
    """A benchmark with this trace, as a script: prints its bars and writes its section of the report."""
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    out = parser.parse_args().out
    measured = {"plots": [], **measure(load())}
    for each in measured["bars"]:
        print(f"{'met    ' if each['met'] else 'NOT MET'} {each['bar']}: {each['measured']}")
    if out is not None:
        out.write_text(json.dumps({"name": name, "title": title, "text": text, **measured}, indent=1))


if __name__ == "__main__":
    main("replay", "A public trace against an oracle", TEXT, measure)
