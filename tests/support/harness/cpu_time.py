"""A plugin of pytest: how much CPU time each test took, and a bound for all of them.

Counted are the tests' own processes and what they started and has ended. Time of the wall says how busy the
machine was; CPU time says what a test costs.
"""

import functools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest

from harness import forks
from harness.paths import CACHE

SHOWN = 30
REFERENCE_S = 0.1
"""About what STEPS take on a processor of a server, while all of its cores are busy."""
STEPS = """
import time
total = 0
for number in range(1_000_000):
    total += number * number
print(time.process_time())
"""
_seconds: Counter[str] = Counter()
_last = [0.0]


def _now_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system + forks.ended_cpu_s


@functools.cache
def _bound_s(config: pytest.Config) -> float:
    """The bound on this machine, 0 if there is none: a slower one, or one whose cores share a processor, is
    given more."""
    if not config.getoption("--max-cpu"):
        return 0.0
    command = [sys.executable, "-c", STEPS]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in os.sched_getaffinity(0)]
    taken_s = sum(float(run.communicate()[0]) for run in runs) / len(runs)
    return float(config.getoption("--max-cpu")) * max(1.0, taken_s / REFERENCE_S)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--max-cpu", type=float, help="fail if the tests took more seconds of CPU time")


def pytest_runtest_logstart() -> None:
    _last[0] = _now_s()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    began_s, _last[0] = _last[0], _now_s()
    report.cpu_s = _last[0] - began_s  # type: ignore[attr-defined]
    return report


def pytest_runtest_logreport(report: Any) -> None:
    # A worker that crashed says nothing of it.
    _seconds[report.nodeid] += getattr(report, "cpu_s", 0.0)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    files: Counter[str] = Counter()
    for test, seconds in _seconds.items():
        files[test.partition("::")[0]] += seconds
    terminalreporter.section("CPU time")
    for name, seconds in files.most_common(SHOWN):
        terminalreporter.line(f"{seconds:7.1f} s  {name}")
    bound_s = _bound_s(terminalreporter.config)
    allowed = f", more than the {bound_s:.0f} s that are allowed" if 0 < bound_s < files.total() else ""
    terminalreporter.line(f"{files.total():7.1f} s  in all{allowed}")
    (CACHE / "cpu_time.json").write_text(json.dumps(dict(_seconds.most_common()), indent=1))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        return
    if 0 < _bound_s(session.config) < _seconds.total():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
