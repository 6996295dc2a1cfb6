"""Real vLLM engines side by side: time to first token, steps, throughput, and time spent in the connector.

Three engines stay alive and take turns, so that a neighbour's noise meets all of them. Each is alone while
it works. Every hit is checked: the tokens that came from a cache, and the first token that was computed.
"""

import argparse
import contextlib
import random
import sys
from pathlib import Path
from typing import Any

import peer
import systems
from harness.paths import LOGS
from section import Section, median, micros, millis, percentile
from systems import Probe

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "scripts"))

L1_GB = 2.0
TAIL = 24
"""Tokens beyond the last whole chunk: a real prompt seldom ends where a chunk does."""
LENGTHS = (512, 1024, 2048, 4096, 7936)
ROUNDS = 9
LEAST_THROUGHPUT = 0.98
"""Of vLLM alone, in each kind of work: an average over all of them would hide the worst."""
AT_REST = "decode of one request"
"""Steps in which there is nothing for a connector to do."""
ALONE, OURS, LMCACHE, OFFLOADING = "vLLM alone", "ours", "LMCache", "vLLM's offloading"
Engines = dict[str, Probe]


def prepared_model() -> Path:
    import demo_model

    models = ROOT / ".cache" / "models"
    LOGS.mkdir(parents=True, exist_ok=True)
    return demo_model.model_directory(models) or demo_model.convert_into(models, LOGS / "model.log")


def tokens(count: int, seed: int) -> list[int]:
    pick = random.Random(seed)
    return [pick.randrange(1000, 40_000) for _ in range(count)]


def first_token(section: Section, engines: Engines) -> None:
    text = tokens(max(LENGTHS) + TAIL, 0)
    cold: dict[int, dict[str, Any]] = {}
    alone = engines[ALONE]
    for length in LENGTHS:
        alone.ask("forget")
        cold[length] = alone.ask("first_token", prompt=text[: length + TAIL])
        assert cold[length]["cached"] == 0
        print(f"  cold, {length + TAIL} tokens: {cold[length]['seconds']:.1f} s", flush=True)
    for name in engines.keys() - {ALONE}:
        # Its chunks serve all the shorter prompts too.
        assert engines[name].ask("first_token", prompt=text)["cached"] == 0
        engines[name].ask("settle")
    times: dict[tuple[str, int], list[float]] = {}
    wrong = 0
    for _ in range(ROUNDS):
        for length in LENGTHS:
            for name, engine in engines.items():
                if name != ALONE:
                    engine.ask("forget")
                hit = engine.ask("first_token", prompt=text[: length + TAIL])
                assert hit["cached"] == length, f"{name} served {hit['cached']} of {length} tokens"
                wrong += hit["token"] != cold[length]["token"]
                times.setdefault((name, length), []).append(hit["seconds"])
                engine.ask("settle")
    peers = [name for name in engines if name not in (ALONE, OURS)]
    columns = ["prompt tokens", "cold", "local hit", "ours", *peers, "ours / local hit"]
    columns += [f"ours / {name}" for name in peers]
    rows: list[list[str]] = []
    local_ratio: dict[int, float] = {}
    peer_ratios: dict[str, dict[int, float]] = {name: {} for name in peers}
    for length in LENGTHS:
        local_ratio[length] = paired(times[OURS, length], times[ALONE, length])
        row = [f"{length + TAIL:,}", millis(cold[length]["seconds"])]
        row += [millis(median(times[name, length])) for name in engines] + [f"{local_ratio[length]:.2f}"]
        for name in peers:
            peer_ratios[name][length] = paired(times[OURS, length], times[name, length])
            row.append(f"{peer_ratios[name][length]:.2f}")
        rows.append(row)
    section.table(
        f"Time to first token on a hit, median of {ROUNDS}; ratios are medians of pairs.", columns, rows
    )
    section.bar("the same first token as computed cold", f"{wrong} differ", wrong == 0, top=True)
    for name, found in peer_ratios.items():
        section.bar(f"ahead of {name} at every length", ratios(found), max(found.values()) < 1, top=True)
    long = {length: ratio for length, ratio in local_ratio.items() if length >= 2048}
    is_near = max(long.values()) <= 1.25
    section.bar("within 25 % of a local prefix hit from 2k on", ratios(long), is_near, top=True)
    series = {"cold": [(length + TAIL, cold[length]["seconds"]) for length in LENGTHS]}
    for name in engines:
        label = "local hit" if name == ALONE else name
        series[label] = [(length + TAIL, median(times[name, length])) for length in LENGTHS]
    section.plot("first-token", "Time to first token", "prompt tokens", "seconds", series, log_y=True)


def paired(ours: list[float], other: list[float]) -> float:
    """The median of the ratios of neighbours in time."""
    return median([a / b for a, b in zip(ours, other, strict=True)])


def ratios(found: dict[int, float]) -> str:
    return ", ".join(f"{ratio:.2f} at {length:,}" for length, ratio in found.items())


