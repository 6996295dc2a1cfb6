"""The trace of the replay, with the pages of hybrid models, through the real server: it shows how much
admission gives.

Each request does what the connector does, and asks the connector's own rule which objects to store. A chunk
of 512 tokens is one frame of full attention; beside it lies a window of five frames or a state of three. L1
has room for 20,000 frames.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from harness.rawclient import RawEngine, group
from harness.server import LMCacheServer
from replay import CHUNK, FRAME_BYTES, STEP_CHUNKS, Request, ask, main, planned, rate

from lmcache_client.contract import messages
from lmcache_client.contract.admission import Admission, Prompt, checkpoint_interval, known_chunks
from lmcache_client.contract.geometry import FULL, RECURRENT, SLIDING_WINDOW, GroupSpec
from lmcache_client.engine import chunk_object, load_message

FRAMES = 20_000
WINDOW = 1024
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Arm:
    """A way to store. `offered` says of which chunks the engine has states: "every", the "last" of a
    prompt, or also the one before the "fork", as vLLM's default settings do with this connector."""

    name: str
    groups: tuple[GroupSpec, ...]
    rule: bool
    offered: str = "every"


def _pages(kind: str, frames: int, window: int = 0) -> GroupSpec:
    return group(kind, CHUNK, window, layers=1, page_bytes=frames * FRAME_BYTES)


PLAIN = (_pages(FULL, 1),)
WINDOWS = (_pages(FULL, 1), _pages(SLIDING_WINDOW, 5, WINDOW))
STATES = (_pages(FULL, 1), _pages(RECURRENT, 3))
ARMS = (
    Arm("full attention alone, everything", PLAIN, False),
    Arm("full attention alone, the rule", PLAIN, True),
    Arm("windows, at every chunk", WINDOWS, False),
    Arm("windows, the rule", WINDOWS, True),
    Arm("states, at ends of prompts", STATES, False, "last"),
    Arm("states, at ends of prompts and forks", STATES, False, "fork"),
    Arm("states, at every chunk", STATES, False),
    Arm("states, offered at every chunk, the rule", STATES, True),
)
BARS = {"windows, the rule": (0.470, 75_000), "states, offered at every chunk, the rule": (0.53, 0)}
"""Token hit rate at least, and frames written at most (0: no bar)."""
PLANNED = (
    "windows, the rule",
    "states, at ends of prompts and forks",
    "states, offered at every chunk, the rule",
)
"""What `lmcache plan` is compared with, at OTHER_SIZES. The second is how recurrent models are served by default."""
OTHER_SIZES = (0.5, 2.0)


