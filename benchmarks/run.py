"""`make bench`: every benchmark, one after the other, then docs/benchmarks.md and its plots.

One that fails is named in the report and makes the exit code 1; what the others measured is kept.

The page is of one run. Benchmarks that are named (`make bench NAMES="lookup start"`) only print what they
measure: the page stays as it is. `--rest` measures what the last whole run did not, because it failed, as a part of
that run. `--report` writes the page again from the last results of all benchmarks. If these are of several runs,
the page says so, and each section names its run.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import report
from section import RESULTS

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parent
ORDER = (
    *("engine", "steps", "copies", "null_driver", "mapped", "lookup", "open_loop", "loop", "start"),
    *("index", "replay", "admission", "conversations", "once", "answers", "agents", "tiers", "tier_peer"),
    "compression",
)
OWN_OUTPUT = ("index", "replay", "admission", "conversations", "once", "answers")
TIMEOUT_S = 3600


def measure(name: str, run: str) -> bool:
    """Runs one benchmark as a part of `run`; False if it failed. What an earlier run of it measured is
    forgotten."""
    result = result_of(name)
    result.unlink(missing_ok=True)
    print(f"\n== {name} ==", flush=True)
    start = time.monotonic()
    command = [sys.executable, str(BENCH / f"{name}.py")]
    if name in OWN_OUTPUT:
        command += ["--out", str(result)]
    path = os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "tests" / "support", BENCH)))
    try:
        code = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": path}, timeout=TIMEOUT_S, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        code = -1
    print(f"({time.monotonic() - start:.0f} s)", flush=True)
    if code != 0:
        print(f"bench: {name} failed", file=sys.stderr)
    if code != 0 or not result.exists():
        return False
    result.write_text(json.dumps({**json.loads(result.read_text()), "run": run}, indent=1))
    return True


def result_of(name: str) -> Path:
    return RESULTS / f"{name}.json"


def results() -> list[dict[str, Any]]:
    """The last results of all benchmarks that have any."""
    return [json.loads(path.read_text()) for path in map(result_of, ORDER) if path.exists()]


def this_run() -> str:
    """What tells this run from others: when it began, and what it measures."""
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    at = f", commit {git.stdout.strip()}" if git.returncode == 0 else ""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()) + at


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(ORDER)}; all without", default=[])
    parser.add_argument(
        "--rest", action="store_true", help="measure what failed in the last run, as a part of it"
    )
    parser.add_argument("--report", action="store_true", help="only write the report of the last results")
    options = parser.parse_args(arguments)
    RESULTS.mkdir(parents=True, exist_ok=True)
    start, run = time.monotonic(), this_run()
    failed = []
    whole = RESULTS / "whole-run.json"
    if options.rest:
        runs = {report.run(section) for section in results()}
        if len(runs) != 1:
            raise SystemExit(f"the last results are of {len(runs)} runs, not of one: run `make bench`")
        failed = [name for name in ORDER if not result_of(name).exists() and not measure(name, *runs)]
    elif not options.report:
        whole.unlink(missing_ok=True)
        failed = [name for name in options.names or ORDER if not measure(name, run)]
        if options.names:
            print(f"\n{report.PAGE} stays as it is, because a page is of one run: `make bench` writes it")
            return 1 if failed else 0
        if not failed:
            whole.write_text(json.dumps({"minutes": (time.monotonic() - start) / 60}))
    minutes = json.loads(whole.read_text())["minutes"] if whole.exists() else 0.0
    sections = results()
    if not sections:
        raise SystemExit("no benchmark has any results: run `make bench`")
    report.write(sections, failed, minutes)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
