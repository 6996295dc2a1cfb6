"""Figures of the GPU data plane, all of one machine and one run: `make bench-gpu`.

Prints Markdown. What every figure is measured against is measured beside it: the peak is one pinned
cuMemcpyAsync of 256 MiB after another, in the same direction.
"""

import argparse
import mmap
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import numpy as np
from gpu_engine import GpuEngine, Layout, allocate, fused, loaded
from harness.rawclient import chain
from harness.server import LMCacheServer

from lmcache_client.contract.messages import Message
from lmcache_client.server_channel import Channel, ChannelError
from lmcache_kernels.driver import Driver
from lmcache_kernels.page_copy import BLOCKS, MAX_PIECES, KernelError, PageCopy, compiled

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PAGE_BYTES = (1 * KIB, 4 * KIB, 8 * KIB, 16 * KIB, 28 * KIB, 64 * KIB, 256 * KIB, 1 * MIB, 4 * MIB)
LAYERS, CHUNK_SIZE = 64, 32
_tokens = count(1)


def seconds(run: Callable[[], object], times: int) -> list[float]:
    found = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return found


@contextmanager
def pinned(driver: Driver, num_bytes: int) -> Iterator[Any]:
    host = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
    host[:] = 1
    driver.register_host(host.ctypes.data, num_bytes)
    yield host.ctypes.data
    driver.unregister_host(host.ctypes.data)


def peaks(driver: Driver, num_bytes: int, times: int) -> dict[bool, float]:
    """GB/s of one plain copy after another, by direction (True: into the device)."""
    device, _keeper = allocate(num_bytes)
    stream, found = driver.create_stream(), {}
    with pinned(driver, num_bytes) as host:
        for load in (False, True):
            ends = (device, host) if load else (host, device)

            def run(ends: tuple[int, int] = ends) -> None:
                for _ in range(4):
                    driver.copy(*ends, num_bytes, stream)
                driver.synchronize(stream)

            run()
            found[load] = 4 * num_bytes / min(seconds(run, times)) / 1e9
    driver.destroy_stream(stream)
    return found


