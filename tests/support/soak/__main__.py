"""`python -m soak SECONDS [DIRECTORY] [--tiers]`, in tests/support: one server under clients that come and
go; with --tiers it has two tiers that fail and recover.

Samples go into samples.csv, a summary into summary.json and the curve, where there is matplotlib, into
curve.svg of the directory. Exits with 1 if a client saw a wrong byte, hung or crashed, if the server's memory
grew, if descriptors, threads, sessions, leases or frames were missing when no client was there, or if
nothing came from one of the tiers.
"""

import contextlib
import importlib.util
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from harness.paths import CACHE
from harness.processes import tail
from harness.server import LMCacheServer
from harness.waiting import wait_until

from soak.crew import Crew
from soak.curve import draw
from soak.samples import Sample, faults, growth_bytes, open_files, sample, warm, write
from soak.troubles import Troubles

L1_SIZE_GB = 0.25
RESTS = 24
REST_S = 3.0
"""Two ticks of the server, and a little."""
TURN_S = 0.05
ALLOCATORS_BYTES = 96 << 20
"""What the clients of tiers and the compression may keep besides: it went up and down by some 70 MiB."""


def soak(server: LMCacheServer, seconds: float, crew: Crew, troubles: Troubles | None) -> list[Sample]:
    server.wait_until_populated()
    started_s = time.monotonic()
    # What the first client alone brings (a library that is loaded, say) is no growth.
    while time.monotonic() - started_s < min(20.0, seconds / 10):
        crew.turn()
        time.sleep(TURN_S)
    if troubles is not None:
        server.wait_until_written()
    samples: list[Sample] = []

    def measure(at_rest: bool) -> None:
        samples.append(sample(server, time.monotonic() - started_s, at_rest))

    def rest() -> None:
        if troubles is not None:
            troubles.end()
        crew.rest()
        wait_until(lambda: not unwell(server), what=lambda: f"these tiers work: {unwell(server)}")
        server.wait_at_rest()
        time.sleep(REST_S)
        measure(at_rest=True)

    rest()
    files = open_files(server.pid)
    started_s, interval_s = time.monotonic(), max(1.0, min(5.0, seconds / 300))
    between_s = max(10.0, seconds / RESTS)
    rest_s, measure_s = between_s, 0.0
    while (now_s := time.monotonic() - started_s) < seconds:
        crew.turn()
        if troubles is not None:
            troubles.turn()
        if now_s >= measure_s:
            measure(at_rest=False)
            measure_s = now_s + interval_s
        if now_s >= rest_s:
            rest()
            rest_s = time.monotonic() - started_s + between_s
            print(samples[-1], dict(crew.counts), *crew.faults, flush=True)
            if more := open_files(server.pid) - files:
                print("open, and not at the start:", dict(more), flush=True)
        time.sleep(TURN_S)
    rest()
    return samples


def unwell(server: LMCacheServer) -> list[Any]:
    """The tiers that are left alone, or that have not written all that waits."""
    return [each for each in server.status()["tiers"] if each["failing"] or each["waiting_objects"]]


def summary(
    samples: list[Sample], counts: dict[str, int], metrics: dict[str, float], wrong: list[str]
) -> dict[str, Any]:
    rests = [each for each in warm(samples) if each.at_rest]
    return {
        "seconds": round(samples[-1].at_s),
        "samples": len(samples),
        "clients and troubles": counts,
        "rss_at_rest_mib": [round(each.rss_bytes / (1 << 20), 1) for each in rests],
        "growth_mib": round(growth_bytes(samples) / (1 << 20), 1),
        "peak_mib": round(max(each.rss_bytes for each in warm(samples)) / (1 << 20), 1),
        "descriptors_at_rest": sorted({each.descriptors for each in rests}),
        "threads_at_rest": sorted({each.threads for each in rests}),
        "median_sessions": statistics.median(each.sessions for each in samples if not each.at_rest),
        "metrics": {
            name: value
            for name, value in metrics.items()
            if name.startswith("lmcache_") and "_bucket" not in name and "_created" not in name and value
        },
        "faults": wrong,
    }


def main() -> int:
    seconds = float(sys.argv[1])
    with_tiers, places = "--tiers" in sys.argv, [each for each in sys.argv[2:] if each != "--tiers"]
    directory = Path(places[0]) if places else CACHE / "soak"
    directory.mkdir(parents=True, exist_ok=True)
    seed = random.randrange(1 << 30)
    print(f"{seconds:g} s, seed {seed}; results in {directory}", flush=True)
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        troubles = stack.enter_context(Troubles(place, seed)) if with_tiers else None
        tiers = {"tier": troubles.urls} if troubles is not None else {}
        server = stack.enter_context(LMCacheServer(l1_size_gb=L1_SIZE_GB, checksums=False, **tiers))
        crew = Crew(server.address, server.http_port, seed)
        try:
            samples = soak(server, seconds, crew, troubles)
        finally:
            crew.close()
        metrics = server.metrics()
        log = tail(server.log)
        code = server.terminate()
    wrong = [*dict.fromkeys(crew.faults), *faults(samples, ALLOCATORS_BYTES if with_tiers else 0)]
    read = 'lmcache_tier_objects_total{direction="read",outcome="read",tier="%s"}'
    wrong += [
        f"nothing came from tier {number}" for number in "12" if with_tiers and not metrics.get(read % number)
    ]
    if code:
        wrong.append(f"the server ended with code {code}, and not with 0")
    write(directory / "samples.csv", samples)
    counts = crew.counts + (troubles.counts if troubles is not None else Counter())
    result = summary(samples, dict(counts), metrics, wrong)
    (directory / "summary.json").write_text(json.dumps(result, indent=1) + "\n")
    if importlib.util.find_spec("matplotlib") is not None:
        draw(samples, directory / "curve.svg")
    print(json.dumps(result, indent=1))
    if wrong:
        print(log, "The soak failed:", *wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
