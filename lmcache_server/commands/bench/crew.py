"""Clients in processes of their own, which start each measurement together."""

import contextlib
import dataclasses
import multiprocessing
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from lmcache_server.commands.bench.client import Client
from lmcache_server.commands.bench.measure import Sample, Samples
from lmcache_server.commands.bench.workload import BenchError, Workload

TICK_S = 0.1
LEAVE_S = 10.0

Phase = tuple[str, Callable[[Client, int], Samples], int]
"""Name, measurement, and what it is given."""
Part = tuple[float, float, list[Sample]]
"""What one client measured: when it started and ended, and its samples."""


@dataclasses.dataclass(frozen=True)
class Crew:
    """`size` clients that measure the same; what they store takes `l1_bytes` of L1."""

    size: int
    workload: Workload
    phases: tuple[Phase, ...]
    l1_bytes: int

    @property
    def num_samples(self) -> int:
        return self.size * len(self.phases) * self.workload.requests

    def run(self, address: str, tick: Callable[[int], object]) -> dict[str, list[Part]]:
        """By phase what each client measured; `tick` is told how many samples have come. Raises BenchError.
        When this returns or raises, no process is left."""
        context = multiprocessing.get_context("spawn")
        pipes: list[Any] = []
        processes = []
        # Ctrl-C is for this process, which ends the others; they inherit that they ignore it.
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            try:
                for number in range(self.size):
                    ours, theirs = context.Pipe()
                    arguments = (theirs, address, self.workload, number, self.phases)
                    processes.append(context.Process(target=_client, args=arguments, daemon=True))
                    processes[-1].start()
                    theirs.close()
                    pipes.append(ours)
            finally:
                signal.signal(signal.SIGINT, interrupt)
            found = {name: _together(pipes, tick) for name, _, _ in self.phases}
            for process in processes:
                process.join(LEAVE_S)
            return found
        finally:
            for process in processes:
                process.kill()
                process.join()


def _together(pipes: list[Any], tick: Callable[[int], object]) -> list[Part]:
    """One phase of all clients, which start when the last is ready."""
    for pipe in pipes:
        _receive(pipe)
    for pipe in pipes:
        pipe.send(None)
    parts, waiting = [], list(pipes)
    while waiting:
        for pipe in wait(waiting):
            message = _receive(pipe)
            if isinstance(message, int):
                tick(message)
            else:
                parts.append(message)
                waiting.remove(pipe)
    return parts


def _receive(pipe: Any) -> Any:
    try:
        message = pipe.recv()
    except (EOFError, OSError):
        raise BenchError("a process of the bench was ended: is there enough memory for it?") from None
    if isinstance(message, str):
        raise BenchError(message)
    return message


def _client(
    pipe: "Connection[Any, Any]", address: str, workload: Workload, number: int, phases: tuple[Phase, ...]
) -> None:
    """The program of one client."""
    try:
        with Client(address, workload, number) as client:
            for _, measurement, argument in phases:
                samples = measurement(client, argument)
                next(samples)
                pipe.send(None)
                pipe.recv()
                pipe.send(_measured(pipe, samples))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # The command has ended before its clients.
    except Exception as error:
        with contextlib.suppress(OSError):
            pipe.send(str(error) or type(error).__name__)


def _measured(pipe: "Connection[Any, Any]", samples: Samples) -> Part:
    found: list[Sample] = []
    started_s = ended_s = told_s = time.perf_counter()
    told = 0
    for sample in samples:
        ended_s = time.perf_counter()
        found.append(sample)
        # Seldom: telling takes time, too.
        if ended_s - told_s > TICK_S:
            pipe.send(len(found) - told)
            told, told_s = len(found), ended_s
    pipe.send(len(found) - told)
    return started_s, ended_s, found
