"""Bytes per second of store and load, in host memory, beside memcpy and LMCache."""

import ctypes
import json
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import peer
from harness.processes import environment
from harness.waiting import get, wait_until
from section import Section
from systems import lmcache_server, our_server

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


def memcpy_gb_s(threads: int) -> float:
    """Between buffers that are resident and too large for caches, all of each in one call."""
    buffers = [(np.ones(256 << 20, np.uint8), np.ones(256 << 20, np.uint8)) for _ in range(threads)]
    barrier = threading.Barrier(threads + 1)

    def copy(into: Any, source: Any) -> None:
        barrier.wait()
        for _ in range(2):
            ctypes.memmove(into.ctypes.data, source.ctypes.data, source.nbytes)
        barrier.wait()

    workers = [threading.Thread(target=copy, args=pair) for pair in buffers]
    for worker in workers:
        worker.start()
    barrier.wait()
    start = time.perf_counter()
    barrier.wait()
    seconds = time.perf_counter() - start
    for worker in workers:
        worker.join()
    return 2 * sum(source.nbytes for _, source in buffers) / seconds / GIB


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


def ours(memcpy: dict[int, float]) -> dict[tuple[int, int], tuple[float, float]]:
    """The best of some rounds, per page size and number of workers; memcpy takes its turns among them."""
    best: dict[tuple[int, int], tuple[float, float]] = {}
    with our_server(L1_GB) as (server, port, variables):
        wait_until_populated(server.url("/status"))
        for _ in range(ROUNDS):
            for workers in WORKERS:
                memcpy[workers] = max(memcpy.get(workers, 0.0), memcpy_gb_s(THREADS * workers))
                for page_kib in PAGES_KIB:
                    found = ours_gb_s(port, variables, page_kib, workers)
                    before = best.get((page_kib, workers), (0.0, 0.0))
                    best[page_kib, workers] = (max(found[0], before[0]), max(found[1], before[1]))
    return best


def lmcaches() -> dict[int, tuple[float, float]]:
    best: dict[int, tuple[float, float]] = {}
    for turn in range(ROUNDS):
        # Each with an empty server: one that is full evicts once a second, and drops stores until then.
        with lmcache_server(L1_GB) as (server, port):
            for page_kib in PAGES_KIB:
                found = lmcache_gb_s(port, server.http_port, page_kib, 1000 * turn + page_kib * 100_000)
                before = best.get(page_kib, (0.0, 0.0))
                best[page_kib] = (max(found[0], before[0]), max(found[1], before[1]))
    return best


def main() -> None:
    peer.install()
    section = Section(
        "copies",
        "Store and load",
        f"GB (2**30 bytes) per second in host memory, requests of {REQUEST_BYTES >> 20} MiB, the best of "
        f"{ROUNDS} runs of each. Ours by `lmcache bench`, over the time from the first request to the last "
        "reply, blocks in no order; LMCache by its own `lmcache bench server`, from the median request of one "
        f"worker, blocks in order. memcpy copies 256 MiB in one call per thread, with as many threads as the server has "
        f"for its copies, {THREADS} for each worker.",
    )
    memcpy: dict[int, float] = {}
    best, peers = ours(memcpy), lmcaches()
    rows, shares, ahead = [], [], []
    for page_kib in PAGES_KIB:
        for workers in WORKERS:
            found, limit = best[page_kib, workers], memcpy[workers]
            theirs = peers[page_kib] if workers == 1 else None
            shares.append((min(found) / limit, page_kib, workers))
            ahead += [mine / other for mine, other in zip(found, theirs, strict=True)] if theirs else []
            rows.append(
                [
                    f"{page_kib} KiB",
                    str(workers),
                    *(f"{each:.2f}" for each in found),
                    f"{limit:.2f}",
                    *(f"{each / limit:.0%}" for each in found),
                    *(f"{each:.2f}" for each in theirs or ()),
                ]
            )
            rows[-1] += [""] * (9 - len(rows[-1]))
    columns = ["page", "workers", "store", "load", "memcpy", "store / memcpy", "load / memcpy"]
    section.table("", [*columns, "LMCache store", "LMCache load"], rows)
    low, high = min(shares), max(shares)
    section.bar(
        "at least 75 % of memcpy of as many threads", f"{low[0]:.0%} to {high[0]:.0%}", low[0] >= 0.75
    )
    section.bar("ahead of LMCache", f"{min(ahead):.1f} to {max(ahead):.1f} times", min(ahead) > 1)
    section.plot(
        "copies",
        "Store and load, one worker",
        "page, KiB",
        "GB/s",
        {
            f"memcpy, {THREADS} threads": [(page, memcpy[1]) for page in PAGES_KIB],
            "store": [(page, best[page, 1][0]) for page in PAGES_KIB],
            "load": [(page, best[page, 1][1]) for page in PAGES_KIB],
            "LMCache store": [(page, peers[page][0]) for page in PAGES_KIB],
            "LMCache load": [(page, peers[page][1]) for page in PAGES_KIB],
        },
    )
    section.save()


if __name__ == "__main__":
    main()
