"""Lookups that come at a rate, not as fast as answers come, beside LMCache: how long they take while the server is busy.

A client that waits for each answer before it asks again asks less often when the server is slow, and so hides what
others would have waited. Here the times of all questions are drawn beforehand. What is measured is the time from when a
question was due until its answer was read.
"""

import contextlib
import itertools
import json
import multiprocessing
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peer
from harness.processes import ChildProcess, environment, tail
from harness.rawclient import RawEngine, chain, group
from lookup import in_processes
from paced import WINDOW, paced
from section import Section, micros, percentile
from systems import lmcache_server, no_shared_memory_left, our_server

CHUNK_TOKENS = 256
CHUNKS = 64
PROMPTS = 32
PAGE_BYTES = 16 << 10
BLOCK = 16
GROUPS = [group(block_size=BLOCK, layers=1, page_bytes=PAGE_BYTES)]
BLOCKS = 1 + CHUNKS * CHUNK_TOKENS // BLOCK
L1_GB = 4 * PROMPTS * CHUNKS * PAGE_BYTES * CHUNK_TOKENS / BLOCK / (1 << 30)
"""Room for what the copies store besides: nothing that is asked for is evicted."""
ENGINES = (1, 8)
SHARES = (0.25, 0.5, 0.75)
SECONDS = 6.0
WAIT_S = 30.0
SHORT_S = 0.001
MAX_P99_S = 0.002
_spawn = multiprocessing.get_context("spawn")
Ask = Callable[[int, float], list[float]]
"""The times of all questions of so many engines, together so many a second."""


def prompt(number: int) -> tuple[bytes, ...]:
    return chain([number] * (CHUNKS * CHUNK_TOKENS), CHUNK_TOKENS)


def table() -> list[list[int]]:
    return [list(range(1, BLOCKS))]


def one_client(address: str, rate: float, number: int, start: Any, results: Any) -> None:
    """Asks at `rate` questions a second, or, if that is 0, as fast as it can. Each is answered whole."""
    pick, prompts = random.Random(number), [prompt(each) for each in range(PROMPTS)]
    engine = RawEngine(address, GROUPS, BLOCKS, f"engine {number}").start()
    scheduler, channel = engine._scheduler, engine.scheduler

    def ask() -> tuple[tuple[bytes, ...], Any]:
        keys = pick.choice(prompts)
        return keys, scheduler.lookup(engine.lookup_message(keys), WAIT_S)

    def take(asked: tuple[tuple[bytes, ...], Any]) -> bool:
        keys, pending = asked
        if not pending.done:
            return False
        assert pending.reply is not None, pending.error
        assert pending.reply.resume_tokens == CHUNKS * CHUNK_TOKENS, "the server has all of it"
        scheduler.release((pending.reply.lease_id,), keys, "request")
        return True

    def wait(asked: tuple[tuple[bytes, ...], Any], wait_s: float) -> None:
        """The channel waits for whole milliseconds, and the next question would come too late."""
        if wait_s < SHORT_S:
            time.sleep(wait_s)
        channel.poll(asked[1], max(wait_s - SHORT_S, 0.0))

    start.wait()
    results.put(paced(rate, SECONDS, number, ask, wait, take))
    engine.close()


def copier(address: str, number: int, count: int, ended: Any, ready: Any, results: Any) -> None:
    """Loads one prompt and stores another, and pauses as long as that took; then says how many chunks that were. The
    copiers begin far from each other, so that each prompt is loaded again before it is evicted."""
    engine = RawEngine(address, GROUPS, BLOCKS, f"copier {number}").start()
    ready.release()
    pick, first, turn = random.Random(), number * PROMPTS // count, 0
    while not ended.is_set():
        start_s = time.perf_counter()
        keys = prompt((first + turn) % PROMPTS)
        found = engine.lookup(keys)
        assert found.resume_tokens == CHUNKS * CHUNK_TOKENS, "the server has all of it"
        engine.load(found, keys, table())
        engine.end(found, keys)
        assert engine.store_prompt(prompt(pick.randrange(PROMPTS, 1 << 30)), table()).stored == CHUNKS
        turn += 1
        time.sleep(time.perf_counter() - start_s)
    results.put(2 * turn * CHUNKS)


@contextmanager
def copies(address: str, count: int) -> Iterator[list[float]]:
    """So many workers load and store meanwhile. The list then has how many GB a second they copied."""
    ended, ready, results, found = _spawn.Event(), _spawn.Semaphore(0), _spawn.Queue(), list[float]()
    processes = [
        _spawn.Process(target=copier, args=(address, number, count, ended, ready, results), daemon=True)
        for number in range(count)
    ]
    try:
        for process in processes:
            process.start()
        for _ in processes:
            assert ready.acquire(timeout=WAIT_S)
        begun_s = time.perf_counter()
        yield found
        ended.set()
        chunks = sum(results.get(timeout=WAIT_S) for _ in processes)
        found.append(gb_s(chunks, time.perf_counter() - begun_s))
        for process in processes:
            process.join(WAIT_S)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()


def gb_s(chunks: int, seconds: float) -> float:
    return chunks * PAGE_BYTES * CHUNK_TOKENS / BLOCK / seconds / 1e9


