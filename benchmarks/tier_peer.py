"""Ours and LMCache: each has an L1 that holds less than half of the prompts, behind it a store of the same
kind with room for all, and in front a real vLLM engine.

All prompts are asked once and computed. As soon as nothing more is written to the stores, all are asked again,
twice and in the same order, which is the worst for an L1 that evicts what was used least recently.
vLLM's own prefix cache is reset before each pass. The engines stay alive and take turns, prompt by prompt.
"""

import contextlib
import functools
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import peer
import systems
from engine import ALONE, LMCACHE, OURS, prepared_model, tokens
from harness import stores
from harness.processes import free_port
from harness.waiting import get
from section import Section, median, millis, percentile
from systems import Probe

L1_GB = 0.18
PROMPTS, LENGTH, TAIL = 13, 1536, 24
"""A prompt takes 34 MiB: less than the quarter of L1 that our server fetches at a time, and than the fifth that
LMCache keeps free. Computing one takes more than a second; every store here is much faster than that."""
AGAIN = 2
UNCOUNTED = 1
"""Until our server has fetched from a tier once, it waits for a fetch only 5 % of the time that computing takes.
So the first prompt of the second pass is not counted, but shown."""
ANSWER = 4
QUIET_S, QUIET_TIMEOUT_S = 3.0, 60.0
Answers = list[dict[str, Any]]


class System(NamedTuple):
    """An engine with a server, what counts the records in the server's store, and the port of our server's
    metrics."""

    engine: Probe
    records: Callable[[], int]
    http_port: int = 0


class Passes(NamedTuple):
    """What was answered first and again, pass by pass; the records in the store after the first."""

    first: Answers
    again: list[Answers]
    records: int


def ask_all(engines: dict[str, Probe], forget: bool = True) -> dict[str, Answers]:
    """All prompts, the engines in turns; who begins changes."""
    for engine in engines.values() if forget else ():
        engine.ask("forget")
    answers: dict[str, Answers] = {name: [] for name in engines}
    for number in range(PROMPTS):
        prompt = tokens(LENGTH + TAIL, number)
        for name in list(engines) if number % 2 else reversed(engines):
            answers[name].append(engines[name].ask("first_token", prompt=prompt, max_tokens=ANSWER))
            engines[name].ask("settle")
    return answers


def quiet(records: Callable[[], int]) -> int:
    """The records in a store as soon as their number stays the same."""
    start = since = time.monotonic()
    found = records()
    while time.monotonic() - since < QUIET_S:
        if time.monotonic() - start > QUIET_TIMEOUT_S:
            raise TimeoutError("a store is written to for ever")
        time.sleep(0.1)
        if (now := records()) != found:
            found, since = now, time.monotonic()
    return found


def all_passes(found: dict[str, System]) -> dict[str, Passes]:
    engines = {name: system.engine for name, system in found.items()}
    for engine in engines.values():
        engine.ask("first_token", prompt=tokens(20, 99))
        engine.ask("settle")
    first = ask_all(engines)
    written = {name: quiet(system.records) for name, system in found.items()}
    again = [ask_all(engines) for _ in range(AGAIN)]
    return {name: Passes(first[name], [each[name] for each in again], written[name]) for name in found}


def alone(model: Path) -> tuple[Answers, Answers]:
    """What vLLM answers without a connector: computed, and from its own prefix cache."""
    with systems.vllm_alone(model) as engine:
        engine.ask("first_token", prompt=tokens(20, 99))
        cold, warm = (ask_all({ALONE: engine}, forget)[ALONE] for forget in (True, False))
    assert all(each["cached"] == LENGTH for each in warm)
    return cold, warm


def files(folder: Path) -> Callable[[], int]:
    return lambda: sum(path.is_file() and path.stat().st_size > LENGTH for path in folder.rglob("*"))


@contextlib.contextmanager
def both(
    model: Path, tier: str, adapter: dict[str, Any], records: Sequence[Callable[[], int]]
) -> Iterator[dict[str, System]]:
    """An engine with our server and one with LMCache's."""
    port = free_port()
    with (
        systems.vllm_with_ours(model, L1_GB, tier=tier, http_port=port) as ours,
        systems.vllm_with_lmcache(model, L1_GB, "--l2-adapter", json.dumps(adapter)) as other,
    ):
        yield {OURS: System(ours, records[0], port), LMCACHE: System(other, records[1])}


@contextlib.contextmanager
def directories(model: Path, parameters: str = "", **fields: Any) -> Iterator[dict[str, System]]:
    """`dir://` beside LMCache's `fs_native`, a directory for each."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_TIER_DIR")) as root:
        folders = [Path(root) / name for name in ("ours", "other")]
        tier = f"dir://{folders[0]}?size_gb=2{parameters}"
        adapter = {"type": "fs_native", "base_path": str(folders[1]), **fields}
        with both(model, tier, adapter, [files(folder) for folder in folders]) as found:
            yield found


@contextlib.contextmanager
def valkeys(model: Path) -> Iterator[dict[str, System]]:
    """`valkey://` beside LMCache's `resp`, a Valkey server for each."""
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(2):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            ports.append(stack.enter_context(stores.valkey(folder, maxmemory="2gb")).port)
        tier = f"valkey://127.0.0.1:{ports[0]}"
        adapter = {"type": "resp", "host": "127.0.0.1", "port": ports[1]}
        sizes = [lambda port=port: int(stores.ask(port, "DBSIZE")[1:]) for port in ports]
        yield stack.enter_context(both(model, tier, adapter, sizes))


