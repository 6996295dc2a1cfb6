"""The whole bench: plans which clients measure what, limits their share of the server, and sums up."""

import dataclasses

from lmcache_client.contract.chunk_size import AUTO_CHUNK_TOKENS
from lmcache_server.commands.bench.client import Workload
from lmcache_server.commands.bench.crew import Crew, Phase, Tally, load, lookup, ping, store
from lmcache_server.core.cache import ONCE_SHARE
from lmcache_server.errors import CommandError
from lmcache_server.host.machine import available_bytes
from lmcache_server.host.units import GB_BYTES, size

OPERATIONS = ("lookup", "store", "load")
LOOKUP_CHUNKS = (1, 8, 64, 512)
"""The lengths of the prompts to look up; each prompt is a prefix of the next."""
LOOKUPS_PER_REQUEST = 25
TIMES = {"p50_s": 0.5, "p90_s": 0.9, "p99_s": 0.99, "max_s": 1.0}
MAX_REQUESTS = 20
"""So many requests suffice, if L1 has room for them."""
MAX_SHARE = 0.25
"""The bench fills at most this share of L1 with its chunks, which nobody needs."""
MIB = 1 << 20
PROCESS_BYTES = 40 * MIB  # of a client, beside its pages


def crews(
    model: str, chunk_size: int | None, l1: dict[str, int], *, workers: int, clients: int, page_kb: int,
    layers: int, groups: str, chunks: int, requests: int | None, seconds: float | None, only: str,
) -> list[Crew]:  # fmt: skip
    """The crews, which measure one after the other. `model` is a new name, `chunk_size` the server's in
    tokens (None: auto), `l1` from its status, and the rest are the command's options. Without `requests`,
    there are as many as L1 has room for. Raises CommandError."""
    wanted = set(only.split(","))
    if not wanted <= set(OPERATIONS):
        raise CommandError(f"--only takes some of {','.join(OPERATIONS)}, not {only}")
    if requests and seconds:
        raise CommandError("choose --requests or --seconds, not both")
    tokens = chunk_size or AUTO_CHUNK_TOKENS
    workload = Workload(model, tokens, groups == "hybrid", layers, page_kb << 10, chunks, 1, seconds or 0)
    lookups = dataclasses.replace(
        workload, model=f"{model} lookups", layers=1, page_bytes=4096, chunks=max(LOOKUP_CHUNKS)
    )
    lookups_bytes = lookups.request_l1_bytes if "lookup" in wanted else 0
    if requests is None:
        room = MAX_SHARE * l1["total_bytes"] - lookups_bytes
        if seconds:
            # Beyond the free part, the server keeps a share of L1 for prompts that will not come back.
            room = min(room, max(l1["free_bytes"], l1["total_bytes"] // ONCE_SHARE) - lookups_bytes)
        fitting = int(room / (workers * workload.request_l1_bytes))
        requests = max(1, min(MAX_REQUESTS, fitting))
    chosen = []
    if "lookup" in wanted:
        lookups = dataclasses.replace(lookups, requests=LOOKUPS_PER_REQUEST * requests)
        phases: tuple[Phase, ...] = tuple((f"lookup_{n}", lookup, n) for n in LOOKUP_CHUNKS)
        chosen.append(Crew(clients, lookups, (("ping", ping, 0), *phases), lookups_bytes))
    if wanted - {"lookup"}:
        workload = dataclasses.replace(workload, requests=requests)
        phases = (("store", store, 0), ("load", load, 0))[: 1 + ("load" in wanted)]
        chosen.append(Crew(workers, workload, phases, workers * requests * workload.request_l1_bytes))
    return chosen


def announcement(crews: list[Crew], l1: dict[str, int]) -> str:
    """One line about what the crews will take. `l1` is from the server's status. Raises CommandError if they
    would take too much."""
    stored = sum(crew.l1_bytes for crew in crews)
    if stored > MAX_SHARE * l1["total_bytes"]:
        raise CommandError(
            f"this would store {stored / MIB:,.0f} MiB, more than a quarter of the server's L1 of "
            f"{l1['total_bytes'] / MIB:,.0f} MiB, and evict what engines need: choose fewer --requests, "
            "--chunks, --layers or --workers, a smaller --page-kb, or no lookups (--only store,load)"
        )
    memory = max(crew.size * (PROCESS_BYTES + crew.workload.memory_bytes) for crew in crews)
    if memory > (available := available_bytes()[0]):
        lack = f"this would take {size(memory)} of memory, and {size(available)} are available"
        raise CommandError(f"{lack}: choose fewer --clients, --workers, --layers or --chunks")
    free = f"{l1['free_bytes'] / MIB:,.0f} MiB"
    if seconds := crews[0].workload.seconds:
        lookups = sum(crew.l1_bytes for crew in crews if ("ping", ping, 0) in crew.phases)
        lost = max(l1["total_bytes"] // ONCE_SHARE, lookups) / MIB
        return (
            f"measuring {sum(len(crew.phases) for crew in crews)} operations for {seconds:g} s each; filling "
            f"the free part of L1, {free}, then replacing the bench's own chunks (engines lose at most "
            f"{lost:,.0f} MiB of theirs); taking {memory / MIB:,.0f} MiB of memory beside it"
        )
    return (
        f"storing {stored / MIB:,.0f} MiB in L1, where {free} are free (if that is too little, the oldest "
        f"chunks are evicted); taking {memory / MIB:,.0f} MiB of memory beside it"
    )


def run(address: str, crews: list[Crew]) -> dict[str, dict[str, float]]:
    """The figures by operation. Raises CommandError."""
    return {name: figures(whole) for crew in crews for name, whole in crew.run(address).items()}


def figures(whole: Tally) -> dict[str, float]:
    """The figures of one operation. Lost requests are only counted. GB/s (1 GB = 2**30 bytes) and requests
    per second are of all clients together, from the first start to the last end."""
    wall_s = whole.ended_s - whole.started_s
    return {
        "count": whole.count,
        "lost": whole.lost,
        **{name: round(whole.quantile_s(share), 7) for name, share in TIMES.items()},
        "wall_s": round(wall_s, 4),
        "per_s": round(whole.count / wall_s, 1),
        "bytes": whole.num_bytes,
        "gb_per_s": round(whole.num_bytes / GB_BYTES / wall_s, 3),
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
