"""The whole bench: plans which clients measure what, limits their share of the server, and sums up."""

import dataclasses

import numpy as np

from lmcache_client.contract.geometry import AUTO_CHUNK_TOKENS
from lmcache_server.commands.bench.crew import Crew, Part, Phase
from lmcache_server.commands.bench.measure import load, lookup, ping, store
from lmcache_server.commands.bench.workload import BenchError, Workload
from lmcache_server.host.units import GB_BYTES

OPERATIONS = ("lookup", "store", "load")
LOOKUP_CHUNKS = (1, 8, 64, 512)
"""The lengths of the prompts to look up; each prompt is a prefix of the next."""
LOOKUPS_PER_REQUEST = 25
TIMES = ("p50_s", "p90_s", "p99_s", "max_s")
MAX_SHARE = 0.25
"""The bench fills at most this share of L1 with its chunks, which nobody needs."""
MIB = 1 << 20


def crews(
    model: str, chunk_size: int | None, *, workers: int, clients: int, page_kb: int, layers: int, groups: str,
    chunks: int, requests: int, only: str,
) -> list[Crew]:  # fmt: skip
    """The crews, which measure one after the other. `model` is a new name, `chunk_size` the server's in
    tokens (None: auto), and the rest are the command's options. Raises BenchError."""
    # "retrieve" is what the first release called a load.
    wanted = set(only.replace("retrieve", "load").split(","))
    if not wanted <= set(OPERATIONS):
        raise BenchError(f"--only takes some of {','.join(OPERATIONS)}, not {only}")
    tokens = chunk_size or AUTO_CHUNK_TOKENS
    workload = Workload(model, tokens, groups == "hybrid", layers, page_kb << 10, chunks, requests)
    chosen = []
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
        chosen.append(Crew(clients, lookups, (("ping", ping, 0), *phases), lookups.request_l1_bytes))
    if wanted - {"lookup"}:
        phases = (("store", store, 0), ("load", load, 0))[: 1 + ("load" in wanted)]
        chosen.append(Crew(workers, workload, phases, workers * requests * workload.request_l1_bytes))
    return chosen


def announcement(crews: list[Crew], l1: dict[str, int]) -> str:
    """One line about what the crews will take. `l1` is from the server's status. Raises BenchError if they
    would take too much."""
    stored = sum(crew.l1_bytes for crew in crews)
    if stored > MAX_SHARE * l1["total_bytes"]:
        raise BenchError(
            f"this would store {stored / MIB:,.0f} MiB, more than a quarter of the server's L1 of "
            f"{l1['total_bytes'] / MIB:,.0f} MiB, and evict what engines need: choose fewer --requests, "
            "--chunks, --layers or --workers, a smaller --page-kb, or no lookups (--only store,load)"
        )
    memory = max(crew.size * crew.workload.memory_bytes for crew in crews)
    return (
        f"storing {stored / MIB:,.0f} MiB in L1, where {l1['free_bytes'] / MIB:,.0f} MiB are free (beyond "
        f"that the oldest chunks are evicted); taking {memory / MIB:,.0f} MiB of memory beside it"
    )


def run(address: str, crews: list[Crew]) -> dict[str, dict[str, float]]:
    """The figures by operation. Raises BenchError."""
    return {name: figures(parts) for crew in crews for name, parts in crew.run(address).items()}


def figures(parts: list[Part]) -> dict[str, float]:
    """The figures of one operation. Lost requests are only counted. GB/s (1 GB = 2**30 bytes) and requests
    per second are of all clients together, from the first start to the last end."""
    samples = [sample for _, _, measured in parts for sample in measured]
    whole = [sample for sample in samples if not sample.lost]
    wall_s = max(end_s for _, end_s, _ in parts) - min(start_s for start_s, _, _ in parts)
    seconds = [sample.seconds for sample in whole] or [0.0]
    quantiles = np.quantile(seconds, (0.5, 0.9, 0.99, 1.0)).round(7).tolist()
    num_bytes = sum(sample.num_bytes for sample in whole)
    return {
        "count": len(whole),
        "lost": len(samples) - len(whole),
        **dict(zip(TIMES, quantiles, strict=True)),
        "wall_s": round(wall_s, 4),
        "per_s": round(len(whole) / wall_s, 1),
        "bytes": num_bytes,
        "gb_per_s": round(num_bytes / GB_BYTES / wall_s, 3),
    }


def table(results: dict[str, dict[str, float]]) -> str:
    """The figures for a terminal."""
    lines = [f"{'':12}{'count':>8}{'p50':>11}{'p90':>11}{'p99':>11}{'max':>11}{'rate':>14}"]
    for name, row in results.items():
        times = "".join(f"{_time(row[key]):>11}" for key in TIMES)
        rate = f"{row['gb_per_s']:.2f} GB/s" if row["bytes"] else f"{row['per_s']:,.0f}/s"
        lines.append(f"{name.replace('_', ' '):12}{row['count']:>8}{times}{rate:>14}")
    for name, row in results.items():
        if row["lost"]:
            lines.append(
                f"{row['lost']} of {row['count'] + row['lost']} requests to {name} are not in these "
                "figures: the server had no room to keep all of them"
            )
    return "\n".join(lines)


def _time(seconds: float) -> str:
    return f"{1e6 * seconds:.0f} µs" if seconds < 1e-3 else f"{1e3 * seconds:.2f} ms"
