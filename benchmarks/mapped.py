"""What memory that both processes map would give, beside the calls with which the server copies on a CPU.

One thread copies, and its processor time is what counts, so that a busy machine matters little. docs/design-parts.md
says why the server does not map an engine's memory.
"""

import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
from section import Section

from lmcache_client.memory.host import allow_tracer
from lmcache_server.transfer import host
from lmcache_server.transfer.plan import U64, Pieces

GIB = 1 << 30
BUFFER_BYTES = 512 << 20
COPIED_BYTES = BUFFER_BYTES // 2
PAGES_KIB = (4, 16, 64, 256, 1024, 4096)
ROUNDS = 8
SMALL, HUGE = "process_vm, pages of 4 KiB", "process_vm, huge pages"
MAPPED, STREAMED = "memcpy, mapped by both", "the same, past the caches"
PAST_THE_CACHES = {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x8000"}
"""memcpy then bypasses the processor's caches from 32 KiB on, not only for blocks that they cannot hold. glibc
reads this when a process starts."""
Speeds = dict[str, list[float]]
"""By way and page size: store and load."""


def private(*, huge: bool) -> mmap.mmap:
    mapping = mmap.mmap(-1, BUFFER_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    return mapping


def shared() -> mmap.mmap:
    file = os.memfd_create("kv")
    os.ftruncate(file, BUFFER_BYTES)
    return mmap.mmap(file, BUFFER_BYTES)


def touched(mapping: mmap.mmap) -> int:
    """Its address, with memory behind all of it."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    ctypes.memset(address, 1, len(mapping))
    return address


def start_engine() -> tuple[int, int, int]:
    """A child process; the addresses there of a buffer in pages of 4 KiB and of one in huge pages."""
    server_pid = os.getpid()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        allow_tracer(server_pid)
        mappings = [private(huge=huge) for huge in (False, True)]
        os.write(writer, json.dumps([touched(each) for each in mappings]).encode())
        signal.pause()
    small, huge = json.loads(os.read(reader, 1 << 10))
    return pid, small, huge


def gb_s(copy: Callable[[], object]) -> float:
    start = time.thread_time()
    copy()
    return COPIED_BYTES / (time.thread_time() - start) / GIB


def memcpy(into: U64, source: U64, length: U64) -> None:
    """Page by page, as a server in Python would."""
    for arguments in zip(into.tolist(), source.tolist(), length.tolist(), strict=True):
        ctypes.memmove(*arguments)


def measure(pid: int, buffers: dict[str, int], l1: int) -> Speeds:
    """The best of some rounds of each; "memcpy" copies everything in one call."""
    best: Speeds = {}
    other = private(huge=True)
    source = touched(other)
    for _ in range(ROUNDS):
        note(best, "memcpy", 0, gb_s(lambda: ctypes.memmove(l1, source, COPIED_BYTES)))
        for page_kib in PAGES_KIB:
            count = COPIED_BYTES // (page_kib << 10)
            length = np.full(count, page_kib << 10, np.uint64)
            local = np.uint64(l1) + np.arange(count, dtype=np.uint64) * length
            order = np.random.default_rng(page_kib).permutation(2 * count)[:count].astype(np.uint64)
            for way, address in buffers.items():
                remote = np.uint64(address) + order * length
                for load in (False, True):
                    speed = copied(pid, way, Pieces(local, remote, length), load)
                    note(best, f"{way} {page_kib}", load, speed)
    return best


def note(best: Speeds, key: str, direction: int, speed: float) -> None:
    found = best.setdefault(key, [0.0, 0.0])
    found[direction] = max(found[direction], speed)


def copied(pid: int, way: str, pieces: Pieces, load: bool) -> float:
    if way in (SMALL, HUGE):
        return gb_s(lambda: host.copy(pid, pieces, load=load))
    into, source = (pieces.remote, pieces.local) if load else (pieces.local, pieces.remote)
    return gb_s(lambda: memcpy(into, source, pieces.length))


def in_child(variables: dict[str, str]) -> Speeds:
    command = [sys.executable, __file__, "--measure"]
    done = subprocess.run(command, env={**os.environ, **variables}, stdout=subprocess.PIPE, check=True)
    speeds: Speeds = json.loads(done.stdout)
    return speeds


def main() -> None:
    if "--measure" in sys.argv:
        pid, small, huge = start_engine()
        mapping, l1 = shared(), private(huge=True)
        try:
            buffers = {SMALL: small, HUGE: huge, MAPPED: touched(mapping)}
            print(json.dumps(measure(pid, buffers, touched(l1))))
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        return
    plain, streamed = in_child({}), in_child(PAST_THE_CACHES)
    whole = plain["memcpy"][0]
    rows = []
    for page_kib in PAGES_KIB:
        ways = [plain[f"{way} {page_kib}"] for way in (SMALL, HUGE, MAPPED)]
        ways.append(streamed[f"{MAPPED} {page_kib}"])
        rows.append(
            [f"{page_kib} KiB", *(f"{store / whole:.0%}, {load / whole:.0%}" for store, load in ways)]
        )
    section = Section(
        "mapped",
        "Ways to copy between processes on a CPU",
        "Store and load of one thread as a share of memcpy, which copies 256 MiB in one call at "
        f"{whole:.1f} GB/s; by processor time, the best of {ROUNDS} runs, blocks in no order. The server copies with "
        "process_vm_readv and process_vm_writev; [Design](design-parts.md#copies) says why it does not map the "
        "memory of an engine. Huge pages are those of the engine's buffer ([Tuning](tuning.md#huge-pages)).",
    )
    section.table("", ["page of the KV cache", SMALL, HUGE, MAPPED, STREAMED], rows)
    section.save()


if __name__ == "__main__":
    main()
