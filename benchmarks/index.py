"""The core in process: what a chunk costs in memory, what room for an object and a lookup cost in time.

Times are the best of several repetitions and count as ratios within one run.
"""

import argparse
import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from lmcache_client.contract.geometry import FULL, SLIDING_WINDOW, GroupSpec  # noqa: E402
from lmcache_client.contract.keys import ROOT_KEY  # noqa: E402
from lmcache_server.core.cache import Cache, Layout, Reservation  # noqa: E402
from lmcache_server.core.pool import FramePool, Runs  # noqa: E402

CHUNK = 256
FRAME_BYTES = 64 << 10
MORE_CHUNKS = 200_000
"""The memory of a chunk is measured from so many to twice as many."""
MAX_CHUNK_BYTES = 500
POOL_FRAMES = 1 << 18
OBJECT_FRAMES = 8
MAX_OBJECT_FRAMES = 16
OBJECTS = 256
"""Of one measurement: less than 1 % of the pool."""
CYCLES = 10
SHARES = (0.0, 0.5, 0.9, 0.99)
NEW, RANDOM, OLDEST = "new, equal sizes", "random sizes, any freed", "random sizes, oldest freed"
ROUNDS = 200
MAX_RATIO = 2.0
CHAIN = 512
LOOKUPS = (1, 64, 512)
INDEX_CHUNKS = (1_000, 10_000, 100_000)
HYBRID = "10,000 of 8 objects"
ASKED = 100
"""Lookups of one measurement, each of a chain chosen at random."""
LOOKUP_ROUNDS = 15

FULL_LAYOUT = Layout(b"n" * 32, CHUNK, (GroupSpec(FULL, CHUNK, 0, "", ()),), ((0,),))
WINDOWED = GroupSpec(SLIDING_WINDOW, CHUNK, 1024, "", ())
HYBRID_LAYOUT = Layout(b"n" * 32, CHUNK, (GroupSpec(FULL, CHUNK, 0, "", ()), *3 * (WINDOWED,)), 4 * ((0, 1),))


def fill(cache: Cache, layout: Layout, chunks: int, source: random.Random) -> None:
    """Adds chunks in chains of CHAIN, each object of one frame. The cache alone keeps the keys."""
    objects = [(group, shard) for group, ranks in enumerate(layout.holders) for shard in ranks]
    key = ROOT_KEY
    for number in range(chunks):
        index = number % CHAIN
        parent, key = key if index else ROOT_KEY, source.randbytes(32)
        for group, shard in objects:
            reserved = cache.reserve(layout, key, group, shard, 1, FRAME_BYTES, parent)
            assert isinstance(reserved, Reservation)
            cache.commit(reserved)


def child() -> None:
    """Prints twice, MORE_CHUNKS apart, the resident KiB of this process."""
    cache, source = Cache(FRAME_BYTES, 2 * MORE_CHUNKS * 8), random.Random(0)
    for _ in range(2):
        fill(cache, HYBRID_LAYOUT, MORE_CHUNKS, source)
        print(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0], flush=True)


def chunk_bytes() -> float:
    """The memory that one more chunk takes, objects of one frame."""
    printed = subprocess.check_output([sys.executable, __file__, "--child"], text=True).split()
    return 1024 * (int(printed[1]) - int(printed[0])) / MORE_CHUNKS


def best_s(runs: Mapping[Any, Callable[[], float]], rounds: int) -> dict[Any, float]:
    """The least that each run returned. They take turns: the machine is not always equally fast."""
    best = dict.fromkeys(runs, math.inf)
    for _ in range(rounds):
        for key, run in runs.items():
            best[key] = min(best[key], run())
    return best


