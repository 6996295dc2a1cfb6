"""Clients in processes of their own, to be stopped and killed."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.processes import ChildProcess
from harness.waiting import wait_until


@contextmanager
def client(code: str, *arguments: str) -> Iterator[ChildProcess]:
    """A process that runs `code` and has said "up"; killed at the end, whatever it does."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with ChildProcess("client", [sys.executable, "-c", code, *arguments], variables, pipes=True) as process:
        assert process.stdout.readline() == b"up\n"
        yield process


def stop(pid: int) -> None:
    """SIGSTOP; returns when every thread of the process stands still."""
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    wait_until(
        lambda: all(_state(thread) in "tT" for thread in threads.iterdir()),
        what=f"process {pid} stands still",
        interval_s=0.001,
    )


def go_on(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)


def _state(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
