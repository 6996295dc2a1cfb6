"""Fleets of up to a thousand hosts, simulated with the core of the server: `make scaling`.

Each host has the real `Cache` (lookup, leases, placement, eviction) and finds with the server's own functions what
to fetch from a store that all hosts share. The workload is a public trace, once for each host: every copy has its own
conversations, and all run at the same time. A router sends each request to a host, by turns or where the prompt is.
Nothing takes time and nothing fails, so this gives counts, not latencies.

To simulate 1,000 hosts, a share of the conversations is drawn by chance, and every cache is made smaller by the same
share. Conversations that do not share their beginning do not know of each other, so the rates change little; the table
has several shares for 10 and 100 hosts. Counts are given for the whole load again. Prints Markdown.
"""

import argparse
import random
import sys
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import merge
from multiprocessing import Pool
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support"), str(ROOT / "benchmarks")]

import replay  # noqa: E402

from lmcache_client.contract.geometry import FULL, GroupSpec  # noqa: E402
from lmcache_client.contract.hits import resume_point  # noqa: E402
from lmcache_server.core.cache import Cache, Reservation  # noqa: E402
from lmcache_server.core.layout import Layout  # noqa: E402
from lmcache_server.options.tiers.fetch_choice import wanted  # noqa: E402

CHUNK, BLOCK = replay.CHUNK, 16
L1_CHUNKS = 6_000
"""Chunks in the L1 of a host, as 1 TB of Llama-3-70B has."""
BUSY, WINDOW_S = 1.5, 30.0
"""A router leaves out a host that got more than BUSY times the mean of the tokens of the last WINDOW_S seconds."""
FIRST = 1 << 17
"""More than the ids of the trace."""
OWNER = 1
TURNS, THERE = "by turns", "where the prompt is"
ALONE, COLD, COMMIT = "none", "cold", "commit"
"""No store, or when hosts write to it: before L1 evicts, or as soon as something is stored."""
ARMS = tuple((routing, writes) for routing in (TURNS, THERE) for writes in (ALONE, COLD, COMMIT))
GROUP = GroupSpec(FULL, CHUNK, 0, "scaling", ())
LAYOUT = Layout(b"scaling", CHUNK, (GROUP,), ((0,),))


@dataclass(frozen=True)
class Fleet:
    """`share` of the conversations of each copy of the trace are simulated."""

    hosts: int
    share: float
    store_times: int = 10
    """The room of the store, as a multiple of all L1s."""
    seconds: float = 1022.0
    """How long the trace takes. Its first `seconds` are used."""


class Arrival(NamedTuple):
    """A request: when it arrives, which copy of the trace it is of, and the ids of its full chunks."""

    at_s: float
    copy: int
    tokens: int
    ids: tuple[int, ...]


@dataclass
class Store:
    """A store that evicts what was not used for the longest time."""

    capacity: int
    chunks: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def put(self, chunk: int) -> None:
        self.chunks[chunk] = None
        self.chunks.move_to_end(chunk)
        if len(self.chunks) > self.capacity:
            self.chunks.popitem(last=False)


