"""What clients measure, each in its own process and all from the same moment, and the sums of their samples.

A measurement is a generator that prepares, yields once, then yields a sample for each request, and cleans up.
"""

import itertools
import math
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from typing import NamedTuple

from lmcache_client.contract.codec import unpacked
from lmcache_client.contract.messages import Done, Found, Ping, Stored
from lmcache_server.commands.bench.client import LOOKUP_WAIT_S, Client, Workload, chain
from lmcache_server.errors import CommandError


class Sample(NamedTuple):
    """One request, from its submission to its reply. `lost`: the server did not do all of it."""

    seconds: float = 0.0
    num_bytes: int = 0
    lost: bool = False


Samples = Iterator[Sample]
Phase = tuple[str, Callable[[Client, int], Samples], int]
"""A name, a measurement and its argument."""
STEPS = 100
"""A time is known to one part in this many."""

_start: Barrier
"""In a client's process: all clients wait here until the last one is ready."""


def turns(workload: Workload) -> Iterator[int]:
    """The number of each request: from now on for the workload's seconds, or as many as it has requests."""
    end_s = time.perf_counter() + workload.seconds
    for turn in itertools.count() if workload.seconds else range(workload.requests):
        if turn and workload.seconds and time.perf_counter() >= end_s:
            return
        yield turn


def ping(client: Client, _: int) -> Samples:
    yield Sample()
    for _ in turns(client.workload):
        started_s = time.perf_counter()
        client.ask(client.scheduler, Ping(), Done, LOOKUP_WAIT_S)
        yield Sample(time.perf_counter() - started_s)


def lookup(client: Client, chunks: int) -> Samples:
    """All clients look up the same prompt, which the first one stored."""
    keys = chain(0, 0, chunks)
    client.ask(client.worker, client.store_message(keys), Stored)
    message = client.lookup_message(keys)
    yield Sample()
    for _ in turns(client.workload):
        started_s = time.perf_counter()
        hit = client.ask(client.scheduler, message, Found, LOOKUP_WAIT_S)
        seconds = time.perf_counter() - started_s
        if hit.resume_tokens != message.limit_tokens:
            raise CommandError(
                "the chunks to look up are gone (no room, or cleared): try again, or pass --only store,load"
            )
        client.release(hit)
        yield Sample(seconds)


def store(client: Client, _: int) -> Samples:
    """With seconds, the server is told to evict these chunks before those that engines need."""
    workload = client.workload
    num_bytes = workload.block_bytes * sum(map(len, workload.positions))
    yield Sample()
    for turn in turns(workload):
        keys = chain(client.number, turn, workload.chunks)
        message = client.store_message(keys, once=bool(workload.seconds))
        started_s = time.perf_counter()
        stored = client.ask(client.worker, message, Stored)
        seconds = time.perf_counter() - started_s
        client.stored.append(turn)
        yield Sample(seconds, num_bytes, stored.stored < len(message.objects))


def load(client: Client, _: int) -> Samples:
    """Takes its leases before the first sample and gives them up after the last: only copies are timed. With
    seconds, it takes new leases before each round of its requests, because a lease ends."""
    workload = client.workload
    chains = [chain(client.number, request, workload.chunks) for request in client.stored]

    def leases() -> list[Found]:
        return [client.ask(client.scheduler, client.lookup_message(keys), Found) for keys in chains]

    hits, message = leases(), None
    yield Sample()
    for turn in turns(workload):
        if turn and turn % len(chains) == 0:
            client.release(*hits)
            hits = leases()
        keys, hit = chains[turn % len(chains)], hits[turn % len(chains)]
        if hit.resume_tokens != workload.chunks * workload.chunk_size:
            yield Sample(lost=True)
            continue
        message = client.load_message(hit, keys[-1], turn)
        started_s = time.perf_counter()
        client.ask(client.worker, message, Done)
        seconds = time.perf_counter() - started_s
        yield Sample(seconds, workload.block_bytes * sum(map(len, map(unpacked, message.block_ids))))
    if message is not None:
        client.check(message)
    client.release(*hits)


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
    global _start  # noqa: PLW0603  (a process of a pool gets its barrier no other way)
    _start = start
    threading.Thread(target=_end_with_the_command, daemon=True).start()


def _end_with_the_command() -> None:
    command = multiprocessing.parent_process()
    assert command is not None
    command.join()
    os._exit(1)


def _client(address: str, crew: Crew, number: int) -> list[Tally]:
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
