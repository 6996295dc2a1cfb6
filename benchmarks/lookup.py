"""Lookup round trips as the connector sees them, beside bare ZeroMQ round trips of the same messages."""

import argparse
import multiprocessing
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import peer
import zmq
from big_index_server import BLOCKS, CHUNK_TOKENS, GROUPS, MODEL, key
from harness.rawclient import RawEngine
from section import Section, micros, percentile
from systems import lmcache_server, our_server, server_command

from lmcache_client.contract import messages
from lmcache_client.contract.messages import Found, Lookup, Release
from lmcache_client.engine import join
from lmcache_client.server_channel import Channel

ENGINE_ID = "engine"
CHUNKS = (1, 64, 512)
INDEX_CHUNKS = (1_000, 10_000, 100_000)
MAX_REQUEST_S = 130e-6
CROWD_CHUNKS = 240
CROWD = 8
ROUNDS = 300
PAUSE_S = 0.02
"""On average, between the questions of one of many clients: engines ask when requests come."""
WAIT_S = 10.0
WARM_UP = 20
_spawn = multiprocessing.get_context("spawn")

Times = list[float]


def question(first: int, chunks: int) -> Lookup:
    keys = tuple(key(number) for number in range(first, first + chunks))
    limit = chunks * CHUNK_TOKENS
    return Lookup("request", keys, 0, limit, limit + 1)


def ask_ours(
    address: str, number: int, asked: list[Lookup], ready: Callable[[], Any], pause: Callable[[], None]
) -> Times:
    """Seconds from the submission of each to its answer. Every one must hit; its lease is given back."""
    channel = Channel(address, lambda channel: join(channel, f"{ENGINE_ID} {number}"))
    channel.start(WAIT_S, WAIT_S)
    ready()
    times = []
    for each in asked:
        start = time.perf_counter()
        pending = channel.submit(each, WAIT_S)
        channel.poll(pending, WAIT_S)
        times.append(time.perf_counter() - start)
        assert isinstance(pending.reply, Found), pending.error
        assert pending.reply.resume_tokens == each.limit_tokens, "the index has all that is asked for"
        ended = channel.submit(Release((pending.reply.lease_id,), ()), WAIT_S)
        channel.poll(ended, WAIT_S)
        pause()
    channel.close()
    return times


def ask_bare(
    address: str, _number: int, asked: list[Lookup], ready: Callable[[], Any], pause: Callable[[], None]
) -> Times:
    """The same messages, for which nobody does anything."""
    times = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(address)
        ready()
        for number, each in enumerate(asked):
            start = time.perf_counter()
            socket.send(messages.encode_request(number, each))
            socket.poll()
            messages.decode_reply(socket.recv())
            times.append(time.perf_counter() - start)
            pause()
    return times


def one_client(kind: str, address: str, index: int, chunks: int, pause_s: float, seed: int, start: Any,
               results: Any) -> None:  # fmt: skip
    """A client process. It asks for chains at random places of the index, as requests do."""
    pick = random.Random(seed)
    asked = [question(pick.randrange(index - chunks + 1), chunks) for _ in range(ROUNDS + WARM_UP)]
    ask = ask_ours if kind == "ours" else ask_bare
    waits = iter([pick.expovariate(1 / pause_s) if pause_s else 0.0 for _ in asked])
    results.put(ask(address, seed, asked, start.wait, lambda: time.sleep(next(waits)))[WARM_UP:])


def in_processes(count: int, target: Callable[..., None], *arguments: Any) -> Times:
    """What `count` processes found that began together. Each is called with these arguments, its number, what to
    wait for before it begins, and the queue for its times."""
    start, results = _spawn.Barrier(count), _spawn.Queue()
    processes = [
        _spawn.Process(target=target, args=(*arguments, number, start, results), daemon=True)
        for number in range(count)
    ]
    for process in processes:
        process.start()
    times = [each for _ in processes for each in results.get(timeout=120)]
    for process in processes:
        process.join()
    return times


def clients(kind: str, address: str, index: int, chunks: int, count: int) -> Times:
    """The times of `count` clients at once."""
    return in_processes(count, one_client, kind, address, index, chunks, PAUSE_S if count > 1 else 0.0)