def paths(driver: Driver, total: int, times: int) -> list[tuple[Any, ...]]:
    """GB/s of scattered pieces by either path, without a server: where one overtakes the other."""
    try:
        image = compiled(driver.compute_capability(0))
        kernel = PageCopy(driver, driver.load_kernel(image, "page_copy"))
    except KernelError as error:
        print(f"(no kernel: {error})")
        return []
    device, _keeper = allocate(2 * total)
    stream, rows = driver.create_stream(), []
    with pinned(driver, total) as host:
        for page_bytes in PAGE_BYTES[:-1]:
            for number in (16, 64, 1024, MAX_PIECES):
                if number * page_bytes > total:
                    continue
                order = np.random.default_rng(0).permutation(number).astype(np.uint64)
                places = np.uint64(device) + order * np.uint64(2 * page_bytes)
                local = np.uint64(host) + np.arange(number, dtype=np.uint64) * np.uint64(page_bytes)
                length = np.full(number, page_bytes, np.uint64)
                row: list[Any] = [f"{page_bytes // KIB} KiB", number]
                for load in (False, True):
                    source, destination = (local, places) if load else (places, local)
                    batch = driver.batch(destination, source, length, in_order=not load)
                    engine = partial(batch, 0, len(length), stream)
                    ours = lambda: kernel.launch(source, destination, length, stream)  # noqa: E731
                    for submit in (engine, ours):
                        repeat = max(1, min(64 * MIB, total) // (number * page_bytes))

                        def run(submit: Callable[[], None] = submit, repeat: int = repeat) -> None:
                            for _ in range(repeat):
                                submit()
                            driver.synchronize(stream)

                        run()
                        best = min(seconds(run, times))
                        row.append(f"{repeat * number * page_bytes / best / 1e9:.1f}")
                rows.append(tuple(row))
    kernel.close()
    return rows


def started(server: LMCacheServer, layout: Layout, num_blocks: int) -> GpuEngine:
    """An engine that sees an answer when it comes, not at the next turn of a loop that sleeps."""
    engine = GpuEngine(server.address, layout, num_blocks).start(60)
    for channel in (engine.worker, engine.scheduler):

        def call(message: Message, timeout_s: float, channel: Channel = channel) -> Message:
            pending = channel.submit(message, timeout_s)
            channel.poll(pending, timeout_s)
            if pending.reply is None:
                raise pending.error or ChannelError("no answer")
            return pending.reply

        channel.call = call  # type: ignore[method-assign,assignment]
    return engine


def prompt(engine: GpuEngine, blocks: list[int]) -> tuple[tuple[bytes, ...], list[list[int]]]:
    start = next(_tokens) << 20
    return chain(range(start, start + 16 * len(blocks)), CHUNK_SIZE), [blocks]


def scattered(num_blocks: int, wanted: int) -> list[int]:
    """Blocks of which no two are neighbours, in a random order."""
    chosen = np.random.default_rng(1).permutation(np.arange(1, num_blocks - 1, 2))[:wanted]
    return [int(block) for block in chosen]


def through_the_server(
    page_sizes: tuple[int, ...], total: int, times: int, peak: dict[bool, float], l1_gb: float
) -> list[tuple[Any, ...]]:
    """GB/s from the request to its answer, per piece size; and the latency of one chunk."""
    rows = []
    for page_bytes in page_sizes:
        wanted = max(2, total // (LAYERS * page_bytes) // 2 * 2)
        wanted = min(wanted, 4096)
        layers = max(1, min(LAYERS, total // (wanted * page_bytes)))
        num_blocks = 2 * wanted + 2
        layout: Layout = fused(page_bytes, num_blocks, layers)
        num_bytes = wanted * layers * page_bytes
        with LMCacheServer(chunk_size=CHUNK_SIZE, l1_size_gb=l1_gb, checksums=False) as server:
            engine = started(server, layout, num_blocks)
            blocks = scattered(num_blocks, wanted)
            stored, loaded_s = [], []
            for _ in range(times + 1):
                keys, tables = prompt(engine, blocks)
                start = time.perf_counter()
                reply = engine.store_prompt(keys, tables)
                stored.append(time.perf_counter() - start)
                assert reply.stored == len(keys), reply
                found = engine.lookup(keys)
                start = time.perf_counter()
                engine.load(found, keys, tables)
                loaded_s.append(time.perf_counter() - start)
                engine.end(found)
            one = blocks[:2]
            keys, tables = prompt(engine, one)
            engine.store_prompt(keys, tables)

            def chunk(engine: GpuEngine = engine, keys: Any = keys, tables: Any = tables) -> None:
                promised = engine.lookup(keys)
                engine.load(promised, keys, tables)
                engine.end(promised)

            latency_s = statistics.median(seconds(chunk, 20))
            engine.close()
        speeds = [num_bytes / min(each[1:]) / 1e9 for each in (stored, loaded_s)]
        rows.append(
            (
                f"{page_bytes // KIB} KiB", wanted * layers, f"{num_bytes / MIB:.0f} MiB",
                f"{speeds[0]:.1f}", f"{100 * speeds[0] / peak[False]:.0f} %",
                f"{speeds[1]:.1f}", f"{100 * speeds[1] / peak[True]:.0f} %", f"{1e3 * latency_s:.2f}",
            )
        )  # fmt: skip
    return rows


def starts(sizes_gb: list[float], page_bytes: int) -> list[tuple[Any, ...]]:
    """Seconds from the start of the process: ready, first page restored, all of L1 pinned. And what the server
    takes on the device: a context before it has pinned much, and then the page tables of what is pinned."""
    rows = []
    for size_gb in sizes_gb:
        driver = loaded()
        free_before = driver.memory_info()[0]
        start = time.perf_counter()
        with LMCacheServer(chunk_size=CHUNK_SIZE, l1_size_gb=size_gb, checksums=False) as server:
            ready_s = time.perf_counter() - start
            engine = started(server, fused(page_bytes, 8), 8)
            keys, tables = prompt(engine, [1, 2])
            engine.store_prompt(keys, tables)
            found = engine.lookup(keys)
            engine.load(found, keys, tables)
            served_s = time.perf_counter() - start
            pinned_gb = server.status()["l1"]["pinned_bytes"] / 1e9
            before = free_before - driver.memory_info()[0]
            server.wait_until(lambda l1: l1["pinned_bytes"] == l1["total_bytes"], 600)
            pinned_s = time.perf_counter() - start
            after = free_before - driver.memory_info()[0]
            engine.close()
        device = (f"{before / MIB:.0f} MiB, {pinned_gb:.1f} GB pinned", f"{after / MIB:.0f} MiB")
        rows.append((size_gb, f"{ready_s:.2f}", f"{served_s:.2f}", f"{pinned_s:.1f}", *device))
    return rows


def slowdown(times: int, l1_gb: float) -> list[tuple[Any, ...]]:
    """How much slower the engine computes while the server copies for it, by piece size and direction."""
    try:
        import torch
    except ImportError:
        return []
    if not torch.cuda.is_available():
        return []
    square = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    narrow = torch.randn(8192, 8, dtype=torch.bfloat16, device="cuda")

    def gemm() -> None:
        for _ in range(20):
            torch.mm(square, square)
        torch.cuda.synchronize()

    tokens = torch.zeros(64, dtype=torch.int32, pin_memory=True)
    on_device = torch.zeros(64, dtype=torch.int32, device="cuda")

    def decode() -> None:
        """Each step ends with a few bytes each way, which wait for the copies that a store has enqueued."""
        for step in range(200):
            torch.mm(square, narrow)
            if step % 10 == 9:
                on_device.copy_(tokens, non_blocking=True)
                tokens.copy_(on_device, non_blocking=True)
                torch.cuda.current_stream().synchronize()
        torch.cuda.synchronize()

    rows = []
    for page_bytes in (8 * KIB, 64 * KIB, 1 * MIB):
        wanted = 128
        num_blocks = 2 * wanted + 2
        with LMCacheServer(chunk_size=CHUNK_SIZE, l1_size_gb=l1_gb, checksums=False) as server:
            engine = started(server, fused(page_bytes, num_blocks, LAYERS), num_blocks)
            keys, tables = prompt(engine, scattered(num_blocks, wanted))
            engine.store_prompt(keys, tables)
            for load in (True, False):
                row: list[Any] = [f"{page_bytes // KIB} KiB", "load" if load else "store"]
                for work in (gemm, decode):
                    work()
                    alone = min(seconds(work, times))
                    ending, copied = threading.Event(), [0]

                    def copy(load: bool = load, ending: Any = ending, copied: Any = copied) -> None:
                        while not ending.is_set():
                            if load:
                                found = engine.lookup(keys)
                                engine.load(found, keys, tables)
                                engine.end(found)
                            else:
                                fresh, places = prompt(engine, tables[0])
                                engine.store_prompt(fresh, places)
                            copied[0] += 1

                    thread = threading.Thread(target=copy)
                    thread.start()
                    time.sleep(0.2)
                    before, start = copied[0], time.perf_counter()
                    beside = statistics.median(seconds(work, times))
                    rate = (
                        (copied[0] - before)
                        * wanted
                        * LAYERS
                        * page_bytes
                        / (time.perf_counter() - start)
                        / 1e9
                    )
                    ending.set()
                    thread.join()
                    row += [f"{100 * (beside / alone - 1):.1f} %", f"{rate:.1f}"]
                rows.append(tuple(row))
            engine.close()
    return rows


def table(title: str, columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    print(f"\n### {title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |", flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="tiny sizes, to try the program itself")
    options.add_argument("--sizes-gb", default="8,32,100", help="of L1, for the times of a start")
    given = options.parse_args()
    times, total, l1_gb = (2, 4 * MIB, 0.5) if given.quick else (5, 256 * MIB, 8.0)
    page_sizes = PAGE_BYTES[::4] if given.quick else PAGE_BYTES
    driver = loaded()
    print(
        f"CUDA {driver.version()}, compute capability {driver.compute_capability(0)}, {platform.platform()}"
    )
    peak = peaks(driver, total, times)
    print(f"peak: {peak[False]:.1f} GB/s from the device, {peak[True]:.1f} to it; kernel: {BLOCKS} blocks")
    table(
        "Through the server",
        ("piece", "pieces", "job", "store GB/s", "of peak", "load GB/s", "of peak", "one chunk, ms"),
        through_the_server(page_sizes, total, times, peak, l1_gb),
    )
    table(
        "By path, GB/s",
        ("piece", "pieces", "store, engine", "store, kernel", "load, engine", "load, kernel"),
        paths(driver, total, times),
    )
    sizes = [0.5] if given.quick else [float(size) for size in given.sizes_gb.split(",")]
    table(
        "Start, seconds",
        (
            "L1, GB",
            "ready",
            "first page served",
            "all pinned",
            "on the device then",
            "and when all is pinned",
        ),
        starts(sizes, 64 * KIB),
    )
    table(
        "Slowdown of the engine's compute",
        ("piece", "copies", "GEMM", "beside GB/s", "decode-like", "beside GB/s"),
        slowdown(times, l1_gb),
    )


if __name__ == "__main__":
    main()
