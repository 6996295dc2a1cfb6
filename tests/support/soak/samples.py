"""What is measured of the server, and when that is too much."""

import contextlib
import csv
import dataclasses
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.server import LMCacheServer

WARM_UP = 0.1
"""Part of the time after which nothing may grow any more."""
MAX_GROWTH_BYTES = 16 << 20
"""Of the resident memory at rest: from the end of the warm-up to the end of the soak."""
MAX_PEAK_BYTES = 128 << 20
"""Of the resident memory under load, above the resident memory at rest at the end of the warm-up."""


@dataclass(frozen=True)
class Sample:
    """The server at one moment. `at_rest` means that no client was connected."""

    at_s: float
    at_rest: bool
    rss_bytes: int
    descriptors: int
    threads: int
    sessions: int
    leases: int
    readers: int
    chunks: int
    namespaces: int
    free_bytes: int
    reserved_bytes: int
    ready_bytes: int
    total_bytes: int


def open_files(pid: int) -> Counter[str]:
    """What the descriptors of a process stand for, without the numbers of sockets."""
    found: Counter[str] = Counter()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found[re.sub(r"\d+", "…", str(each.readlink()))] += 1
    return found


def settled(count: Callable[[], int]) -> int:
    """The least of a few counts: the connection of the last question may still be there for a moment."""
    counts = []
    for _ in range(3):
        time.sleep(0.05)
        counts.append(count())
    return min(counts)


def sample(server: LMCacheServer, at_s: float, at_rest: bool) -> Sample:
    status = server.status()
    l1, process = status["l1"], Path(f"/proc/{server.pid}")
    return Sample(
        round(at_s, 1),
        at_rest,
        server.rss_bytes(),
        settled(lambda: open_files(server.pid).total()),
        sum(1 for _ in (process / "task").iterdir()),
        len(status["sessions"]),
        l1["leases"],
        l1["readers"],
        l1["chunks"],
        len(status["namespaces"]),
        l1["free_bytes"],
        l1["reserved_bytes"],
        l1["ready_bytes"],
        l1["total_bytes"],
    )


def write(path: Path, samples: Sequence[Sample]) -> None:
    with path.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(field.name for field in dataclasses.fields(Sample))
        rows.writerows(dataclasses.astuple(each) for each in samples)


def read(path: Path) -> list[Sample]:
    with path.open(newline="") as file:
        return [
            Sample(
                float(row.pop("at_s")), row.pop("at_rest") == "True", **{k: int(v) for k, v in row.items()}
            )
            for row in csv.DictReader(file)
        ]


def warm(samples: Sequence[Sample]) -> list[Sample]:
    return [each for each in samples if each.at_s >= WARM_UP * samples[-1].at_s]


def growth_bytes(samples: Sequence[Sample]) -> int:
    """What the resident memory at rest has grown by since the warm-up: the median of the last three rests
    less the median of the first three, because one rest alone has the allocator's noise in it."""
    rests = [each.rss_bytes for each in warm(samples) if each.at_rest]
    return int(statistics.median(rests[-3:]) - statistics.median(rests[:3]))


def faults(samples: Sequence[Sample], besides_bytes: int = 0) -> list[str]:
    """What is wrong with a run. The first sample is the baseline, a server at rest. Its memory may grow by
    `besides_bytes` more than by default."""
    found = []
    baseline = samples[0]
    for each in samples:
        lost = each.total_bytes - each.free_bytes - each.reserved_bytes - each.ready_bytes
        if lost:
            found.append(f"{each.at_s:.0f} s: {lost} bytes of L1 are neither free, reserved nor ready")
    for each in (each for each in samples if each.at_rest):
        for name in ("descriptors", "threads", "sessions", "leases", "readers", "reserved_bytes"):
            now, before = getattr(each, name), getattr(baseline, name)
            if now > before:
                found.append(f"{each.at_s:.0f} s: {now} {name} at rest, and {before} at the start")
    if sum(each.at_rest for each in warm(samples)) < 6:
        return [*found, "too short: there were fewer than six rests after the warm-up"]
    if (grown := growth_bytes(samples)) > (limit := MAX_GROWTH_BYTES + besides_bytes):
        found.append(f"memory at rest grew by {grown >> 20} MiB, and may by {limit >> 20}")
    first = next(each for each in warm(samples) if each.at_rest)
    peak = max(each.rss_bytes for each in warm(samples)) - first.rss_bytes
    if peak > (limit := MAX_PEAK_BYTES + besides_bytes):
        found.append(f"memory rose by {peak >> 20} MiB under load, and may by {limit >> 20}")
    return found
