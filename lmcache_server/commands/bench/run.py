"""The bench as a whole: who measures what, what it takes of the server, and the figures."""

import dataclasses
from collections.abc import Callable
from itertools import chain

import numpy as np

from lmcache_client.contract.geometry import AUTO_CHUNK_TOKENS
from lmcache_server.commands.bench.crew import Crew, Part, Phase
from lmcache_server.commands.bench.measure import lookup, ping, retrieve, store
from lmcache_server.commands.bench.workload import BenchError, Workload

OPERATIONS = ("lookup", "store", "retrieve")
LOOKUP_CHUNKS = (1, 8, 64, 512)
"""Prompts of so many chunks are looked up; each is a part of the next."""
LOOKUPS_PER_REQUEST = 25
MAX_SHARE = 0.25
"""Of L1, to be filled with what nobody needs."""
MIB, GIB = 1 << 20, 1 << 30


def crews(
    model: str,
    chunk_size: int | None,
    *,
    workers: int,
    clients: int,
    page_kb: int,
    layers: int,
    groups: str,
    chunks: int,
    requests: int,
    only: str,
) -> list[Crew]:
    """Who measures what, one after the other. `model` is a name that nobody has used, `chunk_size` the
    server's (None: auto), the rest are the options of the command. Raises BenchError."""
    wanted = set(only.split(","))
    if not wanted <= set(OPERATIONS):
        raise BenchError(f"--only takes some of {','.join(OPERATIONS)}, not {only}")
    tokens = chunk_size or AUTO_CHUNK_TOKENS
    workload = Workload(model, tokens, groups == "hybrid", layers, page_kb << 10, chunks, requests)
    found = []
    if "lookup" in wanted:
        lookups = dataclasses.replace(
            workload,
            model=f"{model} lookups",
            layers=1,
            page_bytes=4096,
            chunks=max(LOOKUP_CHUNKS),
            requests=LOOKUPS_PER_REQUEST * requests,
        )
        phases: tuple[Phase, ...] = tuple((f"lookup_{n}", lookup, n) for n in LOOKUP_CHUNKS)
        found.append(Crew(clients, lookups, (("ping", ping, 0), *phases), lookups.request_l1_bytes))
    if wanted - {"lookup"}:
        phases = (("store", store, 0), ("retrieve", retrieve, 0))[: 1 + ("retrieve" in wanted)]
        found.append(Crew(workers, workload, phases, workers * requests * workload.request_l1_bytes))
    return found


def announcement(found: list[Crew], l1: dict[str, int]) -> str:
    """What the crews will take, for a person. Raises BenchError when it is too much for the server, of which
    `l1` is the part of that name of its status."""
    stored = sum(crew.l1_bytes for crew in found)
    if stored > MAX_SHARE * l1["total_bytes"]:
        raise BenchError(
            f"this would store {stored / MIB:,.0f} MiB, more than a quarter of the server's L1 of "
            f"{l1['total_bytes'] / MIB:,.0f} MiB, and evict what engines need: choose fewer --requests, "
            "--chunks, --layers or --workers, a smaller --page-kb, or no lookups (--only store,retrieve)"
        )
    memory = max(crew.size * crew.workload.memory_bytes for crew in found)
    return (
        f"storing {stored / MIB:,.0f} MiB in L1, where {l1['free_bytes'] / MIB:,.0f} MiB are free (beyond "
        f"that the oldest chunks are evicted); taking {memory / MIB:,.0f} MiB of memory beside it"
    )


def run(address: str, found: list[Crew], tick: Callable[[int], object]) -> dict[str, dict[str, float]]:
    """The figures by operation; `tick` is told of samples as they come. Raises BenchError."""
    parts = chain.from_iterable(crew.run(address, tick).items() for crew in found)
    return {name: figures(each) for name, each in parts}


def figures(parts: list[Part]) -> dict[str, float]:
    """Of one operation. Lost requests are only counted. GB/s (1 GB = 2**30 bytes) and requests per second are
    those of all clients together, from the first start to the last end."""
    samples = [sample for _, _, some in parts for sample in some]
    whole = [sample for sample in samples if not sample.lost]
    wall_s = max(end_s for _, end_s, _ in parts) - min(start_s for start_s, _, _ in parts)
    seconds = [sample.seconds for sample in whole] or [0.0]
    p50, p90, p99 = (float(value) for value in np.quantile(seconds, (0.5, 0.9, 0.99)))
    num_bytes = sum(sample.num_bytes for sample in whole)
    return {
        "count": len(whole),
        "lost": len(samples) - len(whole),
        "p50_s": round(p50, 7),
        "p90_s": round(p90, 7),
        "p99_s": round(p99, 7),
        "max_s": round(max(seconds), 7),
        "wall_s": round(wall_s, 4),
        "per_s": round(len(whole) / wall_s, 1),
        "bytes": num_bytes,
        "gb_per_s": round(num_bytes / GIB / wall_s, 3),
    }


def table(results: dict[str, dict[str, float]]) -> str:
    """The figures for a terminal."""
    lines = [f"{'':12}{'count':>8}{'p50':>11}{'p90':>11}{'p99':>11}{'max':>11}{'rate':>14}"]
    for name, each in results.items():
        times = "".join(f"{_time(each[key]):>11}" for key in ("p50_s", "p90_s", "p99_s", "max_s"))
        rate = f"{each['gb_per_s']:.2f} GB/s" if each["bytes"] else f"{each['per_s']:,.0f}/s"
        lines.append(f"{name.replace('_', ' '):12}{each['count']:>8}{times}{rate:>14}")
    for name, each in results.items():
        if each["lost"]:
            lines.append(
                f"{each['lost']} of {each['count'] + each['lost']} requests to {name} are not in these "
                "figures: the server had no room to keep all of them"
            )
    return "\n".join(lines)


def _time(seconds: float) -> str:
    return f"{1e6 * seconds:.0f} µs" if seconds < 1e-3 else f"{1e3 * seconds:.2f} ms"
