"""What the server's copy threads themselves cost for a GPU: real jobs and copy threads over a driver that does
nothing (null_driver.c), so no GPU is needed. All copy threads of a server share one interpreter lock.
"""

import concurrent.futures
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from section import RESULTS, Section, median

BUILT = RESULTS.parent / "null-driver"
if __name__ == "__main__" and "NULL_DRIVER" not in os.environ:
    # The loader reads LD_LIBRARY_PATH only when a process starts.
    BUILT.mkdir(parents=True, exist_ok=True)
    source = os.path.join(os.path.dirname(os.path.abspath(__file__)), "null_driver.c")
    command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(BUILT / "libcuda.so.1"), source]
    subprocess.run(command, check=True)
    os.environ |= {"NULL_DRIVER": "1", "LD_LIBRARY_PATH": str(BUILT)}
    os.execv(sys.executable, [sys.executable, *sys.argv])

from lmcache_client.contract.geometry import Region  # noqa: E402
from lmcache_client.contract.messages import Memory  # noqa: E402
from lmcache_server.core.pool import FRAME_BYTES  # noqa: E402
from lmcache_server.service.system import Process  # noqa: E402
from lmcache_server.transfer.copy_queue import CopyWorker  # noqa: E402
from lmcache_server.transfer.cuda import CudaMapping  # noqa: E402
from lmcache_server.transfer.gpus import Gpus  # noqa: E402
from lmcache_server.transfer.jobs import LoadJob, StoreJob  # noqa: E402
from lmcache_server.transfer.locked_memory import LockedMemory  # noqa: E402
from lmcache_server.transfer.plan import ObjectCopy  # noqa: E402

GB = 1e9
L1_ADDRESS, L1_BYTES = 1 << 40, 100 << 30
UNIT_BYTES = 1 << 30
GPUS = 8
CHUNKS, BLOCKS = 60, 34
"""Of a request: 32,640 tokens, in chunks of 544 and blocks of 16."""
ENGINE_BLOCKS = 20_000
JOBS, ROUNDS = 8, 5


class Shape(NamedTuple):
    """A model's KV cache on one rank: so many regions, in which each block has so many bytes."""

    name: str
    regions: int
    page_bytes: int


LARGE = Shape("70B, TP 8, block outermost: 640 KiB", 1, 640 << 10)
SHAPES = (
    LARGE,
    Shape("8B, block outermost: 2 MiB", 1, 2 << 20),
    Shape("8B, layer outermost: 64 KiB", 32, 64 << 10),
    Shape("70B, TP 8, layer outermost: 8 KiB", 80, 8 << 10),
)
MAX_LOAD_MS, MAX_STORE_MS, MIN_GB_S = 0.6, 1.1, 600.0


class Loop:
    """What a copy thread sees of the event loop."""

    create_future = staticmethod(concurrent.futures.Future)

    def call_soon_threadsafe(self, function: Callable[..., object], *arguments: object) -> None:
        function(*arguments)


class Machine:
    """L1 and GPUS workers with a copy thread each. Everything is pinned."""

    def __init__(self) -> None:
        gpus = Gpus()
        locked = LockedMemory(gpus, L1_ADDRESS, L1_BYTES, UNIT_BYTES)
        assert locked.pin_rest()
        self._process: Any = Process(os.pidfd_open(os.getpid()), Loop())  # type: ignore[arg-type]
        self._workers = list[Any]()
        for ordinal in range(GPUS):
            uuid = bytes([ordinal + 1]) + bytes(15)
            memory = Memory(os.getpid(), ((0, 1 << 44),), 0, uuid, (bytes(64),))
            mapping, loop = CudaMapping(memory, gpus, locked), Loop()
            worker = CopyWorker(f"copy-{ordinal}", mapping, self._process.alive, loop)  # type: ignore[arg-type]
            opened: Any = worker.opened
            assert opened.result(10).error is None, opened.result(10).error
            self._workers.append(worker)

    def run(self, jobs: list[list[LoadJob | StoreJob]]) -> tuple[float, float, float]:
        """Submits these jobs of each worker at once: (GB, seconds, CPU seconds of the process)."""
        start, cpu = time.perf_counter(), time.process_time()
        ends = [worker.submit(job) for worker, own in zip(self._workers, jobs, strict=False) for job in own]
        outcomes = [end.result(60) for end in ends]
        took, cpu = time.perf_counter() - start, time.process_time() - cpu
        assert not any(outcome.error for outcome in outcomes), outcomes
        return sum(outcome.num_bytes for outcome in outcomes) / GB, took, cpu


