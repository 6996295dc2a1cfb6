"""Child processes that never outlive the tests, and what they wrote."""

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.paths import LOGS

TAIL_BYTES = 6000
_numbers = itertools.count()

# Run before the real program: the kernel kills it when the process that started it dies.
_TETHER = (
    "import ctypes, os, signal, sys; "
    "ctypes.CDLL(None).prctl(1, signal.SIGKILL); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); "
    "os.execv(sys.argv[2], sys.argv[2:])"
)


def free_port() -> int:
    """A TCP port that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def new_log(name: str) -> Path:
    LOGS.mkdir(parents=True, exist_ok=True)
    return LOGS / f"{name}-{os.getpid()}-{next(_numbers)}.log"


def tail(log: Path) -> str:
    """The end of a log file, for error messages."""
    try:
        content = log.read_bytes()
    except OSError:
        return f"(no log at {log})"
    return f"--- end of {log} ---\n" + content[-TAIL_BYTES:].decode(errors="replace")


def tethered(command: Sequence[str]) -> list[str]:
    """`command`, bound to the life of this process. To be started from the main thread."""
    return [sys.executable, "-c", _TETHER, str(os.getpid()), *command]


def group_members(group: int) -> list[int]:
    """The living processes of a process group, zombies not counted."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group and fields[0] != "Z":
                members.append(int(stat.parent.name))
    return members


def kill_group(process: "subprocess.Popen[bytes]", timeout_s: float = 10.0) -> None:
    """End a process that leads its own group, and all of the group; returns when none is left."""
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.poll()
        if not group_members(process.pid):
            break
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {group_members(process.pid)} cannot be killed")
        time.sleep(0.01)
    process.wait()


def environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    """This process's environment with `changes`, None removing a variable, and nobody's LMCACHE_ ones."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("LMCACHE_")}
    merged: dict[str, str | None] = {**inherited, **changes}
    return {name: value for name, value in merged.items() if value is not None}
