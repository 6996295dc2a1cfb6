"""The measurements of one client: generators that prepare, yield once, then yield a sample for each request,
and clean up."""

import itertools
import time
from collections.abc import Iterator
from typing import NamedTuple

from lmcache_client.contract.codec import unpacked
from lmcache_client.contract.messages import Done, Found, Ping, Stored
from lmcache_server.commands.bench.client import LOOKUP_WAIT_S, Client, chain
from lmcache_server.commands.bench.workload import Workload
from lmcache_server.errors import CommandError


class Sample(NamedTuple):
    """One request, from its submission to its reply. `lost`: the server did not do all of it."""

    seconds: float = 0.0
    num_bytes: int = 0
    lost: bool = False


Samples = Iterator[Sample]


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