def echo(address: str, chunks: int) -> None:
    """The other end of bare round trips."""
    reply = Found(chunks * CHUNK_TOKENS, 1, 120, (bytes(chunks // 8 + 1),))
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind(address)
        while True:
            identity, frame = socket.recv_multipart()
            request_id, _ = messages.decode_request(frame)
            socket.send_multipart([identity, messages.encode_reply(bytes(16), request_id, reply)])


@contextmanager
def echo_server(chunks: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="lmcache-bench-") as directory:
        address = f"ipc://{directory}/echo"
        process = _spawn.Process(target=echo, args=(address, chunks), daemon=True)
        process.start()
        try:
            yield address
        finally:
            process.kill()
            process.join()


def measure(section: Section, index_sizes: list[int]) -> dict[int, float]:
    """The seconds of a lookup by one client, by chunks asked, in the smallest index."""
    times: dict[int, float] = {}
    rows: list[list[str]] = []
    medians: dict[tuple[int, int, int], float] = {}
    tails: list[float] = []
    cases = [(chunks, 1) for chunks in CHUNKS] + [(CROWD_CHUNKS, 1), (CROWD_CHUNKS, CROWD)]
    for size in index_sizes:
        command = server_command("benchmarks/big_index_server.py", str(size))
        with our_server(0.01, command, chunk_size=CHUNK_TOKENS) as (_, port, variables):
            address = f"ipc://{variables['LMCACHE_RUNTIME_DIR']}/{port}.sock"
            engines = [
                RawEngine(address, GROUPS, BLOCKS, f"{ENGINE_ID} {n}", MODEL.model) for n in range(CROWD)
            ]
            for engine in engines:
                engine.worker.start(WAIT_S, WAIT_S)
                assert engine.worker.ready, engine.states
            for chunks, count in cases:
                with echo_server(chunks) as bare_address:
                    bare = clients("bare", bare_address, size, chunks, count)
                    ours = clients("ours", address, size, chunks, count)
                ratio = percentile(ours, 50) / percentile(bare, 50)
                times.setdefault(chunks, percentile(ours, 50))
                medians[size, chunks, count] = ratio
                tails += [percentile(ours, 99) / percentile(bare, 99)] if count == CROWD else []
                shown = [micros(percentile(each, percent)) for percent in (50, 99) for each in (bare, ours)]
                rows.append([f"{size:,}", str(count), str(chunks), *shown[:2], f"{ratio:.2f}", *shown[2:]])
                print("  ", *rows[-1], flush=True)
            for engine in engines:
                engine.close()
    columns = [
        "chunks in index",
        "clients",
        "chunks asked",
        "bare p50",
        "ours p50",
        "ratio",
        "bare p99",
        "ours p99",
    ]
    section.table("Ours:", columns, rows)
    alone = {case: ratio for case, ratio in medians.items() if case[2] == 1}
    section.bar(
        "p50 under 2 times a bare round trip of the same messages, one client",
        f"{min(alone.values()):.2f} to {max(alone.values()):.2f} times",
        max(alone.values()) < 2,
    )
    took = times[min(CHUNKS)]
    section.bar("one chunk, one client: p50 at most 130 µs", micros(took), took <= MAX_REQUEST_S)
    section.bar(
        f"p99 under 2 times that of bare round trips, {CROWD_CHUNKS} chunks and {CROWD} clients",
        f"{min(tails):.2f} to {max(tails):.2f} times",
        max(tails) < 2,
    )
    smallest, largest = index_sizes[0], index_sizes[-1]
    growth = max(medians[largest, chunks, 1] / medians[smallest, chunks, 1] for chunks in CHUNKS)
    section.bar(f"flat from {smallest:,} to {largest:,} chunks (p50 over a bare round trip grows by less than 1.5 times)",
                f"{growth:.2f} times at most", growth < 1.5)  # fmt: skip
    section.plot(
        "lookup",
        "Lookup round trip, one client, over a bare one of the same messages",
        "chunks in the index",
        "times a bare round trip",
        {f"{chunks} chunks": [(size, medians[size, chunks, 1]) for size in index_sizes] for chunks in CHUNKS},
    )
    return times


def measure_peer(section: Section, ours: dict[int, float]) -> None:
    """The lookups of LMCache's own bench, in an index of a few requests. They carry the tokens, which its server
    hashes; ours carry keys."""
    rows, ratios = [], []
    with lmcache_server(1.0) as (server, port):
        for chunks in CHUNKS:
            blocks = chunks * CHUNK_TOKENS // 16
            shape = f"(2,{2 * blocks},16,1,64):bfloat16:1"
            found = peer.bench(
                port, server.http_port, shape, chunks * CHUNK_TOKENS, range(chunks, chunks + 12)
            )
            ratios.append(found["lookup"] / ours[chunks])
            rows.append(
                [str(chunks), f"{chunks * CHUNK_TOKENS:,}", micros(found["lookup"]), f"{ratios[-1]:.1f}"]
            )
    columns = ["chunks asked", "tokens", "p50", "times ours"]
    section.table("LMCache's lookups, one client, by its own bench:", columns, rows)
    section.bar(
        "lookups ahead of LMCache's", f"{min(ratios):.1f} to {max(ratios):.1f} times", min(ratios) > 1
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--index", type=int, nargs="+", default=INDEX_CHUNKS)
    section = Section(
        "lookup",
        "Lookup round trip",
        "From the submission of the request to its answer in the client, through the connector's own "
        "channel, against a real server. Every lookup hits and leases all its chunks. The bare round trip sends "
        "the same messages between two Python processes that encode and decode them, and do nothing else. Of Llama 3.1, "
        "2 TB hold 60,000 chunks of 256 tokens (8B) or 24,000 (70B). One client asks "
        f"without a pause; of {CROWD} each asks at random, {1 / PAUSE_S:.0f} times a second on average.",
    )
    peer.install()
    measure_peer(section, measure(section, parser.parse_args().index))
    section.save()


if __name__ == "__main__":
    main()
