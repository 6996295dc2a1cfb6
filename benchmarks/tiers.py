"""The adapters of tiers beside the bare libraries, raw TCP and one plain file, in turns within one run.

For that no server of ours runs: there is memory that is like L1's, the adapters, and the real stores. The adapters
get what the server gives them: each record has its end block, and its digest is computed and checked. All rates are
the best of several rounds, because the machine has other work; only their ratios mean anything. Then real servers:
what a tier costs those that do not need it, load or compute, and a public trace.
"""

import contextlib
import ctypes
import hashlib
import itertools
import mmap
import os
import resource
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tier_or_compute
import tier_servers
import tier_trace
from harness import stores
from harness.waiting import wait_until
from section import Section, median

from lmcache_server.options.tiers.base import Tier
from lmcache_server.options.tiers.directory import Directory
from lmcache_server.options.tiers.pieces import spread
from lmcache_server.options.tiers.record_format import PAGE_BYTES, Label
from lmcache_server.options.tiers.record_format import Record as TierRecord

MIB = 1 << 20
TOTAL = 128 * MIB
ROUNDS = 9
KIB = (256, 1024, 4096)
NAMES = 512
Record = tuple[str, memoryview]
Call = Callable[[str, memoryview], object]

TCP_PEER = """
import socket, struct, sys
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
buffer = memoryview(bytearray(8 << 20))
connection, _ = listener.accept()
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
while (head := connection.recv(9, socket.MSG_WAITALL)):
    kind, size = struct.unpack("<cQ", head)
    if kind == b"p":
        done = 0
        while done < size: done += connection.recv_into(buffer[done:size])
        connection.sendall(b"k")
    else:
        connection.sendall(buffer[:size])
"""


def memory() -> memoryview:
    """As L1 has it: anonymous, in huge pages, resident."""
    pages = mmap.mmap(-1, TOTAL)
    pages.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(pages)
    for start in range(0, TOTAL, 4096):
        view[start : start + 8] = struct.pack("<Q", start)
    return view


def records(view: memoryview, kib: int, label: str = "a") -> list[Record]:
    size = kib << 10
    return [
        (f"{label}/{start // size:064x}.0.0", view[start : start + size]) for start in range(0, TOTAL, size)
    ]


def tier_record(name: str, part: memoryview) -> TierRecord:
    label = Label(bytes(32), hashlib.sha256(name.encode()).digest(), 0, 1, part.nbytes)
    return TierRecord(label, [(ctypes.addressof(ctypes.c_char.from_buffer(part)), part.nbytes)])


def put_by(tier: Tier) -> Call:
    def put(name: str, part: memoryview) -> bool:
        record = tier_record(name, part)
        record.seal()
        written = tier.write(name, record.pieces)
        record.release()
        return written

    return put


def get_by(tier: Tier) -> Call:
    def get(name: str, part: memoryview) -> bool:
        record = tier_record(name, part)
        if not (num_bytes := tier.read(name, record.pieces)):
            return False
        record.open(num_bytes)
        record.release()
        return True

    return get


def gb_s(call: Call, work: Sequence[Record], threads: int = 1) -> tuple[float, float]:
    """The rate at which threads do all the calls, in 10**9 bytes, and seconds of this process's CPU per GB."""
    queue = iter(work)
    lock, failed = threading.Lock(), []

    def run() -> None:
        while True:
            with lock:
                each = next(queue, None)
            if each is None:
                return
            try:
                works = call(*each)
            except Exception as error:  # in a thread, nobody else would see it
                failed.append(f"{each[0]}: {error}")
            else:
                if not works:
                    failed.append(each[0])

    workers = [threading.Thread(target=run) for _ in range(threads)]
    used, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    assert not failed, failed[0]
    gigabytes = sum(part.nbytes for _, part in work) / 1e9
    cpu_s = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
    return gigabytes / seconds, cpu_s / gigabytes


class Contest:
    """The best rates and the least CPU of several ways to do the same, in turns."""

    def __init__(self) -> None:
        self.rate: dict[str, float] = {}
        self.cpu: dict[str, float] = {}

    def turn(self, name: str, call: Call, work: Sequence[Record], threads: int = 1) -> None:
        rate, cpu = gb_s(call, work, threads)
        self.rate[name] = max(rate, self.rate.get(name, 0.0))
        self.cpu[name] = min(cpu, self.cpu.get(name, 1e9))

    def ratio(self, name: str, base: str) -> float:
        return self.rate[name] / self.rate[base]


def milliseconds(call: Callable[[], object], times: int = 60) -> float:
    """The median, once warm."""
    call()
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return median(taken) * 1e3


