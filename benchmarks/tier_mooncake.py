"""A tier in Mooncake beside Mooncake's own `transfer_engine_bench`, in turns within one run, over TCP.

The tool moves 4 MiB blocks with one thread; the tier moves records of 4 MiB, one at a time, between memory like
L1's and another process. Each record is sealed before it is written and checked after it is read. All figures are
the best of several rounds, because the machine has other work; only their ratios mean anything. It needs root, and
`make .venv/stamps/mooncake`: then `PYTHONPATH=.:tests/support .venv/bin/python benchmarks/tier_mooncake.py`.
"""

import contextlib
import ctypes
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from harness import stores
from harness.paths import MOONCAKE
from harness.processes import ChildProcess
from harness.waiting import wait_until

from lmcache_server.l1.area import Area, shared_memory
from lmcache_server.options.tiers import urls
from lmcache_server.options.tiers.base import Tier
from lmcache_server.options.tiers.record_format import Label, Record

MIB = 1 << 20
ROUNDS, ROUND_S, RECORDS, NAMES = 7, 1, 16, 512
RATE_BAR, PRESENCE_BAR_MS = 0.85, 1.0
TOOL = [
    str(MOONCAKE / "mooncake/transfer_engine_bench"), "--metadata_server=P2PHANDSHAKE", "--protocol=tcp",
    "--auto_discovery=false",
]  # fmt: skip


@contextlib.contextmanager
def target() -> Iterator[str]:
    """Where the tool's other side listens."""
    command = [*TOOL, "--mode=target", "--local_server_name=127.0.0.1:12345"]
    with ChildProcess("the target", command) as process:
        found = lambda: re.search(r"listening on (127.0.0.1:\d+)", process.log.read_text())  # noqa: E731
        match = wait_until(found, 20)
        assert match
        yield match[1]


def tool(operation: str, other: str) -> float:
    """GB/s."""
    command = [*TOOL, "--mode=initiator", "--local_server_name=127.0.0.1:12346", f"--segment_id={other}"]
    command += [f"--operation={operation}", "--threads=1", "--batch_size=4", f"--block_size={4 * MIB}"]
    done = subprocess.run(
        [*command, f"--duration={ROUND_S}"], capture_output=True, text=True, timeout=60, check=True
    )
    found = re.search(r"throughput ([\d.]+) GB/s", done.stderr + done.stdout)
    assert found
    return float(found[1])


def tier_rates(tier: Tier, address: int) -> tuple[float, float]:
    """GB/s of reads and writes: the mean of a round."""
    labels = [Label(b"n" * 32, number.to_bytes(32, "big"), 0, 1, 4 * MIB) for number in range(RECORDS)]
    written = [Record(label, [(address + number * 4 * MIB, 4 * MIB)]) for number, label in enumerate(labels)]
    read = [Record(label, [(address + RECORDS * 4 * MIB, 4 * MIB)]) for label in labels]

    def write(record: Record) -> None:
        record.seal()
        assert tier.write(record.label.name, record.pieces)

    def load(record: Record) -> None:
        record.open(tier.read(record.label.name, record.pieces))

    rates = []
    for records, call in ((written, write), (read, load)):
        start = time.perf_counter()
        for record in records:
            call(record)
        rates.append(RECORDS * 4 * MIB / (time.perf_counter() - start) / 1e9)
    tier.clear("")
    return rates[1], rates[0]


def presence_ms(tier: Tier) -> float:
    names = [Label(b"n" * 32, number.to_bytes(32, "big"), 0, 0, 0).name for number in range(NAMES)]
    times = []
    for _ in range(20):
        start = time.perf_counter()
        tier.present(names)
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def main() -> None:
    num_bytes = (RECORDS + 1) * 4 * MIB
    descriptor, mapping = shared_memory("l1", num_bytes)
    mapping[:] = os.urandom(num_bytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    area = Area(descriptor, 0, address, num_bytes)
    with (
        tempfile.TemporaryDirectory() as folder,
        stores.mooncake(Path(folder)) as (master, _),
        target() as other,
    ):
        tier = urls.open_tier(urls.parse(f"mooncake://127.0.0.1:{master.port}"), area)
        best = {"read": (0.0, 0.0), "write": (0.0, 0.0)}
        presence = []
        with contextlib.closing(tier):
            for _ in range(ROUNDS):
                own = dict(zip(("read", "write"), tier_rates(tier, address), strict=True))
                for operation, (theirs, ours) in best.items():
                    best[operation] = (max(theirs, tool(operation, other)), max(ours, own[operation]))
                presence.append(presence_ms(tier))
    for operation, (theirs, ours) in best.items():
        ratio = ours / theirs
        verdict = "" if ratio >= RATE_BAR else ", MISSED"
        print(f"{operation}, 4 MiB: tool {theirs:.2f} GB/s, tier {ours:.2f} GB/s, {ratio:.2f}", end="")
        print(f" (bar ≥ {RATE_BAR}{verdict})")
    verdict = "" if min(presence) <= PRESENCE_BAR_MS else ", MISSED"
    print(f"presence of {NAMES} records: {min(presence):.2f} ms (bar ≤ {PRESENCE_BAR_MS:g} ms{verdict})")


if __name__ == "__main__":
    main()
