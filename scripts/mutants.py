"""`make mutants`: puts each fault of mutants.toml into a copy of the tree, and shows which test finds it.

    python scripts/mutants.py [NAME ...]

If its tests do not find a fault, simulated histories try. Exits with 1 if one is not found.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parent.parent
SEEDS, LIMIT_S = 60, 900


class Edit(msgspec.Struct):
    old: str
    new: str


class Mutant(msgspec.Struct):
    what: str
    file: str
    edits: list[Edit]
    tests: list[str] = []


def table() -> dict[str, Mutant]:
    return msgspec.toml.decode((ROOT / "scripts/mutants.toml").read_bytes(), type=dict[str, Mutant])


def make(tree: Path, mutant: Mutant) -> None:
    """Copies the tree without what git ignores, and makes the fault. Raises ValueError unless its text is
    there exactly once."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    path = tree / mutant.file
    path.write_text(changed(path.read_text(), mutant))


def changed(text: str, mutant: Mutant) -> str:
    for edit in mutant.edits:
        if text.count(edit.old) != 1:
            raise ValueError(f"{mutant.file} has this {text.count(edit.old)} times, not once: {edit.old}")
        text = text.replace(edit.old, edit.new)
    return text


def found_by(tree: Path, mutant: Mutant) -> str:
    """The first test or seed that fails; empty if none does."""
    paths = os.pathsep.join(map(str, (tree, tree / "kernels", tree / "tests", tree / "tests/support")))
    variables = {
        **os.environ,
        "PYTHONPATH": paths,
        "LMCACHE_TEST_CACHE": str(ROOT / ".cache"),
        "OMP_NUM_THREADS": "1",
        "PYTEST_ADDOPTS": "",
    }

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", *arguments]
        try:
            done = subprocess.run(
                command, cwd=tree, env=variables, capture_output=True, text=True, timeout=LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return f"{arguments[0]} does not end"
        marks = ("FAILED ", "ERROR ", "seed ")
        lines = [line for line in done.stdout.splitlines() if line.startswith(marks)]
        return (lines or [f"{arguments[0]} fails"])[0].partition(" - ")[0] if done.returncode else ""

    by_tests = run("pytest", "-q", "-x", "-p", "no:cacheprovider", *mutant.tests) if mutant.tests else ""
    return by_tests or run("simulation", "--seeds", str(SEEDS), "--jobs", "1")


def main() -> int:
    survivors, mutants = [], table()
    for name in sys.argv[1:] or mutants:
        mutant, start_s = mutants[name], time.monotonic()
        with tempfile.TemporaryDirectory(prefix="mutant-") as directory:
            make(Path(directory), mutant)
            found = found_by(Path(directory), mutant)
        print(
            f"{name:4} {mutant.what}: {found or 'NOT FOUND'} ({time.monotonic() - start_s:.0f} s)", flush=True
        )
        survivors += [] if found else [name]
    print(f"{len(survivors)} faults were not found: {' '.join(survivors)}" if survivors else "all were found")
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main())
