"""Load or compute: prompts of several lengths, all in a directory that may be read so fast and no faster.

The engine is one without a model, which takes as long for a prompt as one that computes TOKENS_S tokens per
second, and says so in its lookups. A request's time is that of its lookup, of its load and of the computation
of what was not found. Without a tier, everything is computed.
"""

import os
import tempfile
import time
from pathlib import Path

from harness.rawclient import RawEngine, group
from harness.server import LMCacheServer
from harness.waiting import wait_until
from msgspec import structs
from section import Section, median
from tier_servers import keys

from lmcache_client.contract.hits import fetch_patience_s
from lmcache_client.contract.messages import Found
from lmcache_client.engine import expect

CHUNK, CHUNK_BYTES = 256, 256 << 10
TOKENS_S = 20_000
LENGTHS = (8, 32, 128)
"""In chunks."""
READ_MB_S = (2, 10, 15, 25, 40, 200, 0)
"""0 is as fast as the directory is. Loading and computing take the same time at 20.5 MB/s."""
PROMPTS = 5
WORST = 1.05
Times = dict[int, list[tuple[float, int]]]
"""By length: seconds of a request, and the chunks that it found."""


def engine(server: LMCacheServer) -> RawEngine:
    spec = group("full", CHUNK, layers=1, page_bytes=CHUNK_BYTES)
    return RawEngine(server.address, [spec], 1 + max(LENGTHS)).start()


def prompt(length: int, number: int) -> tuple[bytes, ...]:
    return keys((length * PROMPTS + number) * 1000, length)


def fill(folder: Path) -> None:
    """Has all prompts written to the directory."""
    with LMCacheServer(
        l1_size_gb=0.5, chunk_size=CHUNK, tier=f"dir://{folder}?size_gb=2&write=commit"
    ) as server:
        client = engine(server)
        for length in LENGTHS:
            for number in range(PROMPTS):
                client.store_prompt(prompt(length, number), [range(1, length + 1)])
                wait_until(lambda: not server.status()["tiers"][0]["waiting_objects"], 60)
        client.close()
        server.terminate()


def request(client: RawEngine, chain: tuple[bytes, ...]) -> tuple[float, int]:
    """Seconds, and the chunks that were found."""
    message = structs.replace(client.lookup_message(chain), prefill_tokens_s=TOKENS_S)
    start = time.perf_counter()
    pending = client.scheduler.submit(message, fetch_patience_s(message.num_tokens) + 20)
    client.scheduler.poll(pending, 60)
    found = expect(pending.reply, Found)
    if found.resume_tokens:
        client.load(found, chain, [range(1, len(chain) + 1)])
    time.sleep((len(chain) * CHUNK - found.resume_tokens) / TOKENS_S)
    seconds = time.perf_counter() - start
    client.end(found, chain)
    return seconds, found.resume_tokens // CHUNK


def serve(tier: str) -> Times:
    """All prompts, the lengths in turns, at a new server."""
    with LMCacheServer(l1_size_gb=0.5, chunk_size=CHUNK, **({"tier": tier} if tier else {})) as server:
        server.wait_until(lambda l1: l1["populated_bytes"] == l1["total_bytes"], 60)
        client = engine(server)
        times: Times = {length: [] for length in LENGTHS}
        for number in range(PROMPTS):
            for length in LENGTHS:
                times[length].append(request(client, prompt(length, number)))
        client.close()
    return times


def measure(section: Section) -> None:
    rows, worst, crossings = [], 0.0, []
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_TIER_DIR")) as root:
        folder = Path(root) / "tier"
        fill(folder)
        without = serve("")
        for speed in READ_MB_S:
            limit = f"&read_mb_s={speed}" if speed else ""
            times = serve(f"dir://{folder}?size_gb=2&write=commit{limit}")
            for length in LENGTHS:
                base = median([seconds for seconds, _ in without[length]])
                ratios = [seconds / base for seconds, _ in times[length]]
                loaded = sum(found > 0 for _, found in times[length])
                worst = max(worst, median(ratios))
                if loaded > PROMPTS // 2:
                    crossings.append((speed or 1 << 20, length))
                rows.append(
                    [
                        f"{speed} MB/s" if speed else "no limit",
                        f"{length * CHUNK:,}",
                        f"{loaded} of {PROMPTS}",
                    ]
                )
                rows[-1] += [
                    f"{base:.2f} s",
                    f"{median(ratios):.2f}",
                    f"{min(ratios):.2f} to {max(ratios):.2f}",
                ]
                print("  ", *rows[-1], flush=True)
    columns = ["tier", "tokens", "loaded", "without a tier", "with one ÷", "all of them"]
    equal = CHUNK_BYTES / CHUNK * TOKENS_S / 1e6
    slowest = min((speed for speed, _ in crossings), default=0)
    caption = (
        f"Requests of an engine that computes {TOKENS_S:,} tokens per second. Loading takes as long as computing at "
        f"{equal:.1f} MB/s; prompts were loaded from {slowest} MB/s on."
    )
    section.table(caption, columns, rows)
    section.bar(
        f"no request slower with a tier than {WORST} times without", f"{worst:.3f} at most", worst <= WORST
    )


if __name__ == "__main__":
    measured = Section("tier_or_compute", "Load or compute", str(__doc__))
    measure(measured)
    measured.save()