def not_waited_for(http_port: int) -> int:
    """The lookups at our server for which its tier was too slow, or that were answered before its end."""
    metrics = get(f"http://127.0.0.1:{http_port}/metrics")
    found = re.findall(r'lmcache_tier_fetches_total{outcome="(?:late|slow)"} (\S+)', metrics)
    assert len(found) == 2, "our server has other metrics now"
    return sum(int(float(each)) for each in found)


KINDS = {
    "directory, as it comes": directories,
    "directory, write=commit and use_odirect": functools.partial(
        directories, parameters="&write=commit", use_odirect=True
    ),
    "Valkey": valkeys,
}
"""By default our directory gets only what L1 evicts next, and passes the page cache by. LMCache writes everything
at once, and reads from the page cache. The second pair both write everything and pass the page cache by."""


class Row(NamedTuple):
    """Of what was asked again: the share of the tokens that a cache can serve, and seconds to the first token.
    Of all: how many answers differ from those of vLLM alone. And the tokens served of the uncounted prompt."""

    served: float
    seconds: Sequence[float]
    differ: int
    uncounted: int

    @classmethod
    def of(cls, passes: Passes, cold: Answers, warm: Answers) -> "Row":
        again = [answer for answers in passes.again for answer in answers]
        pairs = zip(passes.first + again, cold * (1 + AGAIN), warm * (1 + AGAIN), strict=True)
        differ = sum(
            each["tokens"] != (hit if each["cached"] else miss)["tokens"] for each, miss, hit in pairs
        )
        counted = again[UNCOUNTED:]
        served = sum(each["cached"] for each in counted) / (len(counted) * LENGTH)
        return cls(served, [each["seconds"] for each in counted], differ, again[0]["cached"])


def compare(section: Section, kind: str, row: dict[str, Row]) -> None:
    ours, other = row[OURS], row[LMCACHE]
    text = f"{ours.served:.1%} against {other.served:.1%}"
    section.bar(
        f"{kind}, beside LMCache's: at least as many tokens served", text, ours.served >= other.served
    )
    ours_s, other_s = median(ours.seconds), median(other.seconds)
    text = f"{millis(ours_s)} against {millis(other_s)}"
    section.bar(f"{kind}, beside LMCache's: first token no later", text, ours_s <= other_s, top=True)


def measure(section: Section) -> None:
    peer.install()
    model = prepared_model()
    cold, warm = alone(model)
    rows: list[list[str]] = []
    for kind, start in KINDS.items():
        with start(model) as found:
            passes = all_passes(found)
            skipped = {OURS: str(not_waited_for(found[OURS].http_port)), LMCACHE: ""}
        row = {name: Row.of(each, cold, warm) for name, each in passes.items()}
        for name, each in row.items():
            shown = [f"{each.served:.1%}", millis(median(each.seconds)), millis(percentile(each.seconds, 90))]
            rows.append([kind, name, f"{passes[name].records}", *shown, f"{each.uncounted:,}"])
            rows[-1] += [skipped[name], str(each.differ)]
            print("  ", *rows[-1], flush=True)
        compare(section, kind, row)
    columns = ["store", "system", "records", "served", "first token, median", "p90", "first prompt"]
    section.table(
        f"{PROMPTS} prompts of {LENGTH + TAIL:,} tokens, asked again {AGAIN} times, two engines in turns; L1 of {L1_GB} GB. `records`: in "
        f"the store after the first pass, of {PROMPTS * LENGTH // systems.CHUNK_TOKENS} chunks. By default, our "
        f"directory gets only what L1 evicts next, and passes the page cache by; LMCache writes everything at once, "
        f"and reads from the page cache. `first prompt`: the "
        f"tokens served when it was asked again for the first time, which the columns before do not count, of "
        f"{LENGTH:,}. `not waited for`: fetches that our server left to themselves, because the tier was too slow "
        f"or its speed unknown. `differ`: of {PROMPTS * (1 + AGAIN)} answers, {ANSWER} tokens each, those that are "
        f"not vLLM's own; a prompt that is served in part is computed in other pieces, and so may be rounded "
        f"otherwise. vLLM alone computes a first token in {millis(median([each['seconds'] for each in cold]))}, "
        f"and has it from its own prefix cache in {millis(median([each['seconds'] for each in warm]))}. "
        f"LMCache {peer.LMCACHE.partition('==')[2]} with its adapters `fs_native` and `resp`.",
        [*columns, "not waited for", "differ"],
        rows,
    )


if __name__ == "__main__":
    measured = Section("tier_peer", "Tiers beside LMCache's", str(__doc__))
    measure(measured)
    measured.save()
