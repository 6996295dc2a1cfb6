"""A public trace through the real server with a directory behind a small L1, beside two least-recently-used
caches of a few lines: what L1 evicts goes to the larger one, and what is found there comes back.

Pages are so small that a record takes one page of the disk. They are really copied, written and read, and each
page that is loaded is checked. After each store the client waits until the tier has written what waits: here
no time passes between the steps of a prompt or between prompts.
"""

import os
import tempfile
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import replay
from harness.server import LMCacheServer
from harness.waiting import wait_until
from replay import CHUNK, FRAME_BYTES, Request
from section import Section

PAGE_BYTES, RECORD_BYTES = 2048, 4096
L1_CHUNKS = 5_000
TIMES = 10
KNOWN = "0.640"
"""What two such caches find with a tier of 10 times L1, of all blocks: the last one of each prompt, which is
not full, counts, too. The server has only full ones."""


class Outcome(NamedTuple):
    """`hits` are tokens per request; `objects` those that the tier was asked to read, by outcome."""

    hits: list[int]
    objects: dict[str, int]


class Patient(replay.Client):
    """A client that waits after each store."""

    def __init__(self, server: LMCacheServer, requests: Sequence[Request]) -> None:
        super().__init__(server, requests, loads=True, page_bytes=PAGE_BYTES)
        self._server = server

    def _store(self, keys: Sequence[bytes], chunks: Sequence[int], once: bool) -> None:
        super()._store(keys, chunks, once)
        wait_until(lambda: not self._server.status()["tiers"][0]["waiting_objects"], 30, interval_s=0.001)


def oracle(prompts: Sequence[Sequence[int]], l1_chunks: int, tier_chunks: int) -> list[int]:
    """How many blocks of each prompt are found at its beginning."""
    l1, tier = OrderedDict[int, None](), OrderedDict[int, None]()
    hits = []
    for ids in prompts:
        held = [each in l1 or each in tier for each in ids] + [False]
        hits.append(held.index(False))
        for each in ids[: hits[-1]]:
            if each not in l1:
                tier.move_to_end(each)
        for each in reversed(ids):
            l1[each] = None
            l1.move_to_end(each)
        while len(l1) > l1_chunks:
            evicted, _ = l1.popitem(last=False)
            tier.setdefault(evicted)
            if len(tier) > tier_chunks:
                tier.popitem(last=False)
    return hits


def serve(requests: Sequence[Request], l1_chunks: int, tier_chunks: int) -> Outcome:
    """The requests, one after the other, through a new server with room for so many chunks in each."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_TIER_DIR")) as folder:
        gb = 1 << 30
        tier = f"dir://{folder}/tier?size_gb={tier_chunks * RECORD_BYTES / gb}"
        with LMCacheServer(
            l1_size_gb=l1_chunks * FRAME_BYTES / gb, chunk_size=CHUNK, tier=tier, checksums=False
        ) as server:
            server.wait_until(lambda l1: l1["populated_bytes"] == l1["total_bytes"], 60)
            client = Patient(server, requests)
            for request in requests:
                client.serve(request)
            read = server.status()["tiers"][0]["read_objects"]
            client.engine.close()
            server.wait_at_rest()
    return Outcome(client.outcome.hits, read)


def measure(section: Section) -> None:
    requests = replay.load()
    expected = oracle([request.ids for request in requests], L1_CHUNKS, TIMES * L1_CHUNKS)
    outcome = serve(requests, L1_CHUNKS, TIMES * L1_CHUNKS)
    alone = replay.rate(requests, replay.oracle(requests, L1_CHUNKS)[0])
    expected_rate = replay.rate(requests, [CHUNK * each for each in expected])
    rate = replay.rate(requests, outcome.hits)
    section.table(
        f"The synthetic trace with an L1 of {L1_CHUNKS:,} chunks and a directory of {TIMES} times that.",
        ["L1 alone", "with the directory", "two LRU caches", "objects read"],
        [[alone, rate, expected_rate, f"{outcome.objects['read']:,}"]],
    )
    prompts = [request.blocks for request in requests]
    found = oracle(prompts, L1_CHUNKS, TIMES * L1_CHUNKS)
    known = f"{sum(found) / sum(map(len, prompts)):.3f}"
    section.bar(
        "two LRU caches find the known share of all blocks, full or not",
        f"{known} against {KNOWN}",
        known == KNOWN,
    )
    bar = "synthetic trace, L1 of 5,000 chunks, tier of 10 times: hit rate equals two LRU caches to three digits"
    difference = abs(float(rate) - float(expected_rate))
    section.bar(bar, f"{rate} against {expected_rate}", difference < 0.0005)


if __name__ == "__main__":
    measured = Section("tier_trace", "A trace", str(__doc__))
    measure(measured)
    measured.save()
