"""What a tier costs real servers that do not need it: two side by side, asked in turns in small blocks, so
that what else the machine does strikes both."""

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from harness.processes import free_port
from harness.rawclient import RawEngine, group
from harness.server import LMCacheServer
from section import Section, micros, percentile

from lmcache_client.contract.messages import Found
from lmcache_client.engine import expect

TURNS = 3000
CHUNKS, MORE = 240, 16
PAGE_BYTES = 4096
STORES, STORE_TURNS = 4, 24
FILLING = 16
"""Turns that fill L1 first, which are not counted."""
STORED_CHUNKS, STORED_PAGE_BYTES = 8, 1 << 20
Times = list[float]


@contextlib.contextmanager
def engines(
    gb: float, *tiers: str, page_bytes: int = PAGE_BYTES, blocks: int = 512
) -> Iterator[list[RawEngine]]:
    """An engine with a server of its own for each of `tiers`; an empty one stands for none."""
    with contextlib.ExitStack() as stack:
        made = []
        for tier in tiers:
            flags = {"tier": tier} if tier else {}
            server = stack.enter_context(
                LMCacheServer(l1_size_gb=gb, chunk_size=256, checksums=False, **flags)
            )
            server.wait_until(lambda l1: l1["populated_bytes"] == l1["total_bytes"], 60)
            spec = group("full", 256, layers=1, page_bytes=page_bytes)
            engine = RawEngine(server.address, [spec], blocks).start()
            stack.callback(engine.close)
            made.append(engine)
        yield made


def keys(first: int, count: int) -> tuple[bytes, ...]:
    return tuple(b"key" + number.to_bytes(29, "little") for number in range(first, first + count))


def asked(engine: RawEngine, question: Sequence[bytes], hit: int) -> float:
    """Seconds from the submission of a lookup to its answer."""
    message = engine.lookup_message(question)
    start = time.perf_counter()
    pending = engine.scheduler.submit(message, 20)
    engine.scheduler.poll(pending, 20)
    taken = time.perf_counter() - start
    found = expect(pending.reply, Found)
    assert found.resume_tokens == hit * engine.chunk_size
    engine.end(found)
    return taken


def in_turns(ask: Sequence[Callable[[], float]]) -> list[Times]:
    """The times of each; who begins changes."""
    times: list[Times] = [[] for _ in ask]
    for turn in range(TURNS):
        for number in range(len(ask)) if turn % 2 else reversed(range(len(ask))):
            times[number].append(ask[number]())
    return times


def lookups(section: Section) -> None:
    rows = []
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_TIER_DIR")) as folder:
        directory, dead = f"dir://{folder}/tier?size_gb=1", f"valkey://127.0.0.1:{free_port()}"
        with engines(0.25, "", directory, dead) as made:
            known = keys(0, CHUNKS)
            for engine in made:
                engine.store_prompt(known, [range(1, CHUNKS + 1)])
            time.sleep(2)  # until the directory has what it wants
            for what, bar, beside, more in (
                ("all in L1, a directory", 1.1, made[1], 0),
                ("all in L1, a dead tier", 1.05, made[2], 0),
                ("the end unknown, a dead tier", 1.05, made[2], MORE),
            ):
                question = known + keys(CHUNKS, more)
                pair = (made[0], beside)
                times = in_turns([lambda each=each: asked(each, question, CHUNKS) for each in pair])
                shown, ratios = [], []
                for percent in (50, 99):
                    without, with_tier = (percentile(each, percent) for each in times)
                    ratios.append(with_tier / without)
                    shown += [micros(without), micros(with_tier), f"{ratios[-1]:.3f}"]
                rows.append([what, *shown])
                for percent, ratio in zip((50, 99), ratios, strict=True):
                    name = f"lookup p{percent}, {what}: ≤ {bar} of without"
                    section.bar(name, f"{ratio:.3f}", ratio <= bar)
    columns = ["", "p50 without", "p50 with", "÷", "p99 without", "p99 with", "÷"]
    caption = f"Lookups of {CHUNKS} chunks at servers without and with a tier."
    section.table(caption, columns, rows)


def spilling(section: Section) -> None:
    """Stores into a full L1, of which the tier writes everything, or what is coldest."""
    rows = []
    for write in ("commit", "cold"):
        with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_TIER_DIR")) as folder:
            directory = f"dir://{folder}/tier?size_gb=4&write={write}"
            rates: list[Times] = [[], []]
            with engines(0.5, "", directory, page_bytes=STORED_PAGE_BYTES, blocks=STORED_CHUNKS + 1) as made:
                for engine in made:
                    engine.memory[:] = np.random.default_rng(0).integers(0, 256, engine.memory.size, np.uint8)
                for turn in range(FILLING + STORE_TURNS):
                    for number in (0, 1) if turn % 2 else (1, 0):
                        seconds = stored(made[number], turn)
                        rates[number] += [seconds] if turn >= FILLING else []
            ratio = sum(rates[0]) / sum(rates[1])
            gb = STORE_TURNS * STORES * STORED_CHUNKS * STORED_PAGE_BYTES / 1e9
            rows.append([write, *(f"{gb / sum(each):.2f}" for each in rates), f"{ratio:.3f}"])
            section.bar(
                f"store throughput while spilling, {write}: ≥ 0.92 of without", f"{ratio:.3f}", ratio >= 0.92
            )
    section.table(
        "Stores, GB/s, without a tier and with a directory.", ["write", "without", "with", "÷"], rows
    )


def stored(engine: RawEngine, turn: int) -> float:
    """Seconds of some stores, one after the other."""
    start = time.perf_counter()
    for number in range(STORES):
        place = (turn * STORES + number) * STORED_CHUNKS
        engine.store_prompt(keys(place, STORED_CHUNKS), [range(1, STORED_CHUNKS + 1)])
    return time.perf_counter() - start


if __name__ == "__main__":
    measured = Section("tier_servers", "Servers with tiers", str(__doc__))
    lookups(measured)
    spilling(measured)
    measured.save()
