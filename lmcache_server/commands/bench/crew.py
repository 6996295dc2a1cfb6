"""Clients, each in its own process, that start every measurement together, and the sums of their samples."""

import math
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier

from lmcache_server.commands.bench.client import Client
from lmcache_server.commands.bench.measure import Sample, Samples
from lmcache_server.commands.bench.workload import Workload
from lmcache_server.errors import CommandError

Phase = tuple[str, Callable[[Client, int], Samples], int]
"""A name, a measurement and its argument."""
STEPS = 100
"""A time is known to one part in this many."""

_start: Barrier
"""In a client's process: all clients wait here until the last one is ready."""


class Tally:
    """The sum of any number of samples, from now on, in a bounded size. Lost ones are counted and are in no
    other figure."""

    def __init__(self) -> None:
        self.started_s = self.ended_s = time.perf_counter()
        self.lost = 0
        self.num_bytes = 0
        self.max_s = 0.0
        self._times: Counter[int] = Counter()
        """How many samples took e ** (key / STEPS) seconds."""

    def add(self, sample: Sample) -> None:
        self.ended_s = time.perf_counter()
        if sample.lost:
            self.lost += 1
            return
        self._times[round(STEPS * math.log(max(sample.seconds, 1e-9)))] += 1
        self.num_bytes += sample.num_bytes
        self.max_s = max(self.max_s, sample.seconds)

    def merge(self, other: "Tally") -> None:
        """From now on this is the sum of both, from the first start to the last end."""
        self.started_s = min(self.started_s, other.started_s)
        self.ended_s = max(self.ended_s, other.ended_s)
        self.lost += other.lost
        self.num_bytes += other.num_bytes
        self.max_s = max(self.max_s, other.max_s)
        self._times += other._times

    @property
    def count(self) -> int:
        return self._times.total()

    def quantile_s(self, share: float) -> float:
        """A time that this share of the samples, and no smaller one, took at most. 0 without samples."""
        passed = 0
        for key, count in sorted(self._times.items()):
            passed += count
            if passed >= share * self.count:
                return min(math.exp(key / STEPS), self.max_s)
        return 0.0


@dataclass(frozen=True)
class Crew:
    """`size` clients that measure the same thing; their chunks take `l1_bytes` of L1."""

    size: int
    workload: Workload
    phases: tuple[Phase, ...]
    l1_bytes: int

    def run(self, address: str) -> dict[str, Tally]:
        """Run all clients and return their sums by phase. Raises CommandError. Leaves no process."""
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(self.size, context, _enter, (context.Barrier(self.size),))
        # Ctrl-C is for this process, which then ends the clients: they inherit the blocked signal.
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
        try:
            # Each client occupies one process of the pool, because it waits there for all others.
            clients = [pool.submit(_client, address, self, number) for number in range(self.size)]
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
        try:
            first, *others = [client.result() for client in as_completed(clients)]
        except BaseException as error:
            for process in multiprocessing.active_children():
                process.kill()
            if isinstance(error, BrokenProcessPool):
                raise CommandError("a bench process was killed: is there enough memory for it?") from None
            raise
        finally:
            pool.shutdown()
        for tallies in others:
            for whole, part in zip(first, tallies, strict=True):
                whole.merge(part)
        return {name: whole for (name, _, _), whole in zip(self.phases, first, strict=True)}


def _enter(start: Barrier) -> None:
    """Prepare a client's process."""
    global _start  # noqa: PLW0603  (a process of a pool gets its barrier no other way)
    _start = start
    threading.Thread(target=_end_with_the_command, daemon=True).start()


def _end_with_the_command() -> None:
    command = multiprocessing.parent_process()
    assert command is not None
    command.join()
    os._exit(1)


def _client(address: str, crew: Crew, number: int) -> list[Tally]:
    """Run all phases of one client."""
    try:
        with Client(address, crew.workload, number) as client:
            return [_measured(measurement(client, argument)) for _, measurement, argument in crew.phases]
    except Exception as error:
        raise CommandError(str(error) or type(error).__name__) from None


def _measured(measurement: Samples) -> Tally:
    next(measurement)
    _start.wait()
    tally = Tally()
    for sample in measurement:
        tally.add(sample)
    return tally
