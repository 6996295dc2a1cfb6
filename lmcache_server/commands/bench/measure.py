"""The measurements of one client: generators that prepare, yield once, then yield a sample for each request,
and clean up."""

import time
from collections.abc import Iterator
from typing import NamedTuple

from lmcache_client.contract.messages import Done, Found, Ping, Stored
from lmcache_server.commands.bench.client import LOOKUP_WAIT_S, Client, chain
from lmcache_server.commands.bench.workload import BenchError


class Sample(NamedTuple):
    """One request, from its submission to its reply. `lost`: the server did not do all of it."""

    seconds: float = 0.0
    num_bytes: int = 0
    lost: bool = False


Samples = Iterator[Sample]


def ping(client: Client, _: int) -> Samples:
    yield Sample()
    for _ in range(client.workload.requests):
        started_s = time.perf_counter()
        client.ask(client.scheduler, Ping(), Done, LOOKUP_WAIT_S)
        yield Sample(time.perf_counter() - started_s)


def lookup(client: Client, chunks: int) -> Samples:
    """All clients look up the same prompt, which the first one stored."""
    keys = chain(0, 0, chunks)
    client.ask(client.worker, client.store_message(keys), Stored)
    message = client.lookup_message(keys)
    yield Sample()
    for _ in range(client.workload.requests):
        started_s = time.perf_counter()
        hit = client.ask(client.scheduler, message, Found, LOOKUP_WAIT_S)
        seconds = time.perf_counter() - started_s
        if hit.resume_tokens != message.limit_tokens:
            raise BenchError(
                "the server has no room for the chunks to look up: pass --only store,load, or try again "
                "when fewer engines use it"
            )
        client.release(hit)
        yield Sample(seconds)


def store(client: Client, _: int) -> Samples:
    workload = client.workload
    chains = [chain(client.number, request, workload.chunks) for request in range(workload.requests)]
    messages = [client.store_message(keys) for keys in chains]
    num_bytes = workload.block_bytes * sum(map(len, workload.positions))
    yield Sample()
    for message in messages:
        started_s = time.perf_counter()
        stored = client.ask(client.worker, message, Stored)
        seconds = time.perf_counter() - started_s
        yield Sample(seconds, num_bytes, stored.stored < len(message.objects))


def load(client: Client, _: int) -> Samples:
    """Takes its leases before the first sample and gives them up after the last: only copies are timed."""
    workload = client.workload
    chains = [chain(client.number, request, workload.chunks) for request in range(workload.requests)]
    hits = [client.ask(client.scheduler, client.lookup_message(keys), Found) for keys in chains]
    whole = workload.chunks * workload.chunk_size
    message = None
    yield Sample()
    for turn, (keys, hit) in enumerate(zip(chains, hits, strict=True)):
        if hit.resume_tokens != whole:
            yield Sample(lost=True)
            continue
        message = client.load_message(hit, keys[-1], turn)
        started_s = time.perf_counter()
        client.ask(client.worker, message, Done)
        seconds = time.perf_counter() - started_s
        yield Sample(seconds, workload.block_bytes * sum(map(len, message.block_ids)))
    if message is not None:
        client.check(message)
    client.release(*hits)
