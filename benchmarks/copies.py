"""Bytes per second of store and load, in host memory, beside the system's calls alone and LMCache."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import mapped
import numpy as np
import peer
from harness.processes import environment
from harness.waiting import get, wait_until
from section import Section
from systems import lmcache_server, our_server

from lmcache_server.transfer import host
from lmcache_server.transfer.plan import Pieces

GIB = 1 << 30
REQUEST_BYTES = 64 << 20
REQUESTS = 8
L1_GB = 5.0
WORKERS = (1, 2)
PAGES_KIB = (4, 16, 64, 256, 1024, 4096)
ROUNDS = 3
THREADS = 2
"""With which the server copies for one worker."""
OUR_BLOCKS = 4
"""Of a chunk, in `lmcache bench`."""
HEAD_BYTES = 256
"""128 numbers of bfloat16."""
BAR_FROM_KIB = 64
Speeds = dict[tuple[int, int], tuple[float, float]]
"""Of store and load, by KiB of a page and number of workers."""


@contextlib.contextmanager
def engines() -> Iterator[list[tuple[int, int]]]:
    """Process ids, and the address there of a buffer in huge pages, as the memory of `lmcache bench` is."""
    started = []
    try:
        for _ in range(max(WORKERS)):
            pid, _, address = mapped.start_engine()
            started.append((pid, address))
        yield started
    finally:
        for pid, _ in started:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def calls_gb_s(engines: Sequence[tuple[int, int]], l1: int, page_kib: int, load: bool) -> float:
    """By the calls that copy between processes alone, from as many threads as the server has for so many
    engines. Pages in no order."""
    barrier = threading.Barrier(THREADS * len(engines))
    count = mapped.COPIED_BYTES // (page_kib << 10) // THREADS
    length = np.full(count, page_kib << 10, np.uint64)
    times: list[tuple[float, float]] = []

    def copy(pid: int, pieces: Pieces) -> None:
        barrier.wait()
        start = time.perf_counter()
        host.copy(pid, pieces, load=load)
        times.append((start, time.perf_counter()))

    workers = []
    for number, (pid, address) in enumerate(engines):
        order = np.random.default_rng(page_kib).permutation(THREADS * count).astype(np.uint64)
        for part in range(THREADS):
            place = (
                np.arange(count, dtype=np.uint64) + np.uint64((number * THREADS + part) * count)
            ) * length
            remote = np.uint64(address) + order[part * count : (part + 1) * count] * length
            pieces = Pieces(np.uint64(l1) + place, remote, length)
            workers.append(threading.Thread(target=copy, args=(pid, pieces)))
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(times) == len(workers), "a copy failed"
    starts, ends = zip(*times, strict=True)
    return len(workers) * int(length.sum()) / (max(ends) - min(starts)) / GIB


def ours_gb_s(port: int, variables: dict[str, str], page_kib: int, workers: int) -> tuple[float, float]:
    """Store and load, by `lmcache bench`, which checks the bytes."""
    chunks, layers = shape(page_kib, OUR_BLOCKS)
    command = [sys.executable, "-m", "lmcache_server", "bench", "--json", "--only", "store,load"]
    command += ["--port", str(port), "--page-kb", str(page_kib), "--workers", str(workers)]
    command += ["--layers", str(layers), "--chunks", str(chunks), "--requests", str(REQUESTS)]
    result = subprocess.run(
        command, env=environment(variables), capture_output=True, text=True, timeout=120, check=False
    )
    if result.returncode != 0:
        raise RuntimeError(f"lmcache bench failed: {result.stderr}")
    found = json.loads(result.stdout)["results"]
    assert not found["store"]["lost"]
    assert not found["load"]["lost"]
    return found["store"]["gb_per_s"], found["load"]["gb_per_s"]


def shape(page_kib: int, blocks: int) -> tuple[int, int]:
    """Chunks and regions that make up a request of REQUEST_BYTES, 32 regions at most."""
    pages = REQUEST_BYTES // (page_kib << 10)
    regions = min(32, pages // blocks)
    return pages // blocks // regions, regions


def lmcache_gb_s(port: int, http_port: int, page_kib: int, seed: int) -> tuple[float, float]:
    """The same by LMCache's own bench, from the medians of its requests: a page is a block of a layer's keys,
    or of its values."""
    block_tokens = 16 if page_kib <= 64 else 128
    heads = (page_kib << 10) // block_tokens // HEAD_BYTES
    heads, head_numbers = (heads, 128) if heads else (1, (page_kib << 10) // block_tokens // 2)
    pages = REQUEST_BYTES // (page_kib << 10)
    layers = max(1, min(16, pages // 2 // (256 // block_tokens)))
    tokens = pages // (2 * layers) * block_tokens
    blocks = 2 * tokens // block_tokens
    shape = f"(2,{blocks},{block_tokens},{heads},{head_numbers}):bfloat16:{layers}"
    found = peer.bench(port, http_port, shape, tokens, range(seed, seed + REQUESTS))
    num_bytes = 2 * layers * (tokens // block_tokens) * (page_kib << 10)
    return num_bytes / found["store"] / GIB, num_bytes / found["retrieve"] / GIB


def wait_until_populated(url: str) -> None:
    def is_populated() -> bool:
        l1 = json.loads(get(url))["l1"]
        return bool(l1["populated_bytes"] == l1["total_bytes"])

    wait_until(is_populated, 600.0, "L1 is populated", interval_s=0.1)


def ours() -> tuple[Speeds, Speeds]:
    """The best of some rounds, per page size and number of workers; the calls alone take turns with them."""
    best: Speeds = {}
    calls: Speeds = {}
    with our_server(L1_GB) as (server, port, variables), engines() as started:
        # After the forks: a child that shared this memory would make the first writes to it slow.
        memory = mapped.private(huge=True)
        l1 = mapped.touched(memory)
        wait_until_populated(server.url("/status"))
        for _ in range(ROUNDS):
            for workers in WORKERS:
                for page_kib in PAGES_KIB:
                    case = page_kib, workers
                    alone = [calls_gb_s(started[:workers], l1, page_kib, load) for load in (False, True)]
                    keep(calls, case, alone)
                    keep(best, case, ours_gb_s(port, variables, *case))
    return best, calls


def keep(best: Speeds, case: tuple[int, int], found: Sequence[float]) -> None:
    before = best.get(case, (0.0, 0.0))
    best[case] = (max(found[0], before[0]), max(found[1], before[1]))


def lmcaches() -> dict[int, tuple[float, float]]:
    best: dict[int, tuple[float, float]] = {}
    failed: dict[int, RuntimeError] = {}
    for turn in range(ROUNDS):
        # Each with an empty server: one that is full evicts once a second, and drops stores until then.
        with lmcache_server(L1_GB) as (server, port):
            for page_kib in PAGES_KIB:
                # Sometimes LMCache finds nothing of what it has just stored. Another round then counts.
                try:
                    found = lmcache_gb_s(port, server.http_port, page_kib, 1000 * turn + page_kib * 100_000)
                except RuntimeError as error:
                    failed[page_kib] = error
                    continue
                before = best.get(page_kib, (0.0, 0.0))
                best[page_kib] = (max(found[0], before[0]), max(found[1], before[1]))
    for page_kib in set(PAGES_KIB) - set(best):
        raise failed[page_kib]
    return best


def main() -> None:
    peer.install()
    section = Section(
        "copies",
        "Store and load",
        f"GB (2**30 bytes) per second in host memory, requests of {REQUEST_BYTES >> 20} MiB, the best of "
        f"{ROUNDS} runs of each. Ours by `lmcache bench`, over the time from the first request to the last "
        "reply, blocks in no order; LMCache by its own `lmcache bench server`, from the median request of one "
        "worker, blocks in order. The calls alone are process_vm_readv and process_vm_writev without a server, from "
        f"as many threads as the server has for its copies, {THREADS} for each worker. "
        "[memcpy](#ways-to-copy-between-processes-on-a-cpu) is faster, but cannot copy between processes.",
    )
    (best, calls), peers = ours(), lmcaches()
    rows, shares, ahead = [], [], []
    for page_kib in PAGES_KIB:
        for workers in WORKERS:
            found, limit = best[page_kib, workers], calls[page_kib, workers]
            theirs = peers[page_kib] if workers == 1 else None
            share = [mine / other for mine, other in zip(found, limit, strict=True)]
            shares += share if page_kib >= BAR_FROM_KIB else []
            ahead += [mine / other for mine, other in zip(found, theirs, strict=True)] if theirs else []
            rows.append(
                [
                    f"{page_kib} KiB",
                    str(workers),
                    *(f"{each:.2f}" for each in found),
                    *(f"{each:.2f}" for each in limit),
                    *(f"{each:.0%}" for each in share),
                    *(f"{each:.2f}" for each in theirs or ()),
                ]
            )
            rows[-1] += [""] * (10 - len(rows[-1]))
    columns = [
        "page",
        "workers",
        "store",
        "load",
        "calls: store",
        "calls: load",
        "store ÷ calls",
        "load ÷ calls",
    ]
    section.table("", [*columns, "LMCache store", "LMCache load"], rows)
    bar = f"at least 75 % of the calls alone, pages from {BAR_FROM_KIB} KiB on"
    section.bar(bar, f"{min(shares):.0%} to {max(shares):.0%}", min(shares) >= 0.75)
    section.bar("ahead of LMCache", f"{min(ahead):.1f} to {max(ahead):.1f} times", min(ahead) > 1)
    section.plot(
        "copies",
        "Store and load, one worker",
        "page, KiB",
        "GB/s",
        {
            "the calls alone, store": [(page, calls[page, 1][0]) for page in PAGES_KIB],
            "the calls alone, load": [(page, calls[page, 1][1]) for page in PAGES_KIB],
            "store": [(page, best[page, 1][0]) for page in PAGES_KIB],
            "load": [(page, best[page, 1][1]) for page in PAGES_KIB],
            "LMCache store": [(page, peers[page][0]) for page in PAGES_KIB],
            "LMCache load": [(page, peers[page][1]) for page in PAGES_KIB],
        },
    )
    section.save()


if __name__ == "__main__":
    main()
