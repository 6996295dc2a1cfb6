"""From the start of `lmcache server` to its first answer, cold and with a saved cache, and its memory before the first
byte is stored."""

import re
import tempfile
from pathlib import Path

import peer
from big_index_server import key
from section import Section, median, millis
from systems import Server, lmcache_server, our_server

from lmcache_client.contract.geometry import FULL, GroupSpec
from lmcache_server.core.cache import Cache, Layout, Reservation
from lmcache_server.core.pool import FRAME_BYTES
from lmcache_server.options.warm_restart import server as warm_restart
from lmcache_server.options.warm_restart.l1_file import L1File

SIZES_GB = (1, 8, 16)
ROUNDS = 7
MIB = 1 << 20
SAVED_CHUNKS, SAVED_ROUNDS = (10_000, 100_000), 3
MAX_RESTORE_S = 0.5


def memory_beside_l1(server: Server) -> int:
    """Resident bytes without the largest mapping, which is L1 as far as it is populated."""
    sizes = re.findall(
        r"^Size:\s+(\d+) kB\n(?:.*\n)*?Rss:\s+(\d+) kB",
        Path(f"/proc/{server.pid}/smaps").read_text(),
        re.MULTILINE,
    )
    mappings = [(int(size) << 10, int(resident) << 10) for size, resident in sizes]
    return sum(resident for _, resident in mappings) - max(mappings)[1]


def saved(path: Path, chunks: int) -> int:
    """A file as a server with so many chunks of one frame leaves it; its size in bytes."""
    size_bytes = (chunks + 1) * FRAME_BYTES
    file = L1File(str(path), size_bytes)
    cache = Cache(FRAME_BYTES, file.num_frames)
    layout = Layout(b"saved".ljust(32), 256, (GroupSpec(FULL, 16, 0, "", ()),), ((0,),))
    for number in range(chunks):
        room = cache.reserve(layout, key(number), 0, 0, 16, FRAME_BYTES, key(number - 1) if number else b"")
        assert isinstance(room, Reservation)
        cache.commit(room)
    file.ensure(file.num_frames)
    warm_restart.save(file, cache, {}, {})
    file.close()
    return size_bytes


def restored_s(chunks: int) -> list[float]:
    """How long a server takes that finds so many chunks."""
    times = []
    with tempfile.TemporaryDirectory(prefix="lmcache-bench-", dir="/tmp") as directory:
        path = Path(directory) / "l1"
        for _ in range(SAVED_ROUNDS):
            size_bytes = saved(path, chunks)
            with our_server(size_bytes / (1 << 30), l1_path=path) as (server, _, _):
                times.append(server.start_s)
            assert f"restored {chunks} chunks" in server.log.read_text()
    return times


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
    restored = {chunks: median(restored_s(chunks)) for chunks in SAVED_CHUNKS}
    section.table(
        f"With `--l1-path` and what an earlier server has saved, the median of {SAVED_ROUNDS}. Each chunk has one object "
        "of 64 KiB. Of Llama 3.1, 2 TB hold 24,000 to 60,000 chunks.",
        ["chunks", "time to ready"],
        [[f"{chunks:,}", millis(took)] for chunks, took in restored.items()],
    )
    most = max(SAVED_CHUNKS)
    bar = f"{most:,} chunks restored: under {MAX_RESTORE_S} s"
    section.bar(bar, millis(restored[most]), restored[most] < MAX_RESTORE_S)
    section.save()


if __name__ == "__main__":
    main()
