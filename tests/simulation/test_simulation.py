"""The real server core and connector in a simulated world: thousands of histories with faults."""

import inspect
import os
import re
import subprocess
import sys

import pytest
from harness.paths import ROOT

from simulation import bugs
from simulation.bugs import BUGS

pytestmark = pytest.mark.timeout(1800)
SEEDS = int(os.environ.get("SIMULATION_SEEDS", "100"))
FIRST = int(os.environ.get("SIMULATION_FIRST", "0"))
"""Continuous integration begins elsewhere each time."""
BUG_SEEDS = 4000


def simulate(*arguments: str, hash_seed: str = "random") -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "simulation", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}/tests:{ROOT}:{ROOT}/kernels", "PYTHONHASHSEED": hash_seed},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def test_no_seed_gives_a_wrong_byte_a_leak_or_a_hang() -> None:
    result = simulate("--seeds", str(SEEDS), "--first", str(FIRST))
    assert result.returncode == 0, result.stdout + result.stderr
    counts = {what: int(count) for count, what in re.findall(r"(\d+) ([a-z ]+)", result.stdout)}
    # Otherwise the histories would be of a cache that serves nothing, or in which nothing goes wrong.
    for what in (
        "tokens loaded",
        "hits of early lookups",
        "loads failed",
        "preemptions",
        "aborts",
        "clock jumps",
        "replies lost",
        "resets",
        "pins",
        "records read",
        "records read in a later life",
        "records written",
        "tier faults",
        "lookups that wait for tiers",
        "drafts accepted",
        "drafts rejected",
        "scratch blocks moved",
        "states copied after a step",
        "weights replaced",
        "weights named by their content",
        "weights of one engine only",
        "workers that register late",
    ):
        assert counts[what] > SEEDS / 10, result.stdout
    for what in (
        "replies of nonsense",
        "copies hung",
        "engine ids given twice",
        "hosts cut off",
        "loads from several servers",
        "loads from another engine",
        # Engines that are alike share pages, though others of their model's name are not.
        "loads from another engine among unlike ones",
    ):
        assert counts[what] > SEEDS / 50, result.stdout
    for what in (
        "servers killed",
        "servers stopped",
        "servers ended",
        "engines killed",
        "connections broken",
    ):
        assert counts[what] > SEEDS / 2, result.stdout


def test_a_seed_reproduces() -> None:
    """In this one, engines among unlike ones load what others have stored from a tier, which is rare. If a
    change of the simulation loses that, take another."""
    arguments = ("--seeds", "1", "--first", "777051", "--trace", "--jobs", "1")
    first, second = (simulate(*arguments, hash_seed=hash_seed).stdout for hash_seed in "12")
    assert first.count(" loaded request ") > 10
    assert re.search("[1-9][0-9]* loads from another engine by a tier among unlike ones", first)
    timing = re.compile(r" in \d+ s")
    assert timing.sub("", first) == timing.sub("", second)


def test_the_simulation_finds_bugs() -> None:
    result = simulate("--bugs", "--seeds", str(BUG_SEEDS))
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("found by seed") == len(BUGS) > 0


def test_every_bug_replaces_something_that_exists() -> None:
    """Otherwise the simulation would look for a bug that is not there."""
    source = inspect.getsource(bugs)
    replaced = re.findall(r"^ +([A-Za-z_.]+)\.(\w+)(?:, .*)? = ", source, re.MULTILINE)
    assert len(replaced) >= len(BUGS) / 2
    for owner, name in replaced:
        found = vars(bugs).get(owner)
        assert found is None or hasattr(found, name), f"{owner}.{name}"
