"""Clients, each in its own process, that start every measurement together."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier

from lmcache_server.commands.bench.client import Client
from lmcache_server.commands.bench.measure import Samples
from lmcache_server.commands.bench.tally import Tally
from lmcache_server.commands.bench.workload import BenchError, Workload

Phase = tuple[str, Callable[[Client, int], Samples], int]
"""A name, a measurement and its argument."""
Part = tuple[float, float, Tally]
"""The start and end of one client's phase, in seconds of perf_counter, and the sum of its samples."""

_start: Barrier
"""In a client's process: all clients wait here until the last one is ready."""


@dataclass(frozen=True)
class Crew:
    """`size` clients that measure the same thing; their chunks take `l1_bytes` of L1."""

    size: int
    workload: Workload
    phases: tuple[Phase, ...]
    l1_bytes: int

    def run(self, address: str) -> dict[str, list[Part]]:
        """Run all clients and return their parts by phase. Raises BenchError. Leaves no process."""
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
            parts = [client.result() for client in as_completed(clients)]
        except BaseException as error:
            for process in multiprocessing.active_children():
                process.kill()
            if isinstance(error, BrokenProcessPool):
                raise BenchError("a bench process was killed: is there enough memory for it?") from None
            raise
        finally:
            pool.shutdown()
        return {name: [part[index] for part in parts] for index, (name, _, _) in enumerate(self.phases)}


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


def _client(address: str, crew: Crew, number: int) -> list[Part]:
    """Run all phases of one client."""
    try:
        with Client(address, crew.workload, number) as client:
            return [_measured(measurement(client, argument)) for _, measurement, argument in crew.phases]
    except Exception as error:
        raise BenchError(str(error) or type(error).__name__) from None


def _measured(measurement: Samples) -> Part:
    next(measurement)
    _start.wait()
    tally = Tally()
    started_s = ended_s = time.perf_counter()
    for sample in measurement:
        ended_s = time.perf_counter()
        tally.add(sample)
    return started_s, ended_s, tally