class PoolBench:
    """A pool and what is taken of it."""

    def __init__(self) -> None:
        self.pool = FramePool(POOL_FRAMES)
        self.taken: list[Runs] = []
        self.runs = 0.0
        self.random = random.Random(0)

    def fill(self, share: float, most: int = MAX_OBJECT_FRAMES) -> None:
        """Takes objects of 1 to `most` frames (0: all of OBJECT_FRAMES) until `share` of it is taken."""
        while (free := self.pool.free_frames) > POOL_FRAMES * (1 - share):
            frames = self.random.randint(1, most) if most else OBJECT_FRAMES
            self.taken.append(self.pool.allocate(min(frames, free)) or ())

    def churn(self, share: float, oldest: bool) -> None:
        """Replaces CYCLES times as many objects as there are, the oldest first or any."""
        for _ in range(CYCLES * len(self.taken)):
            self.pool.free(self.taken.pop(0 if oldest else self.random.randrange(len(self.taken))))
            self.fill(share)

    def turn_s(self) -> float:
        """Seconds to take and free OBJECTS objects; they are freed in another order than taken."""
        pool, order = self.pool, self.random.sample(range(OBJECTS), OBJECTS)
        started_s = time.perf_counter()
        objects = [pool.allocate(OBJECT_FRAMES) or () for _ in order]
        for number in order:
            pool.free(objects[number])
        seconds = time.perf_counter() - started_s
        self.runs = sum(map(len, objects)) / OBJECTS
        return seconds


def allocator() -> dict[tuple[str, float], tuple[float, float]]:
    """By state and share of the pool that is taken: (nanoseconds to take and free an object, its runs)."""
    pools, equal, mixed, evicted = {}, PoolBench(), PoolBench(), PoolBench()
    for share in SHARES:
        equal.fill(share, 0)
        pools[NEW, share] = deepcopy(equal)
    for share in SHARES[1:]:
        mixed.fill(share)
        mixed.churn(share, oldest=False)
        pools[RANDOM, share] = deepcopy(mixed)
    evicted.fill(SHARES[-1])
    evicted.churn(SHARES[-1], oldest=True)
    pools[OLDEST, SHARES[-1]] = deepcopy(evicted)
    for runs in evicted.taken:
        evicted.pool.free(runs)
    pools[OLDEST, 0.0] = evicted
    best = best_s({state: bench.turn_s for state, bench in pools.items()}, ROUNDS)
    for bench in pools.values():
        bench.pool.check_integrity()
    return {state: (1e9 * seconds / OBJECTS, pools[state].runs) for state, seconds in best.items()}