def directory(section: Section, view: memoryview, root: Path) -> None:
    slab = os.open(root / "slab", os.O_RDWR | os.O_CREAT | os.O_DIRECT)

    def at(name: str, part: memoryview) -> int:
        return int(name[2:66], 16) * part.nbytes

    def plain_write(name: str, part: memoryview) -> bool:
        return os.pwritev(slab, [part], at(name, part)) == part.nbytes

    def plain_read(name: str, part: memoryview) -> bool:
        return os.preadv(slab, [part], at(name, part)) == part.nbytes

    rows, ratios, cpu = [], {}, []
    for kib, threads in itertools.product(KIB, (1, 4)):
        tier = Directory(str(root / f"{kib}-{threads}"), TOTAL + TOTAL // (kib << 10) * PAGE_BYTES)
        wait_until(lambda tier=tier: tier._listed)
        contest = Contest()
        for number in range(ROUNDS):
            work = records(view, kib, f"{number % 10}")
            contest.turn("plain write", plain_write, work, threads)
            contest.turn("new" if number == 0 else "write", put_by(tier), work, threads)
            contest.turn("plain read", plain_read, work, threads)
            contest.turn("read", get_by(tier), work, threads)
        if (kib, threads) == (1024, 4):
            # A quarter of these are there.
            names = [name for name, _ in work] + [name for name, _ in records(view, 256)]
            present_ms = milliseconds(lambda names=names[:NAMES]: tier.present(names))
        tier.close()
        ratios[kib, threads] = contest.ratio("read", "plain read"), contest.ratio("write", "plain write")
        more_cpu_s = contest.cpu["read"] - contest.cpu["plain read"]
        if kib >= 1024:
            cpu.append(more_cpu_s)
        rows.append([f"{kib} KiB", str(threads)] + [f"{rate:.2f}" for rate in contest.rate.values()])
        rows[-1] += [*(f"{ratio:.2f}" for ratio in ratios[kib, threads]), f"{more_cpu_s:.3f}"]
        shutil.rmtree(root / f"{kib}-{threads}")
    os.close(slab)
    columns = [
        "record",
        "threads",
        "plain write",
        "write, new files",
        "plain read",
        "read",
        "write, recycled",
    ]
    section.table(
        "A directory, GB/s, beside one plain file (O_DIRECT).",
        [*columns, "read ÷", "write ÷", "CPU s/GB"],
        rows,
    )
    worst = min(ratios[kib, 4][0] for kib in KIB if kib >= 1024)
    section.bar(
        "directory → L1, 1 MiB and more, 4 threads: ≥ 0.85 of a plain file", f"{worst:.2f}", worst >= 0.85
    )
    for kib, bar in ((4096, 0.5), (1024, 0.3)):
        best = max(ratios[kib, threads][1] for threads in (1, 4))
        section.bar(f"L1 → directory, {kib} KiB: ≥ {bar} of a plain file", f"{best:.2f}", best >= bar)
    section.bar("directory, presence of 512 names: ≤ 0.2 ms", f"{present_ms:.3f} ms", present_ms <= 0.2)
    most = max(cpu)
    section.bar(
        "directory → L1, 1 MiB and more, CPU beyond the plain file: ≤ 0.10 s per GB",
        f"{most:.3f} s",
        most <= 0.10,
    )


@contextlib.contextmanager
def raw_tcp() -> Iterator[tuple[Call, Call]]:
    """Put and get over a loopback connection, with nothing at the other end but memory."""
    peer = subprocess.Popen([sys.executable, "-c", TCP_PEER], stdout=subprocess.PIPE)
    assert peer.stdout is not None
    connection = socket.create_connection(("127.0.0.1", int(peer.stdout.readline())))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def put(_: str, part: memoryview) -> bool:
        connection.sendall(struct.pack("<cQ", b"p", part.nbytes))
        connection.sendall(part)
        return connection.recv(1) == b"k"

    def get(_: str, part: memoryview) -> bool:
        connection.sendall(struct.pack("<cQ", b"g", part.nbytes))
        done = 0
        while done < part.nbytes:
            done += connection.recv_into(part[done:])
        return True

    yield put, get
    connection.close()
    peer.wait(10)
    peer.stdout.close()


def valkey(section: Section, view: memoryview, root: Path) -> None:
    import glide_sync as glide

    from lmcache_server.options.tiers.valkey import PREFIX, Valkey

    rows, ratios, cpu = [], {}, []
    with stores.valkey(root, maxmemory="1gb") as store, raw_tcp() as (tcp_put, tcp_get):
        tier = Valkey([("127.0.0.1", store.port)])
        address = [glide.NodeAddress("127.0.0.1", store.port)]
        bare = glide.GlideClient.create(glide.GlideClientConfiguration(address, request_timeout=10_000))
        for kib in (1024, 4096):
            work, contest = records(view, kib), Contest()
            for _ in range(ROUNDS):
                contest.turn("tcp put", tcp_put, work)
                contest.turn("bare put", lambda name, part: bare.set("bare/" + name, part), work)
                contest.turn("put", put_by(tier), work)
                contest.turn("tcp get", tcp_get, work)
                contest.turn("bare get", lambda name, part: bare.get("bare/" + name, buffer=part), work)
                contest.turn("get", get_by(tier), work)
            for way in ("put", "get"):
                ratios[kib, way] = contest.ratio(way, f"bare {way}"), contest.ratio(way, f"tcp {way}")
                cpu.append(contest.cpu[way] - contest.cpu[f"bare {way}"])
                rates = [contest.rate[f"{name}{way}"] for name in ("tcp ", "bare ", "")]
                row = [f"{kib} KiB", way, *(f"{rate:.2f}" for rate in rates)]
                rows.append(row + [f"{ratio:.2f}" for ratio in ratios[kib, way]])
        names = [name for name, _ in records(view, 256)][:NAMES]

        def bare_present() -> None:
            batch = glide.Batch(is_atomic=False)
            for name in names:
                batch.strlen(PREFIX + name)
            run = bare.exec
            run(batch, raise_on_error=True)

        bare_ms = own_ms = 1e9
        for _ in range(ROUNDS):
            bare_ms = min(bare_ms, milliseconds(bare_present, 10))
            own_ms = min(own_ms, milliseconds(lambda: tier.present(names), 10))
        bare.close()
        tier.close()
    columns = ["record", "", "raw TCP", "bare client", "tier", "÷ bare", "÷ TCP"]
    section.table("Valkey, GB/s, one thread.", columns, rows)
    for number, (base, bar) in enumerate((("the bare client", 0.85), ("raw loopback TCP", 0.55))):
        worst = min(each[number] for each in ratios.values())
        section.bar(f"Valkey, 1 and 4 MiB, both ways: ≥ {bar} of {base}", f"{worst:.2f}", worst >= bar)
    most = max(cpu)
    section.bar("Valkey, CPU beyond the bare client: ≤ 0.12 s per GB", f"{most:.3f} s", most <= 0.12)
    text = f"{own_ms:.2f} ms against {bare_ms:.2f} ms"
    section.bar("Valkey, presence of 512 names: ≤ 1.5 of the bare client", text, own_ms <= 1.5 * bare_ms)


def s3(section: Section, view: memoryview, root: Path) -> None:
    import obstore

    from lmcache_server.options.tiers.object_store import Objects

    os.environ |= {"AWS_ACCESS_KEY_ID": stores.KEY, "AWS_SECRET_ACCESS_KEY": stores.SECRET}
    os.environ["AWS_REGION"] = "us-east-1"
    work, contest = records(view, 4096), Contest()
    with stores.seaweedfs(root) as store:
        place = f"http://127.0.0.1:{store.port}"
        tier: Any = Objects("s3", "records", "bench", endpoint=place, allow_http=True)

        def written() -> bool:
            with contextlib.suppress(Exception):
                return bool(tier.write(work[0][0], [work[0][1]]))
            return False

        wait_until(written, 60)

        def bare_get(name: str, part: memoryview) -> bool:
            found = memoryview(obstore.get(tier._store, f"bare/{name}").bytes())
            spread(found, [part])
            return True

        for name, part in work:
            obstore.put(tier._store, f"bare/{name}", bytes(part), use_multipart=False)
        contest.turn("put", put_by(tier), work, 4)
        for _ in range(ROUNDS):
            contest.turn("bare get", bare_get, work, 16)
            contest.turn("get", get_by(tier), work, 16)
        names = [name for name, _ in records(view, 256)][:NAMES]
        tier.remove(names[20:])
        tier._absent.clear()
        start = time.perf_counter()
        tier.present(names)
        present_ms = (time.perf_counter() - start) * 1e3
        tier.close()
    ratio, cpu = contest.ratio("get", "bare get"), contest.cpu["get"] - contest.cpu["bare get"]
    row = [f"{contest.rate[name]:.2f}" for name in ("put", "bare get", "get")]
    columns = ["put, 4 threads", "bare obstore, get", "get", "÷", "presence of 512 names"]
    section.table(
        "SeaweedFS by S3, GB/s, 4 MiB, 16 in flight.",
        columns,
        [[*row, f"{ratio:.2f}", f"{present_ms:.0f} ms"]],
    )
    section.bar("S3 get, 16 in flight: ≥ 0.95 of bare obstore", f"{ratio:.2f}", ratio >= 0.95)
    section.bar("S3, CPU beyond bare obstore: ≤ 0.08 s per GB", f"{cpu:.3f} s", cpu <= 0.08)


def main() -> None:
    section = Section("tiers", "Tiers", str(__doc__))
    view = memory()
    for measure in (directory, valkey, s3):
        root = Path(tempfile.mkdtemp(prefix="bench-tier-", dir=os.environ.get("BENCH_TIER_DIR")))
        try:
            measure(section, view, root)
        finally:
            shutil.rmtree(root, ignore_errors=True)
    for part in (
        tier_servers.lookups,
        tier_servers.spilling,
        tier_or_compute.measure,
        tier_trace.measure,
    ):
        part(section)
    section.save()


if __name__ == "__main__":
    main()