class Client:
    """An engine with blocks for one request at a time: its chunk i is in block i + 1 of every group."""

    def __init__(self, server: LMCacheServer, requests: Sequence[Request], arm: Arm) -> None:
        self.blocks = 1 + max(len(request.ids) for request in requests)
        self.engine = RawEngine(server.address, arm.groups, self.blocks).start()
        self.groups = self.engine.groups
        sizes = [spec.block_bytes for spec in self.groups]
        interval = checkpoint_interval(self.groups, sizes, CHUNK) if arm.rule else 0
        self.admission = Admission(self.groups, CHUNK, interval)
        self.arm = arm
        # The first and the last eight bytes of every page say of which chunk it is.
        self.stamps = [self._stamps(spec) for spec in self.groups]
        self.hits: list[int] = []

    def _stamps(self, spec: GroupSpec) -> Any:
        (region,) = spec.regions
        pages = self.engine.memory[region.offset :][: self.blocks * region.stride_bytes].view(np.int64)
        return pages.reshape(self.blocks, -1)[1:, :: region.page_bytes // 8 - 1]

    def serve(self, request: Request) -> None:
        """One request from its arrival to its end."""
        ids, limit = request.ids, (request.tokens - 1) // CHUNK
        keys = tuple(hashlib.sha256(each.to_bytes(8, "little")).digest() for each in ids)
        hit, held = 0, tuple(b"" for _ in self.groups)
        if limit:
            question = messages.Lookup("", keys[:limit], 0, limit * CHUNK, request.tokens)
            found: messages.Found = ask(self.engine.scheduler, question)
            hit, held = found.resume_tokens // CHUNK, found.held
            if hit:
                self._load(found, keys, ids)
                ask(self.engine.scheduler, messages.Release((found.lease_id,), ()))
        self.hits.append(hit * CHUNK)
        for stamps in self.stamps:
            stamps[: len(ids)] = np.array(ids)[:, None]
        prompt = Prompt(limit, known_chunks(self.groups, held))
        for start in range(hit, len(ids), STEP_CHUNKS):
            step = range(start, min(start + STEP_CHUNKS, len(ids)))
            if objects := [o for i in step for o in self._objects(keys, i, prompt, held)]:
                ask(self.engine.worker, messages.Store(tuple(objects)))
        if keys:
            ask(self.engine.scheduler, messages.Release((), keys))

    def _objects(
        self, keys: Sequence[bytes], chunk: int, prompt: Prompt, held: Sequence[bytes]
    ) -> list[messages.StoreObject]:
        objects = []
        for index, (spec, bits) in enumerate(zip(self.groups, held, strict=True)):
            is_held = chunk // 8 < len(bits) and bits[chunk // 8] >> chunk % 8 & 1
            places = {"last": (prompt.end,), "fork": (prompt.end, prompt.fork)}.get(self.arm.offered)
            is_offered = spec.kind != RECURRENT or places is None or chunk + 1 in places
            if is_offered and not is_held and self.admission.admits(index, chunk, prompt):
                objects.append(chunk_object(keys, chunk, index, (chunk + 1,)))
        return objects

    def _load(self, found: messages.Found, keys: Sequence[bytes], ids: Sequence[int]) -> None:
        hit = found.resume_tokens // CHUNK
        for stamps in self.stamps:
            stamps[:] = -1
        tables = [range(1, self.blocks)] * len(self.groups)
        ask(self.engine.worker, load_message("", found, keys[hit - 1], 0, self.groups, tables))
        for spec, stamps in zip(self.groups, self.stamps, strict=True):
            needed = spec.needed_blocks(found.resume_tokens)
            wanted = np.array(ids[needed.start : needed.stop])[:, None]
            if (stamps[needed.start : needed.stop] != wanted).any():
                raise RuntimeError("a page of another chunk was loaded")


@dataclass(frozen=True)
class Outcome:
    """`planned` are the hit rates that the server would expect of other sizes, as multiples of its own."""

    hit_rate: str
    frames_written: int
    seconds: float
    planned: dict[float, float]


def replay(requests: Sequence[Request], arm: Arm, frames: int = FRAMES) -> Outcome:
    """The requests, one after the other, through a new server with so many frames."""
    started_s = time.perf_counter()
    with LMCacheServer(
        l1_size_gb=frames * FRAME_BYTES / (1 << 30), chunk_size=CHUNK, checksums=False
    ) as server:
        server.wait_until(lambda l1: l1["populated_bytes"] == l1["total_bytes"], TIMEOUT_S)
        client = Client(server, requests, arm)
        for request in requests:
            client.serve(request)
        written = server.metrics()['lmcache_transfer_bytes_total{direction="store"}'] / FRAME_BYTES
        plan = planned(server, requests)
        client.engine.close()
        server.wait_at_rest()
    seconds = time.perf_counter() - started_s
    return Outcome(rate(requests, client.hits), int(written), seconds, plan)


def measure(requests: Sequence[Request]) -> dict[str, Any]:
    rows, bars, plans, rates = [], [], [], {}
    for arm in ARMS:
        outcome = replay(requests, arm)
        rates[arm.name] = outcome.hit_rate
        written = f"{outcome.frames_written:,}"
        rows.append([arm.name, outcome.hit_rate, written, f"{outcome.frames_written / len(requests):.1f}"])
        print(
            f"{arm.name}: {outcome.hit_rate}, {written} frames written, {outcome.seconds:.0f} s", flush=True
        )
        if arm.name in BARS:
            least, most = BARS[arm.name]
            hit_rate = outcome.hit_rate
            bars.append(_bar(f"{arm.name}: token hit rate", hit_rate, least, float(hit_rate) >= least))
            if most:
                met = outcome.frames_written <= most
                bars.append(_bar(f"{arm.name}: frames written", written, f"{most:,}", met))
        for multiple in OTHER_SIZES if arm.name in PLANNED else ():
            real = replay(requests, arm, int(multiple * FRAMES)).hit_rate
            said = outcome.planned[multiple]
            plans.append([arm.name, f"{multiple:g}", f"{said:.4f}", real, f"{said - float(real):+.4f}"])
            print(f"{arm.name}, {multiple:g} times L1: planned {said:.4f}, real {real}", flush=True)
    plain, ruled = (rates[arm.name] for arm in ARMS[:2])
    bars.append(
        _bar(
            "full attention alone: the same hit rate with the rule as without it",
            ruled,
            plain,
            ruled == plain,
        )
    )
    columns = ["stored", "token hit rate", "frames written", "frames a request"]
    tables = [
        {"caption": "Hit rates and frames written, by what is stored.", "columns": columns, "rows": rows}
    ]
    columns = ["stored", "times L1", "planned", "a server of that size", "error"]
    caption = "Hit rates that `lmcache plan` prints for other sizes, against servers of those sizes."
    tables.append({"caption": caption, "columns": columns, "rows": plans})
    return {"tables": tables, "bars": bars}


def _bar(bar: str, measured: object, wanted: object, met: bool) -> dict[str, Any]:
    return {"bar": bar, "measured": f"{measured}, bar {wanted}", "met": met}


if __name__ == "__main__":
    main("admission", "Which windows and states to store", str(__doc__), measure)