class LookupBench:
    """An index, a plain dict of its keys, and chains to ask for."""

    def __init__(self, chunks: int, layout: Layout) -> None:
        self.layout = layout
        self.cache = Cache(FRAME_BYTES, chunks * sum(map(len, layout.holders)))
        fill(self.cache, layout, chunks, random.Random(0))
        source = random.Random(0)
        keys = [source.randbytes(32) for _ in range(chunks)]
        self.plain = dict.fromkeys(keys)
        starts = [CHAIN * source.randrange(chunks // CHAIN) for _ in range(ASKED)]
        # The keys of a message are equal to those of the index, not the same objects.
        self.chains = [[bytes(bytearray(key)) for key in keys[start : start + CHAIN]] for start in starts]

    def ours_s(self, length: int) -> float:
        """Seconds of all lookups together; every one hits to its end."""
        asked = [chain[:length] for chain in self.chains]
        started_s = time.perf_counter()
        hits = [self.cache.lookup(self.layout, keys, 0, length * CHUNK, 1, 0.0) for keys in asked]
        seconds = time.perf_counter() - started_s
        for hit in hits:
            if hit.resume_tokens != length * CHUNK or not self.cache.release(hit.lease_id, 1):
                raise RuntimeError("a lookup did not find what is there")
        return seconds

    def plain_s(self, length: int) -> float:
        asked, get = [chain[:length] for chain in self.chains], self.plain.get
        started_s = time.perf_counter()
        for keys in asked:
            list(map(get, keys))
        return time.perf_counter() - started_s


def lookups() -> dict[str, list[tuple[float, float]]]:
    """By index, for each of LOOKUPS: microseconds of a lookup, and of finding its keys in a plain dict."""
    benches = {f"{chunks:,}": LookupBench(chunks, FULL_LAYOUT) for chunks in INDEX_CHUNKS}
    benches[HYBRID] = LookupBench(INDEX_CHUNKS[1], HYBRID_LAYOUT)
    runs = {
        (name, length, side): partial(run, length)
        for name, bench in benches.items()
        for length in LOOKUPS
        for side, run in enumerate((bench.ours_s, bench.plain_s))
    }
    best = {key: 1e6 * seconds / ASKED for key, seconds in best_s(runs, LOOKUP_ROUNDS).items()}
    return {name: [(best[name, n, 0], best[name, n, 1]) for n in LOOKUPS] for name in benches}


def bar(text: str, measured: float, limit: float, unit: str = "") -> dict[str, Any]:
    return {"bar": f"{text} < {limit:g}{unit}", "measured": f"{measured:.3g}{unit}", "met": measured < limit}


def report() -> dict[str, Any]:
    size, pool, found = chunk_bytes(), allocator(), lookups()
    empty_ns, (random_ns, random_runs) = pool[NEW, 0.0][0], pool[RANDOM, SHARES[-1]]
    plain = {chunks: found[f"{chunks:,}"] for chunks in INDEX_CHUNKS}
    ends = zip(plain[INDEX_CHUNKS[0]], plain[INDEX_CHUNKS[-1]], strict=True)
    slower = [(large[0] / small[0], large[1] / small[1]) for small, large in ends]
    room = f"room for an object, pool {SHARES[-1]:.0%} full to empty"
    bars = [
        bar("memory of a chunk of 8 objects", size, MAX_CHUNK_BYTES, " B"),
        bar(f"{room}, {OLDEST} {CYCLES} times over", pool[OLDEST, SHARES[-1]][0] / empty_ns, MAX_RATIO),
        bar(f"{room}, {RANDOM} {CYCLES} times over", random_ns / empty_ns, MAX_RATIO),
        bar("the same, for each run of frames of the object", random_ns / random_runs / empty_ns, MAX_RATIO),
        bar("lookup, largest index to smallest", max(ours for ours, _ in slower), MAX_RATIO),
        bar("the same, over that of a plain dict", max(ours / theirs for ours, theirs in slower), 1.0),
    ]
    rows = [[state, f"{at:.0%}", f"{ns:,.0f}", f"{runs:.1f}"] for (state, at), (ns, runs) in pool.items()]
    names = [f"{length} chunks" if length > 1 else "1 chunk" for length in LOOKUPS]
    times = [[name, *(f"{a:,.1f} ({b:,.1f})" for a, b in each)] for name, each in found.items()]
    tables = [
        {"caption": f"Time to take and free {OBJECT_FRAMES} frames; random sizes: 1 to {MAX_OBJECT_FRAMES}.",
         "columns": ["pool", "taken", "ns an object", "runs an object"], "rows": rows},
        {"caption": "Microseconds of a lookup that hits (of finding its keys in a plain dict).",
         "columns": ["chunks in the index", *names], "rows": times},
    ]  # fmt: skip
    series = {
        name + suffix: [[n, each[i][side]] for n, each in plain.items()]
        for i, name in enumerate(names)
        for side, suffix in enumerate(("", ", plain dict"))
    }
    plot: dict[str, Any] = {"name": "index-lookup", "title": "Lookups by size of the index"}
    plot |= {"x": "chunks in the index", "y": "µs", "log_x": True, "log_y": True, "series": series}
    text = "The core in process, without a server. Times are the best of several; the runs take turns."
    head = {"name": "index", "title": "Index, pool and lookups", "text": text}
    return {**head, "tables": tables, "bars": bars, "plots": [plot]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child()
        return
    found = report()
    for each in found["bars"]:
        print(f"{'met    ' if each['met'] else 'NOT MET'} {each['bar']}: {each['measured']}")
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
