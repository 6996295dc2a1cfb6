"""`make simulate SEEDS=…`: run the simulation over many seeds; a seed that fails prints itself."""

import argparse
import functools
import gc
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable

from simulation import origins
from simulation.bugs import BUGS, put_in
from simulation.scenario import Scenario

ENOUGH_SEEDS = 20
"""Among so many histories there are some with loads."""


def run_seed(seed: int, trace: bool = False) -> tuple[int, str, dict[str, int]]:
    """(seed, what went wrong, what was counted and the digest of its history)."""
    # A killed server's coroutines must not go on. The collector would end them, whenever it runs: then their
    # `finally` still acts on the world.
    gc.collect()
    gc.disable()
    scenario = Scenario(seed, trace)
    wrong = ""
    try:
        scenario.run()
    except Exception:
        wrong = traceback.format_exc(limit=-6)
    finally:
        gc.enable()
        if scenario.disk is not None:
            scenario.disk.close()
    if trace:
        print(*scenario.world.trace or (), sep="\n")
    return seed, wrong, scenario.world.counts


def run_seeds(
    arguments: argparse.Namespace, seeds: Iterable[int], bug: str = ""
) -> tuple[list[int], Counter[str]]:
    """The seeds that failed, each of which has printed itself, and what was counted over all. With a
    `bug` put in, it ends with the first that fails."""
    counts: Counter[str] = Counter()
    failed = []
    context = multiprocessing.get_context("fork")
    origins.prepare()
    gc.freeze()  # nothing of vLLM is garbage, and looking for it takes long
    # A killed server never starts what was about to run.
    warnings.filterwarnings("ignore", "coroutine .* was never awaited")
    # Tasks that wait when a world ends keep it alive: a process ends after 24 worlds.
    begin = functools.partial(put_in, bug) if bug else None
    with context.Pool(arguments.jobs, initializer=begin, maxtasksperchild=6) as pool:
        work = functools.partial(run_seed, trace=arguments.trace)
        for seed, wrong, counted in pool.imap_unordered(work, seeds, chunksize=4):
            counts.update(counted)
            if wrong:
                failed.append(seed)
            if wrong and bug:
                break
            if wrong:
                print(f"seed {seed} failed; again: make simulate FIRST={seed} SEEDS=1\n{wrong}", flush=True)
    gc.unfreeze()
    return sorted(failed), counts


def print_history(seed: int) -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        print(f"history of seed {seed}:", flush=True)
        _, wrong, counts = pool.apply(run_seed, (seed, True))
        print(f"end of it: {sorted(counts.items())} {wrong}", flush=True)


def find_bugs(arguments: argparse.Namespace) -> int:
    """Put in one bug after the other; 1 if some is not found. The seed that found it last comes first."""
    missed = 0
    for bug in arguments.bugs or BUGS:
        last, *changes = BUGS[bug]
        assert all(hasattr(owner, name) for owner, name, _ in changes), f"{bug} changes nothing that exists"
        failed, _ = run_seeds(arguments, range(last, last + 1), bug)
        if not failed:
            print(f"{bug}: seed {last} does not find it any more", flush=True)
            failed, _ = run_seeds(arguments, range(arguments.seeds), bug)
        missed += not failed
        print(f"{bug}: found by seed {failed[0]}" if failed else f"{bug}: NOT FOUND", flush=True)
    return int(bool(missed))


def main() -> int:
    parser = argparse.ArgumentParser(prog="simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many, from each first one on")
    parser.add_argument("--first", type=int, nargs="+", default=[0], help="the first seeds")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--trace", action="store_true", help="print the history of each seed")
    parser.add_argument("--history", type=int, help="also print the history of this seed, before the others")
    parser.add_argument("--bugs", nargs="*", help="put in these bugs, or all, and say which seed finds each")
    arguments = parser.parse_args()
    if arguments.history is not None:
        origins.prepare()
        print_history(arguments.history)
    if arguments.bugs is not None:
        return find_bugs(arguments)
    return max(run_from(arguments, first) for first in arguments.first)


def run_from(arguments: argparse.Namespace, first: int) -> int:
    started_s = time.monotonic()
    failed, counts = run_seeds(arguments, range(first, first + arguments.seeds))
    took_s = time.monotonic() - started_s
    said = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
    print(f"{arguments.seeds} seeds from {first} on in {took_s:.0f} s: {said}")
    if failed:
        print(f"{len(failed)} failed: {failed[:50]}")
    if arguments.seeds >= ENOUGH_SEEDS and not counts["loads"]:
        # Histories in which no engine ever loads anything prove nothing, however well they end.
        print("no engine loaded anything: no server was reached")
        return 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
