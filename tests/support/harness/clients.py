"""Clients in processes of their own, to be stopped and killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def client(code: str, *arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that runs `code` and has said "up"; killed at the end, whatever it does."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"up\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def stop(pid: int) -> None:
    """SIGSTOP; returns when every thread of the process stands still."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 5
    while any(_state(task) not in "tT" for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, "the process does not stop"
        time.sleep(0.001)


def go_on(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)


def _state(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


def cpu_s(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
