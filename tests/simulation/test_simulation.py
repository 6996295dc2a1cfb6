"""The real server core and connector in a simulated world: thousands of histories with faults."""

import os
import re
import subprocess
import sys

import pytest
from harness.paths import ROOT

from simulation.bugs import BUGS

pytestmark = pytest.mark.timeout(1800)
SEEDS = 40
FIRST = int(os.environ.get("SIMULATION_FIRST", str(SEEDS)))
"""So many seeds from 0 on, and as many from here on: continuous integration begins elsewhere each time."""
BUG_SEEDS = 200
"""So many are tried if the seed that found a bug does not find it any more. If none of them does, run
`make simulate-bugs SEEDS=4000`, and write the seed that it says into bugs.py."""
IN_A_TIER = 777051
"""A seed in which engines among unlike ones load what others have stored from a tier, which is rare. If a
change of the simulation loses that, take another."""


LEAST = {
    1 / 2: "servers killed, servers ended, engines killed, connections broken",
    1 / 10: "tokens loaded, hits of early lookups, loads failed, preemptions, aborts, clock jumps, "
    "replies lost, resets, pins, servers stopped, records read, records read in a later life, "
    "records written, tier faults, lookups that wait for tiers, drafts accepted, drafts rejected, "
    "scratch blocks moved, states copied after a step, weights replaced, weights named by their content, "
    "weights of one engine only, workers that register late",
    # Engines that are alike share pages, though others of their model's name are not.
    1 / 50: "replies of nonsense, copies hung, engine ids given twice, hosts cut off, "
    "loads from several servers, ranks that divide blocks, loads from another engine, "
    "loads from another engine among unlike ones, prompts brought back",
}
"""How many of each there must be in a seed, on average."""


def simulated(hash_seed: int, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Prints the history of one seed, and then does what `arguments` say: another process would spend most of
    its time on the import of vLLM."""
    return subprocess.run(
        [sys.executable, "-m", "simulation", "--history", str(IN_A_TIER), *arguments],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT}/tests:{ROOT}:{ROOT}/kernels",
            "PYTHONHASHSEED": str(hash_seed),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def histories() -> "subprocess.CompletedProcess[str]":
    return simulated(1, "--seeds", str(SEEDS), "--first", "0", str(FIRST))


@pytest.fixture(scope="module")
def with_bugs() -> "subprocess.CompletedProcess[str]":
    return simulated(2, "--bugs", "--seeds", str(BUG_SEEDS))


def test_no_seed_gives_a_wrong_byte_a_leak_or_a_hang(histories: "subprocess.CompletedProcess[str]") -> None:
    said = histories.stdout
    assert histories.returncode == 0, said + histories.stderr
    (fixed,) = re.findall("^[0-9]+ seeds from 0 on in .*", said, re.MULTILINE)
    counts = {what: int(count) for count, what in re.findall(r"(\d+) ([a-z ]+)", fixed)}
    # Otherwise the histories would be of a cache that serves nothing, or in which nothing goes wrong. What is
    # rare is not among each few seeds, so it is counted in those that are always the same.
    for least, what in LEAST.items():
        assert not [each for each in what.split(", ") if counts.get(each, 0) <= least * SEEDS], said


def test_a_seed_reproduces(
    histories: "subprocess.CompletedProcess[str]", with_bugs: "subprocess.CompletedProcess[str]"
) -> None:
    first, second = (
        re.search(r"^history of seed .*?^end of it: .*?$", each.stdout, re.DOTALL | re.MULTILINE)
        for each in (histories, with_bugs)
    )
    assert first is not None, histories.stdout
    assert second is not None, with_bugs.stdout
    assert first[0].count(" loaded request ") > 10
    assert re.search("'loads from another engine by a tier among unlike ones', [1-9]", first[0])
    assert first[0].endswith("] "), "nothing went wrong"
    assert first[0] == second[0]


def test_the_simulation_finds_bugs(with_bugs: "subprocess.CompletedProcess[str]") -> None:
    assert with_bugs.returncode == 0, with_bugs.stdout + with_bugs.stderr
    assert with_bugs.stdout.count("found by seed") == len(BUGS) > 0
