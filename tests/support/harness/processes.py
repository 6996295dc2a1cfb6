"""Child processes: started, waited for and ended, never outliving the tests; and what they wrote."""

import collections
import contextlib
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from harness.forks import Forked
from harness.paths import LOGS, ROOT
from harness.waiting import wait_until

TAIL_BYTES = 6000
PORTS, WORKERS = (20_000, 32_000), 12
_numbers = itertools.count()
_given = collections.deque[int](maxlen=400)
# A tiny model is too small for two threads: one of them always spins while it waits for the other. One thread
# and two do not compute the same bits, so all engines have this number. vLLM must not bind their workers to
# processors, because it would then choose the number itself.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

# Run before the real program: the kernel kills it when the process that started it dies.
_TETHER = (
    "import ctypes, os, signal, sys; "
    "ctypes.CDLL(None).prctl(1, signal.SIGKILL); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); "
    "os.execv(sys.argv[2], sys.argv[2:])"
)


def free_port() -> int:
    """A TCP port that nobody uses at the moment, none of the last that were given. Until the caller uses it,
    the kernel gives it to no connection: those get higher ports. Workers of the test run choose among
    different ones."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", f"gw{WORKERS - 1}").removeprefix("gw"))
    worker += int(os.environ.get("LMCACHE_TEST_FIRST_WORKER", 0))
    for port in random.sample(range(*PORTS)[worker % WORKERS :: WORKERS], 500):
        if port in _given:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            _given.append(port)
            return port
    raise AssertionError(f"no free port among {PORTS}")


def new_log(name: str) -> Path:
    LOGS.mkdir(parents=True, exist_ok=True)
    return LOGS / f"{name}-{os.getpid()}-{next(_numbers)}.log"


def tail(log: Path) -> str:
    try:
        content = log.read_bytes()
    except OSError:
        return f"(no log at {log})"
    return f"--- end of {log} ---\n" + content[-TAIL_BYTES:].decode(errors="replace")


def tethered(command: Sequence[str]) -> list[str]:
    """`command`, bound to the life of this process. To be started from the main thread."""
    return [sys.executable, "-I", "-S", "-c", _TETHER, str(os.getpid()), *command]


def rss_bytes(pid: int | str = "self") -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0]) << 10


def group_members(group: int) -> list[int]:
    """The living processes of a process group, zombies not counted."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group and fields[0] != "Z":
                members.append(int(stat.parent.name))
    return members


def kill_group(process: "subprocess.Popen[bytes] | Forked", timeout_s: float = 10.0) -> None:
    """End a process that leads its own group, and all of the group; returns when none is left."""

    def none_is_left() -> bool:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.poll()
        return not group_members(process.pid)

    wait_until(none_is_left, timeout_s, f"all of process group {process.pid} have ended", interval_s=0.01)
    process.wait()


def environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    """This process's environment with `changes`, None removing a variable, and nobody's LMCACHE_ ones. An
    engine in it computes with one thread."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("LMCACHE_")}
    merged: dict[str, str | None] = {**inherited, **ONE_THREAD, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def run_forked(
    kind: str, arguments: Sequence[str], environment: Mapping[str, str], timeout_s: float
) -> "subprocess.CompletedProcess[str]":
    """What `subprocess.run` does, of a process that is forked; see forks.py."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = Forked(kind, arguments, environment, ROOT, output.fileno(), errors=errors.fileno())
        try:
            code = process.wait(timeout_s)
        finally:
            kill_group(process)
        said = []
        for file in (output, errors):
            file.seek(0)
            said.append(file.read().decode())
    return subprocess.CompletedProcess(arguments, code, *said)


class ChildProcess:
    """A process that leads a group of its own. A context manager, which ends them all.

    What it says goes into its log; with `pipes` its standard input and output are `stdin` and `stdout` here.
    Unless it ends by itself when this process does, it is `tethered`: to be started from the main thread.
    `forks` is the kind of process that is forked, and `command` then its arguments; see forks.py.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        *,
        cwd: Path = ROOT,
        pipes: bool = False,
        tether: bool = True,
        forks: str = "",
    ) -> None:
        self.name = name
        self.log = log or new_log(name.rpartition(" ")[2])
        self.popen: subprocess.Popen[bytes] | Forked
        with self.log.open("ab") as output:
            if forks:
                given = os.environ if environment is None else environment
                self.popen = Forked(forks, command, given, cwd, output.fileno(), pipes=pipes)
                return
            self.popen = subprocess.Popen(
                tethered(command) if tether else command,
                cwd=cwd,
                env=environment,
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipes else output,
                stderr=output,
                process_group=0,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        if error is not None:
            error.add_note(tail(self.log))

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def stdin(self) -> IO[bytes]:
        assert self.popen.stdin is not None
        return self.popen.stdin

    @property
    def stdout(self) -> IO[bytes]:
        assert self.popen.stdout is not None
        return self.popen.stdout

    def say(self, line: str) -> None:
        self.stdin.write(f"{line}\n".encode())
        self.stdin.flush()

    def wait_until_ready(
        self, is_ready: Callable[[], bool], timeout_s: float, interval_s: float = 0.02
    ) -> None:
        """Raises RuntimeError with the end of its log if it ends before that or is late, and kills it."""
        outcome = ""

        def seen() -> str:
            return "ready" if is_ready() else "" if self.popen.poll() is None else "ended"

        try:
            with contextlib.suppress(AssertionError):
                outcome = wait_until(seen, timeout_s, interval_s=interval_s)
        finally:
            code = self.popen.poll()
            if outcome != "ready":
                self.kill()
        if outcome != "ready":
            raise RuntimeError(f"{self.name} did not start (exit code {code})\n{tail(self.log)}")

    def stop(self, timeout_s: float, number: int = signal.SIGTERM) -> int:
        """Ask it to end, and wait; returns its exit code. Raises RuntimeError if it had to be killed."""
        self.popen.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(timeout_s)
        code = self.popen.poll()
        self.kill()
        if code is None:
            name = signal.Signals(number).name
            raise RuntimeError(f"{self.name} ignored {name} for {timeout_s:g} s\n{tail(self.log)}")
        return code

    def kill(self) -> None:
        """End it, and all of its group, as a crash would."""
        kill_group(self.popen)
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


@contextlib.contextmanager
def as_user(user_id: int) -> Iterator[Path]:
    """Root is another user inside the context, which gets a directory that the user may enter."""
    with tempfile.TemporaryDirectory(prefix="lmcache-test-", dir="/tmp") as name:
        os.chmod(name, 0o755)
        os.setresuid(user_id, user_id, 0)
        try:
            yield Path(name)
        finally:
            os.setresuid(0, 0, 0)


@contextlib.contextmanager
def root() -> Iterator[None]:
    """Root again, inside `as_user`."""
    user_id = os.getuid()
    os.setresuid(0, 0, 0)
    try:
        yield
    finally:
        os.setresuid(user_id, user_id, 0)