def steps(section: Section, engines: Engines) -> None:
    """Steps from arrival to first token. `alone` needs one for whatever fits into a step."""
    cases = {"miss, 20 tokens (less than a chunk)": 20, "miss, 280 tokens": 280}
    counted: dict[str, dict[str, list[Any]]] = {}
    for number in range(8):
        for case, length in cases.items():
            for name, engine in engines.items():
                found = engine.ask("first_token", prompt=tokens(length, 1000 * length + number))
                assert found["cached"] == 0
                counted.setdefault(case, {}).setdefault(name, []).append(found["steps"])
                engine.ask("settle")
    text = tokens(max(LENGTHS) + TAIL, 0)
    for case, length in {"hit, 536 tokens": 512, "hit, 2,072 tokens": 2048}.items():
        for _ in range(8):
            for name, engine in engines.items():
                if name != ALONE:
                    engine.ask("forget")
                found = engine.ask("first_token", prompt=text[: length + TAIL])
                assert found["cached"] == length
                counted.setdefault(case, {}).setdefault(name, []).append(found["steps"])
                engine.ask("settle")
    rows = [[case, *(spread(counted[case][name]) for name in engines)] for case in counted]
    section.table(
        "Scheduler steps from arrival to first token: median (smallest to largest) of 8.",
        ["request", *engines],
        rows,
    )
    added = [
        ours - alone
        for case in cases
        for ours, alone in zip(counted[case][OURS], counted[case][ALONE], strict=True)
    ]
    late = sum(each > 0 for each in added)
    section.bar(
        "no step added to a miss (where the server answers in time)",
        f"none to {len(added) - late} of {len(added)} requests, {max(added)} at most",
        median(added) == 0,
    )


def spread(counts: list[int]) -> str:
    return f"{median(counts):g} ({min(counts)} to {max(counts)})"


def load(section: Section, engines: Engines) -> None:
    """Throughput with nothing to hit, and what each step costs the scheduler's thread."""
    work = {"prefill": (8, 300, 1), "decode of 64 requests": (64, 16, 24), AT_REST: (1, 16, 48)}
    seconds: dict[tuple[str, str], list[float]] = {}
    shares: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for turn in range(5):
        for kind, (count, length, wanted) in work.items():
            prompts = [tokens(length, 7_000_000 + 100_000 * turn + 1000 * length + n) for n in range(count)]
            for name, engine in engines.items():
                found = engine.ask("batch", prompts=prompts, max_tokens=wanted)
                engine.ask("settle")
                seconds.setdefault((kind, name), []).append(found["seconds"])
                shares.setdefault((kind, name), []).extend(
                    (spent, step) for computed, step, spent in found["steps"] if computed
                )
    connected = [name for name in engines if name != ALONE]
    rows = []
    for kind in work:
        for name in connected:
            ratio = paired(seconds[kind, ALONE], seconds[kind, name])
            spent = [each for each, _ in shares[kind, name]]
            share = sum(spent) / sum(step for _, step in shares[kind, name])
            rows.append(
                [
                    kind,
                    name,
                    f"{ratio:.3f}",
                    micros(median(spent)),
                    micros(percentile(spent, 99)),
                    f"{share:.2%}",
                ]
            )
    section.table(
        "With nothing to hit: throughput over that of vLLM alone (median of 5 pairs), and the time that the "
        "scheduler's thread spends in the connector, per step.",
        ["work", "connector", "throughput", "per step, median", "p99", "share of the steps"],
        rows,
    )
    for kind in work:
        throughput = paired(seconds[kind, ALONE], seconds[kind, OURS])
        bar = f"throughput at least {LEAST_THROUGHPUT:.0%} of vLLM alone, {kind}"
        section.bar(bar, f"{throughput:.1%}", throughput >= LEAST_THROUGHPUT, top=True)
    at_rest = median([spent for spent, _ in shares[AT_REST, OURS]])
    section.bar(f"under 50 µs a step at rest ({AT_REST})", micros(at_rest), at_rest < 50e-6)
    under_load = max(
        sum(spent for spent, _ in shares[kind, OURS]) / sum(step for _, step in shares[kind, OURS])
        for kind in work
    )
    section.bar("under 1 % of a step under load", f"{under_load:.2%}", under_load < 0.01)


def hashing(section: Section, engines: Engines) -> None:
    """Chunk keys against the prefill of the same tokens."""
    import time

    from lmcache_client.contract.keys import chunk_keys

    text = tokens(2048, 5)
    rounds = []
    for _ in range(50):
        start, firsts = time.perf_counter(), range(0, len(text), systems.CHUNK_TOKENS)
        list(chunk_keys((text[first : first + systems.CHUNK_TOKENS], None) for first in firsts))
        rounds.append(time.perf_counter() - start)
    engines[ALONE].ask("forget")
    prefill = engines[ALONE].ask("first_token", prompt=text)["seconds"]
    share = median(rounds) / prefill
    section.table(
        "Hashing",
        ["tokens", "keys", "cold prefill", "share", "tokens per second"],
        [["2,048", micros(median(rounds)), millis(prefill), f"{share:.4%}", f"{2048 / median(rounds):,.0f}"]],
    )
    section.bar("hashing under 1 % of the cold prefill", f"{share:.4%}", share < 0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--without-lmcache", action="store_true")
    options = parser.parse_args()
    section = Section(
        "engine",
        "vLLM engines side by side",
        "SmolLM2-135M in bfloat16, blocks of 128 tokens, chunks of 256, one request at a time; three "
        "engines on the same processors take turns. `cold` is computed from nothing, `local hit` is vLLM's own "
        "prefix cache; for the others that cache was reset before each request.",
    )
    model = prepared_model()
    with contextlib.ExitStack() as stack:
        engines = {
            ALONE: stack.enter_context(systems.vllm_alone(model)),
            OURS: stack.enter_context(systems.vllm_with_ours(model, L1_GB)),
        }
        if not options.without_lmcache:
            peer.install()
            engines[LMCACHE] = stack.enter_context(systems.vllm_with_lmcache(model, L1_GB))
        if systems.has_gpu():
            engines[OFFLOADING] = stack.enter_context(systems.vllm_with_offloading(model, L1_GB))
        for engine in engines.values():
            engine.ask("first_token", prompt=tokens(20, 99))
            engine.ask("settle")
        first_token(section, engines)
        steps(section, engines)
        load(section, engines)
        hashing(section, engines)
    section.save()


if __name__ == "__main__":
    main()