class Host:
    """One server. It writes to the store, if there is one, and brings back what a lookup needs."""

    def __init__(self, frames: int, store: Store | None, at_once: bool, counts: Counter[str]) -> None:
        self.cache = Cache(1, frames)
        self._evicted: list[bytes] = []
        self.cache.on_gone.append(lambda chunk, _why: self._evicted.append(chunk.key))
        self._store, self._at_once, self._counts = store, at_once, counts
        self._written: set[int] = set()
        """What is in L1 and, as far as this host knows, in the store."""

    def serve(self, arrival: Arrival) -> tuple[int, list[int]]:
        """A request from its arrival to its end: (hit tokens, the chunks that have left L1 meanwhile)."""
        now_s, _, tokens, ids = arrival
        keys = [key(each) for each in ids]
        limit = (tokens - 1) // CHUNK * CHUNK
        gone = self._fetch(ids, keys, limit) if self._store is not None else []
        hit = self.cache.lookup(LAYOUT, keys[: limit // CHUNK], 0, limit, OWNER, now_s)
        done = hit.resume_tokens // CHUNK
        gone += self._place(keys, range(done, len(ids)))
        self._counts["stored"] += len(ids) - done
        if self._at_once:
            self._write(ids[done:])
        if hit.lease_id:
            self.cache.release(hit.lease_id, OWNER)
        self.cache.touch(LAYOUT.namespace, keys)
        return hit.resume_tokens, gone

    def _fetch(self, ids: Sequence[int], keys: Sequence[bytes], limit: int) -> list[int]:
        assert self._store is not None
        ready = self.cache.ready(LAYOUT, keys[: limit // CHUNK])
        absent = [at for at, bits in enumerate(ready) if not bits]
        self._counts["asking lookups"] += bool(absent)
        self._counts["presence names"] += len(absent)
        known = [bits or int(each in self._store.chunks) for bits, each in zip(ready, ids, strict=False)]
        resume = resume_point(LAYOUT.groups, CHUNK, LAYOUT.present(known), 0, limit)
        chunks = [each.chunk for each in wanted(LAYOUT, ready, resume, 0)]
        # As the server does, it keeps what it has of the prompt.
        self.cache.touch(LAYOUT.namespace, keys[: resume // CHUNK])
        # First, because to make room in L1 is to write to the store, which may then evict.
        for chunk in chunks:
            self._store.chunks.move_to_end(ids[chunk])
            self._written.add(ids[chunk])
        gone = self._place(keys, chunks)
        self._counts["read"] += len(chunks)
        return gone

    def _place(self, keys: Sequence[bytes], chunks: Sequence[int]) -> list[int]:
        """Stores these chunks of a chain in L1."""
        for at in chunks:
            made = self.cache.reserve(LAYOUT, keys[at], 0, 0, 1, 1, keys[at - 1] if at else b"")
            if isinstance(made, Reservation):
                self.cache.commit(made)
        gone = [int.from_bytes(each, "big") for each in self._evicted]
        self._evicted.clear()
        self._write(gone)
        self._written.difference_update(gone)
        return gone

    def _write(self, chunks: Sequence[int]) -> None:
        if self._store is None:
            return
        for each in chunks:
            if each not in self._written:
                # The server asks before it writes.
                self._counts["presence names"] += 1
                self._counts["written"] += each not in self._store.chunks
                self._store.put(each)
                self._written.add(each)


def key(chunk: int) -> bytes:
    return chunk.to_bytes(8, "big")


class Router:
    """Chooses hosts, with what events would tell it of each L1."""

    def __init__(self, hosts: int, by_turns: bool, draw: random.Random) -> None:
        self._by_turns, self._draw = by_turns, draw
        self._where: dict[int, set[int]] = {}
        self._recent: OrderedDict[int, tuple[float, int, int]] = OrderedDict()
        self._load, self._total = [0] * hosts, 0
        self._next = 0

    def choose(self, arrival: Arrival) -> int:
        self._next += 1
        if self._by_turns:
            return self._next % len(self._load)
        now_s, _, tokens, ids = arrival
        while self._recent and next(iter(self._recent.values()))[0] < now_s - WINDOW_S:
            _, (_, host, old) = self._recent.popitem(last=False)
            self._load[host] -= old
            self._total -= old
        host = self._best(ids, BUSY * (self._total + tokens) / len(self._load) + tokens)
        self._recent[self._next] = now_s, host, tokens
        self._load[host] += tokens
        self._total += tokens
        return host

    def _best(self, ids: Sequence[int], most: float) -> int:
        """The least busy of the hosts with the longest beginning, if it is not too busy."""
        best: set[int] = set()
        for each in ids:
            if not (having := self._where.get(each, set()) & best if best else self._where.get(each, set())):
                break
            best = having
        free = [host for host in best if self._load[host] <= most]
        # Otherwise the less busy one of two, by chance: nearly as even as the least busy of all.
        hosts = range(len(self._load))
        return min(free or self._draw.sample(hosts, min(2, len(hosts))), key=self._load.__getitem__)

    def hear(self, host: int, ids: Sequence[int], gone: Sequence[int]) -> None:
        for each in ids:
            self._where.setdefault(each, set()).add(host)
        for each in gone:
            if (having := self._where.get(each)) is not None:
                having.discard(host)
                if not having:
                    del self._where[each]


def arrivals(fleet: Fleet) -> Iterator[Arrival]:
    """All requests of all copies, in the order of time. A copy begins at any second of the trace."""
    times = replay.times()
    rows = [(at, each) for at, each in zip(times, replay.load(), strict=True) if each.ids]
    roots = sorted({each.ids[0] for _, each in rows})

    def copy(number: int) -> Iterator[Arrival]:
        draw = random.Random(number)
        kept = {root for root in roots if draw.random() < fleet.share}
        for at, each in rows:
            if each.ids[0] in kept and at < fleet.seconds:
                ids = tuple(number * FIRST + one for one in each.ids)
                yield Arrival(at + draw.random(), number, each.tokens, ids)

    return merge(*(sorted(copy(number)) for number in range(fleet.hosts)))


def run(fleet: Fleet, routing: str, writes: str) -> dict[str, float]:
    """What one arm counts, per second of the whole load where it is not a share."""
    counts: Counter[str] = Counter()
    frames = max(1, round(L1_CHUNKS * fleet.share))
    store = None if writes == ALONE else Store(fleet.store_times * frames * fleet.hosts)
    hosts = [Host(frames, store, writes == COMMIT, counts) for _ in range(fleet.hosts)]
    router = Router(fleet.hosts, routing == TURNS, random.Random(0))
    load = [0] * fleet.hosts
    for arrival in arrivals(fleet):
        host = router.choose(arrival)
        hit, gone = hosts[host].serve(arrival)
        router.hear(host, arrival.ids, gone)
        load[host] += arrival.tokens - hit
        counts.update(tokens=arrival.tokens, hit=hit, requests=1, gone=len(gone))
    for each in hosts:
        each.cache.check_integrity()
    scale = 1 / fleet.share / fleet.seconds
    rates = {name: counts[name] * scale for name in counts}
    return rates | {
        "hit rate": counts["hit"] / counts["tokens"],
        "of the store": counts["read"] * CHUNK / counts["tokens"],
        "busiest": max(load) * fleet.hosts / sum(load),
        "events": (rates["stored"] + rates.get("read", 0) + rates.get("gone", 0)) * CHUNK / BLOCK,
    }


def row(fleet: Fleet, arm: tuple[str, str], each: dict[str, float]) -> str:
    cells = [f"{fleet.hosts:,}", f"1/{round(1 / fleet.share)}" if fleet.share < 1 else "all", *arm]
    cells += [f"{each['hit rate']:.3f}", f"{each['of the store']:.3f}", f"{each['busiest']:.2f}"]
    cells += [
        f"{each.get(name, 0):,.0f}"
        for name in ("tokens", "read", "written", "asking lookups", "presence names", "events")
    ]
    return f"| {' | '.join(cells)} |"


FLEETS = (
    Fleet(1, 1.0),
    Fleet(10, 1.0),
    Fleet(10, 0.05),
    Fleet(100, 0.2),
    Fleet(100, 0.05),
    Fleet(1000, 0.05),
)
STORE_TIMES = (1, 2, 4, 10)
HEAD = (
    "hosts", "conversations", "routing", "store", "hit rate", "from the store", "busiest host",
    "tokens/s", "chunks read/s", "chunks written/s", "lookups that ask/s", "names asked/s", "block events/s",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--small", action="store_true", help="10 hosts and a twentieth of the conversations")
    fleets = FLEETS[2:3] if parser.parse_args().small else FLEETS
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}", flush=True)
    # The largest fleet takes the longest by far.
    jobs = [(fleet, arm) for fleet in fleets for arm in ARMS if fleet.hosts < 1000 or arm[1] == COLD]
    stores = [Fleet(10, 0.2, times) for times in STORE_TIMES]
    with Pool(2, maxtasksperchild=1) as pool:
        for (fleet, arm), each in zip(jobs, pool.imap(_run, jobs), strict=True):
            print(row(fleet, arm, each), flush=True)
        print(
            "\n| store, times L1 | by turns: hit rate, from the store | where the prompt is |\n|---|---|---|"
        )
        for fleet in stores:
            found = pool.map(_run, [(fleet, (routing, COLD)) for routing in (TURNS, THERE)])
            cells = [f"{each['hit rate']:.3f}, {each['of the store']:.3f}" for each in found]
            print(f"| {fleet.store_times} | {' | '.join(cells)} |", flush=True)


def _run(job: tuple[Fleet, tuple[str, str]]) -> dict[str, float]:
    fleet, arm = job
    return run(fleet, *arm)


if __name__ == "__main__":
    main()