def jobs_of(shape: Shape, load: bool, source: random.Random) -> list[LoadJob | StoreJob]:
    """Requests whose blocks and chunks lie anywhere, each chunk in a row of frames."""
    span = ENGINE_BLOCKS * shape.page_bytes
    regions = [
        [Region(0, number * span, shape.page_bytes, shape.page_bytes) for number in range(shape.regions)]
    ]
    chunk_bytes = BLOCKS * shape.regions * shape.page_bytes
    frames = -(-chunk_bytes // FRAME_BYTES)
    places = L1_BYTES // FRAME_BYTES // frames
    jobs = list[LoadJob | StoreJob]()
    for _ in range(JOBS):
        blocks = source.sample(range(ENGINE_BLOCKS), CHUNKS * BLOCKS)
        objects = [
            (
                0,
                ObjectCopy(
                    ((place * frames, frames),), BLOCKS, 0, tuple(blocks[at * BLOCKS : (at + 1) * BLOCKS])
                ),
            )
            for at, place in enumerate(source.sample(range(places), CHUNKS))
        ]
        where = objects, regions, (1 << 45,), L1_ADDRESS, FRAME_BYTES, lambda: None, False
        jobs.append(LoadJob(*where, [b""] * CHUNKS) if load else StoreJob(*where))
    return jobs


def main() -> None:
    section = Section(
        "null_driver",
        "Copies on GPUs, without the GPU",
        "Jobs of 60 chunks of 34 blocks over a CUDA driver that does nothing: what the server's own threads cost. "
        "A bus takes some 55 GB/s, eight take 440. No GPU took part.",
    )
    machine, source = Machine(), random.Random(0)
    rows, of_one, together = [], dict[tuple[Shape, bool], float](), dict[bool, float]()
    for shape in SHAPES:
        for load in (True, False):
            jobs = jobs_of(shape, load, source)
            one = [machine.run([jobs]) for _ in range(ROUNDS)]
            all_of_them = [machine.run([jobs] * GPUS) for _ in range(ROUNDS)]
            of_one[shape, load] = 1e3 * min(cpu / gb for gb, _, cpu in one)
            speed = median([gb / took for gb, took, _ in all_of_them])
            if shape is LARGE:
                together[load] = speed
            cores = median([cpu / took for _, took, cpu in all_of_them])
            numbers = f"{of_one[shape, load]:.2f} ms", f"{speed:,.0f} GB/s", f"{cores:.2f}"
            rows.append((shape.name, "load" if load else "store", *numbers))
    columns = "pages", "direction", "CPU of one thread for a GB", "eight threads, in all", "cores used"
    section.table("What the copy threads issue", columns, rows)
    loads, stores = of_one[LARGE, True], of_one[LARGE, False]
    section.bar(f"a load: at most {MAX_LOAD_MS} ms a GB", f"{loads:.2f} ms", loads <= MAX_LOAD_MS)
    section.bar(f"a store: at most {MAX_STORE_MS} ms a GB", f"{stores:.2f} ms", stores <= MAX_STORE_MS)
    slowest = min(together.values())
    bar = f"eight threads: at least {MIN_GB_S:.0f} GB/s"
    section.bar(bar, f"{slowest:,.0f} GB/s", slowest >= MIN_GB_S, top=True)
    section.save()


main()