class Peer(ChildProcess):
    """A client of LMCache: see peer_lookups.py."""

    def __init__(self, role: str, number: int, count: int, port: int, http_port: int) -> None:
        script = str(Path(__file__).parent / "peer_lookups.py")
        numbers = map(str, (number, count, PROMPTS, CHUNKS, int(SECONDS)))
        urls = f"tcp://127.0.0.1:{port}", f"http://127.0.0.1:{http_port}"
        command = [str(peer.SERVER / "bin" / "python"), script, role, *numbers, *urls]
        super().__init__(f"LMCache {role}", command, environment(peer.VARIABLES), pipes=True)

    def answer(self) -> Any:
        for line in self.stdout:
            if line.startswith(b"answer "):
                return json.loads(line.removeprefix(b"answer "))
        raise RuntimeError(f"{self.name} ended\n{tail(self.log)}")

    def end(self) -> None:
        assert self.popen.wait(WAIT_S) == 0, tail(self.log)


@contextmanager
def peers(role: str, count: int, port: int, http_port: int) -> Iterator[list[Peer]]:
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(Peer(role, number, count, port, http_port)) for number in range(count)]
        for each in found:
            assert each.answer() == "ready"
        yield found
        for each in found:
            each.stdin.close()
        for each in found:
            each.end()


@contextmanager
def peer_copies(count: int, port: int, http_port: int) -> Iterator[list[float]]:
    """As `copies`."""
    copied = list[float]()
    with peers("copy", count, port, http_port) as found:
        begun_s = time.perf_counter()
        yield copied
        for each in found:
            each.stdin.close()
        chunks = sum(each.answer() for each in found)
        copied.append(gb_s(chunks, time.perf_counter() - begun_s))


def measured(whose: str, ask: Ask, engines: int, beside: bool) -> Iterator[list[Any]]:
    ceiling = len(ask(engines, 0.0)) / SECONDS
    for share in SHARES:
        times = ask(engines, share * ceiling)
        yield [whose, engines, beside, ceiling, share, *(percentile(times, each) for each in (50, 99))]


def ours() -> Iterator[list[Any]]:
    with our_server(L1_GB) as (_, port, variables):
        address = f"ipc://{variables['LMCACHE_RUNTIME_DIR']}/{port}.sock"
        filler = RawEngine(address, GROUPS, BLOCKS, "filler").start()
        for number in range(PROMPTS):
            filler.store_prompt(prompt(number), table())
        ask: Ask = lambda engines, rate: in_processes(engines, one_client, address, rate / engines)  # noqa: E731
        for engines in ENGINES:
            for beside in (False, True):
                with copies(address, engines if beside else 0) as copied:
                    rows = list(measured("ours", ask, engines, beside))
                yield from ([*row, *copied] for row in rows)
        filler.close()


def lmcaches() -> Iterator[list[Any]]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(no_shared_memory_left())
        server, port = stack.enter_context(lmcache_server(L1_GB))
        at = port, server.http_port
        stack.enter_context(peers("fill", 1, *at))
        clients = stack.enter_context(peers("ask", max(ENGINES), *at))

        def ask(engines: int, rate: float) -> list[float]:
            for each in clients[:engines]:
                each.say(str(rate / engines))
            return [took for each in clients[:engines] for took in each.answer()]

        for engines in ENGINES:
            for beside in (False, True):
                with peer_copies(engines if beside else 0, *at) as copied:
                    rows = list(measured("LMCache", ask, engines, beside))
                yield from ([*row, *copied] for row in rows)


def main() -> None:
    peer.install()
    section = Section(
        "open_loop",
        "Lookups at a rate",
        f"Lookups of {CHUNKS} chunks at random times. Each is sent at its time, even if earlier ones have no answer "
        "yet. The rate is a share of the ceiling. The ceiling is the number of lookups a second that client and "
        f"server reach if each client has up to {WINDOW} lookups open. If the table has a figure for loads and "
        "stores, there is a worker for each engine. It loads and stores 16 MiB at a time, then pauses as long as that "
        "took. All share the processors. Our lookups carry keys, which were computed before. LMCache's lookups carry "
        "tokens, from which its server computes the keys: for the lookup, for the release of what it found, and for "
        "the end of the request. That server is also asked again for what it has found.",
    )
    found = []
    for row in itertools.chain(ours(), lmcaches()):
        found.append(row)
        print("  ", *row, flush=True)
    rows = [
        [whose, str(engines), f"{copied[0]:.2f} GB/s" if copied else "", f"{ceiling:,.0f}", f"{share:.0%}",
         micros(p50), micros(p99)]
        for whose, engines, _, ceiling, share, p50, p99, *copied in found
    ]  # fmt: skip
    columns = ["whose", "engines", "loads and stores", "ceiling (a second)", "rate", "p50", "p99"]
    section.table("", columns, rows)
    crowd = max(ENGINES)
    (busy,) = (row[6] for row in found if row[:3] == ["ours", crowd, True] and row[4] == min(SHARES))
    bar = f"{crowd} engines, {crowd} workers that load and store, {min(SHARES):.0%} of the ceiling: p99 under 2 ms"
    section.bar(bar, micros(busy), busy < MAX_P99_S)
    theirs = {tuple(row[1:3]): row[3] for row in found if row[0] == "LMCache"}
    ratios = [row[3] / theirs[tuple(row[1:3])] for row in found if row[0] == "ours"]
    name = "more lookups a second than LMCache"
    section.bar(name, f"{min(ratios):.1f} to {max(ratios):.1f} times", min(ratios) > 1, top=True)
    section.save()


if __name__ == "__main__":
    main()
