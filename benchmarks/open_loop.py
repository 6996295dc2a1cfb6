"""Lookups that come at a rate, not as fast as answers come: how long they take while the server is busy.

A client that waits for each answer before it asks again asks less often when the server is slow, and so hides what
others would have waited. Here the times of all questions are drawn beforehand. What is measured is the time from when a
question was due until its answer was read.
"""

import multiprocessing
import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from harness.rawclient import RawEngine, chain, group
from lookup import in_processes
from section import Section, micros, percentile
from systems import our_server

CHUNK_TOKENS = 256
CHUNKS = 64
PROMPTS = 32
PAGE_BYTES = 16 << 10
BLOCK = 16
GROUPS = [group(block_size=BLOCK, layers=1, page_bytes=PAGE_BYTES)]
BLOCKS = 1 + CHUNKS * CHUNK_TOKENS // BLOCK
ENGINES = (1, 8)
SHARES = (0.25, 0.5, 0.75)
SECONDS = 6.0
WINDOW = 32
"""A client has at most so many questions open while the ceiling is measured."""
WAIT_S = 30.0
_spawn = multiprocessing.get_context("spawn")


def prompt(number: int) -> tuple[bytes, ...]:
    return chain([number] * (CHUNKS * CHUNK_TOKENS), CHUNK_TOKENS)


def table() -> list[list[int]]:
    return [list(range(1, BLOCKS))]


def one_client(address: str, rate: float, number: int, start: Any, results: Any) -> None:
    """Asks at `rate` questions a second, or, if that is 0, as fast as it can. Each is answered whole."""
    pick, prompts = random.Random(number), [prompt(each) for each in range(PROMPTS)]
    engine = RawEngine(address, GROUPS, BLOCKS, f"engine {number}").start()
    scheduler, channel = engine._scheduler, engine.scheduler
    start.wait()
    begun_s = time.perf_counter()
    due_s, waiting, times = 0.0, deque[tuple[float, tuple[bytes, ...], Any]](), list[float]()
    while (now_s := time.perf_counter() - begun_s) < SECONDS:
        if now_s >= due_s and (rate or len(waiting) < WINDOW):
            keys = pick.choice(prompts)
            asked = scheduler.lookup(engine.lookup_message(keys), WAIT_S)
            waiting.append((due_s if rate else now_s, keys, asked))
            due_s += pick.expovariate(rate) if rate else 0.0
            continue
        if waiting:
            channel.poll(waiting[0][2], min(max(due_s - now_s, 0.0) if rate else WAIT_S, 0.01))
        else:
            time.sleep(max(0.0, due_s - now_s))
        while waiting and waiting[0][2].done:
            asked_s, keys, pending = waiting.popleft()
            assert pending.reply is not None, pending.error
            assert pending.reply.resume_tokens == CHUNKS * CHUNK_TOKENS, "the server has all of it"
            times.append(time.perf_counter() - begun_s - asked_s)
            scheduler.release((pending.reply.lease_id,), keys, "request")
    for *_, pending in waiting:
        channel.poll(pending, WAIT_S)
    results.put(times)
    engine.close()


def copier(address: str, ended: Any, ready: Any) -> None:
    """Loads one prompt and stores another, and pauses as long as that took."""
    engine = RawEngine(address, GROUPS, BLOCKS, "copier").start()
    ready.set()
    number = PROMPTS
    while not ended.is_set():
        start_s = time.perf_counter()
        engine.load(engine.lookup(prompt(number % PROMPTS)), prompt(number % PROMPTS), table())
        engine.store_prompt(prompt(number), table())
        number += 1
        time.sleep(time.perf_counter() - start_s)


@contextmanager
def copies(address: str, wanted: bool) -> Iterator[None]:
    ended, ready = _spawn.Event(), _spawn.Event()
    process = _spawn.Process(target=copier, args=(address, ended, ready), daemon=True)
    if wanted:
        process.start()
        assert ready.wait(WAIT_S)
    yield
    ended.set()
    if wanted:
        process.join()
        assert process.exitcode == 0


def asked(address: str, engines: int, rate: float) -> list[float]:
    """The times of all questions of so many engines, together `rate` of them a second."""
    return in_processes(engines, one_client, address, rate / engines)


def measured(address: str, engines: int, beside: bool) -> Iterator[Sequence[str]]:
    ceiling = len(asked(address, engines, 0.0)) / SECONDS
    what = "loads and stores" if beside else ""
    for share in SHARES:
        times = asked(address, engines, share * ceiling)
        yield (
            str(engines), what, f"{ceiling:,.0f}", f"{share:.0%}", f"{len(times) / SECONDS:,.0f}",
            micros(percentile(times, 50)), micros(percentile(times, 99)),
        )  # fmt: skip


def main() -> None:
    section = Section(
        "open_loop",
        "Lookups at a rate",
        f"Lookups of {CHUNKS} chunks, at times that were drawn beforehand, whether earlier ones are answered or not. "
        "The ceiling is what the same engines reach if each has up to "
        f"{WINDOW} lookups open. Engines and server share the processors.",
    )
    rows = []
    # Room for what the copies store besides: nothing that is asked for is evicted.
    with our_server(4 * PROMPTS * CHUNKS * PAGE_BYTES * CHUNK_TOKENS / BLOCK / (1 << 30)) as (
        _,
        port,
        variables,
    ):
        address = f"ipc://{variables['LMCACHE_RUNTIME_DIR']}/{port}.sock"
        engine = RawEngine(address, GROUPS, BLOCKS, "filler").start()
        for number in range(PROMPTS):
            engine.store_prompt(prompt(number), table())
        engine.close()
        for engines in ENGINES:
            for beside in (False, True):
                with copies(address, beside):
                    for row in measured(address, engines, beside):
                        rows.append(row)
                        print("  ", *row, flush=True)
    columns = ["engines", "beside", "ceiling (a second)", "rate", "answered (a second)", "p50", "p99"]
    section.table("", columns, rows)
    section.save()


if __name__ == "__main__":
    main()
