"""`make mutants`: puts each fault of mutants.toml into a copy of the tree, and shows which test finds it.

    python scripts/mutants.py [NAME ...]

Simulated histories look for what the tests miss. First, all must pass without a fault. Exits with 1 if a
fault is not found.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parent.parent
SEEDS, LIMIT_S = 60, 1800


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


def make(tree: Path, mutant: Mutant | None = None) -> None:
    """Copies all files but those that git ignores, and makes the fault. Raises ValueError unless its old text
    is there exactly once."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    if mutant is not None:
        path = tree / mutant.file
        path.write_text(changed(path.read_text(), mutant))


def changed(text: str, mutant: Mutant) -> str:
    for edit in mutant.edits:
        if text.count(edit.old) != 1:
            raise ValueError(f"{mutant.file} has this {text.count(edit.old)} times, not once: {edit.old}")
        text = text.replace(edit.old, edit.new)
    return text


def run(tree: Path, *arguments: str) -> str:
    """What fails first in this tree; empty if nothing does. Raises RuntimeError if it cannot run."""
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(tree / each) for each in ("", "kernels", "tests", "tests/support")),
        "LMCACHE_TEST_CACHE": str(ROOT / ".cache"),
        "OMP_NUM_THREADS": "1",
        "PYTEST_ADDOPTS": "",
    }
    command = [sys.executable, "-m", *arguments]
    with tempfile.TemporaryFile("w+") as said:
        # A session of its own: who outlives its limit is killed with all that it has started.
        process = subprocess.Popen(
            command, cwd=tree, env=variables, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return f"{arguments[0]} does not end in {LIMIT_S} s"
        said.seek(0)
        text = said.read()
    failed = re.search(r"^(?:FAILED|ERROR) (\S+::\S+)|^(seed \d+) failed", text, re.MULTILINE)
    if code not in (0, 1) or (code and not failed):
        raise RuntimeError(f"{' '.join(arguments)} ended with {code}: {text[-3000:]}")
    return (failed[1] or failed[2]) if code and failed else ""


def found_by(tree: Path, *mutants: Mutant) -> str:
    """The first test or seed that fails; empty if none does."""
    tests = dict.fromkeys(test for mutant in mutants for test in mutant.tests)
    by_tests = run(tree, "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests) if tests else ""
    return by_tests or run(tree, "simulation", "--seeds", str(SEEDS), "--jobs", "1")


def main() -> int:
    survivors, mutants = [], table()
    names = sys.argv[1:] or list(mutants)
    with tempfile.TemporaryDirectory(prefix="mutant-") as directory:
        make(Path(directory))
        if failed := found_by(Path(directory), *(mutants[name] for name in names)):
            sys.exit(f"without any fault, this fails: {failed}")
    print("without any fault, nothing fails", flush=True)
    for name in names:
        mutant, start_s = mutants[name], time.monotonic()
        with tempfile.TemporaryDirectory(prefix="mutant-") as directory:
            make(Path(directory), mutant)
            found = found_by(Path(directory), mutant)
        took_s = time.monotonic() - start_s
        print(f"{name:4} {mutant.what}: {found or 'NOT FOUND'} ({took_s:.0f} s)", flush=True)
        survivors += [] if found else [name]
    print(f"{len(survivors)} faults were not found: {' '.join(survivors)}" if survivors else "all were found")
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main())
