"""Lookups that come at a rate, not as fast as answers come, beside LMCache: how long they take while the server is busy.

A client that waits for each answer before it asks again asks less often when the server is slow, and so hides what
others would have waited. Here the times of all questions are drawn beforehand. What is measured is the time from when a
question was due until its answer was read.
"""

import contextlib
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
from systems import lmcache_server, our_server

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

    start.wait()
    results.put(paced(rate, SECONDS, number, ask, lambda asked, wait_s: channel.poll(asked[1], wait_s), take))
    engine.close()


def copier(address: str, number: int, ended: Any, ready: Any) -> None:
    """Loads one prompt and stores another, and pauses as long as that took."""
    engine = RawEngine(address, GROUPS, BLOCKS, f"copier {number}").start()
    ready.release()
    turn = 0
    while not ended.is_set():
        start_s = time.perf_counter()
        keys = prompt((number + turn) % PROMPTS)
        found = engine.lookup(keys)
        engine.load(found, keys, table())
        engine.end(found, keys)
        engine.store_prompt(prompt(PROMPTS * (1 + turn) + number), table())
        turn += 1
        time.sleep(time.perf_counter() - start_s)


@contextmanager
def copies(address: str, count: int) -> Iterator[None]:
    """So many workers load and store meanwhile."""
    ended, ready = _spawn.Event(), _spawn.Semaphore(0)
    processes = [
        _spawn.Process(target=copier, args=(address, number, ended, ready), daemon=True)
        for number in range(count)
    ]
    for process in processes:
        process.start()
    for _ in processes:
        assert ready.acquire(timeout=WAIT_S)
    yield
    ended.set()
    for process in processes:
        process.join()
        assert process.exitcode == 0


class Peer(ChildProcess):
    """A client of LMCache: see peer_lookups.py."""

    def __init__(self, role: str, number: int, port: int, http_port: int) -> None:
        script = str(Path(__file__).parent / "peer_lookups.py")
        urls = f"tcp://127.0.0.1:{port}", f"http://127.0.0.1:{http_port}"
        command = [str(peer.SERVER / "bin" / "python"), script, role, str(number), *urls]
        command += [str(PROMPTS), str(CHUNKS), str(SECONDS)]
        super().__init__(f"LMCache {role}", command, environment(peer.VARIABLES), pipes=True)

    def answer(self) -> Any:
        for line in self.stdout:
            if line.startswith(b"answer "):
                return json.loads(line.removeprefix(b"answer "))
        raise RuntimeError(f"{self.name} ended\n{tail(self.log)}")

    def end(self) -> None:
        self.stdin.close()
        self.popen.wait(WAIT_S)


@contextmanager
def peers(role: str, count: int, port: int, http_port: int) -> Iterator[list[Peer]]:
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(Peer(role, number, port, http_port)) for number in range(1, 1 + count)]
        for each in found:
            assert each.answer() == "ready"
        yield found
        for each in found:
            each.end()


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
                with copies(address, engines if beside else 0):
                    yield from measured("ours", ask, engines, beside)
        filler.close()


def lmcaches() -> Iterator[list[Any]]:
    with contextlib.ExitStack() as stack:
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
                with peers("copy", engines if beside else 0, *at):
                    yield from measured("LMCache", ask, engines, beside)


def main() -> None:
    peer.install()
    section = Section(
        "open_loop",
        "Lookups at a rate",
        f"Lookups of {CHUNKS} chunks, at times that were drawn beforehand, whether earlier ones are answered or not. "
        f"The ceiling is what the same engines reach if each has up to {WINDOW} lookups open. Where it says so, "
        "as many workers as there are engines load and store 16 MiB, and pause as long as that took. All share the "
        "processors. LMCache's lookups carry the tokens, and it is asked again for what it has found, as its "
        "connector does.",
    )
    found = []
    for row in (*ours(), *lmcaches()):
        found.append(row)
        print("  ", *row, flush=True)
    rows = [
        [whose, str(engines), "loads and stores" if beside else "", f"{ceiling:,.0f}", f"{share:.0%}", micros(p50),
         micros(p99)]
        for whose, engines, beside, ceiling, share, p50, p99 in found
    ]  # fmt: skip
    columns = ["whose", "engines", "beside", "ceiling (a second)", "rate", "p50", "p99"]
    section.table("", columns, rows)
    crowd = max(ENGINES)
    (busy,) = (row[-1] for row in found if row[:3] == ["ours", crowd, True] and row[4] == min(SHARES))
    bar = f"{crowd} engines, {crowd} workers that load and store, {min(SHARES):.0%} of the ceiling: p99 under 2 ms"
    section.bar(bar, micros(busy), busy < MAX_P99_S)
    theirs = {tuple(row[1:3]): row[3] for row in found if row[0] == "LMCache"}
    ratios = [row[3] / theirs[tuple(row[1:3])] for row in found if row[0] == "ours"]
    name = "more lookups a second than LMCache"
    section.bar(name, f"{min(ratios):.1f} to {max(ratios):.1f} times", min(ratios) > 1, top=True)
    section.save()


if __name__ == "__main__":
    main()
