"""From the start of `lmcache server` to its first answer, and its memory before the first byte is stored."""

import re
from pathlib import Path

import peer
from section import Section, median, millis
from systems import Server, lmcache_server, our_server

SIZES_GB = (1, 8, 16)
ROUNDS = 7
MIB = 1 << 20


def memory_beside_l1(server: Server) -> int:
    """Resident bytes without the largest mapping, which is L1 as far as it is populated."""
    sizes = re.findall(
        r"^Size:\s+(\d+) kB\n(?:.*\n)*?Rss:\s+(\d+) kB",
        Path(f"/proc/{server.pid}/smaps").read_text(),
        re.MULTILINE,
    )
    mappings = [(int(size) << 10, int(resident) << 10) for size, resident in sizes]
    return sum(resident for _, resident in mappings) - max(mappings)[1]


def main() -> None:
    peer.install()
    section = Section(
        "start",
        "Start of the server",
        f"From the start of the process to its first answer over HTTP, the median of {ROUNDS}; L1 is populated "
        "in the background. Memory: what is resident beside L1.",
    )
    rows, slowest, largest = [], 0.0, 0
    for size_gb in SIZES_GB:
        times, memory = [], []
        for _ in range(ROUNDS):
            with our_server(size_gb) as (server, _, _):
                times.append(server.start_s)
                memory.append(memory_beside_l1(server))
        slowest, largest = max(slowest, median(times)), max(largest, int(median(memory)))
        rows.append([f"ours, {size_gb} GB", millis(median(times)), f"{median(memory) / MIB:.0f} MiB"])
    times, memory = [], []
    for _ in range(3):
        with lmcache_server(1) as (theirs, _):
            times.append(theirs.start_s)
            memory.append(memory_beside_l1(theirs))
    rows.append(["LMCache, 1 GB", millis(median(times)), f"{median(memory) / MIB:.0f} MiB"])
    section.table("", ["server", "time to ready", "memory"], rows)
    section.bar("under 0.5 s at any size", millis(slowest), slowest < 0.5, top=True)
    section.bar("under 60 MB before the first byte", f"{largest / MIB:.0f} MiB", largest < 60e6, top=True)
    section.save()


if __name__ == "__main__":
    main()
