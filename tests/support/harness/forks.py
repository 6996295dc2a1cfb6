"""Processes that are forked from one that has imported everything; see fork_server.py."""

import array
import atexit
import contextlib
import fcntl
import hashlib
import json
import os
import re
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

START_TIMEOUT_S = 300.0
# What differs from one engine or server to the next, and is no reason for a fork server of its own.
OF_ONE = (
    "AWS_ACCESS_KEY_ID",
    "AWS_REGION",
    "AWS_SECRET_ACCESS_KEY",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_ACCOUNT_NAME",
    "LMCACHE_RUNTIME_DIR",
    "OTEL_BSP_SCHEDULE_DELAY",
    "UCX_NET_DEVICES",
    "UCX_TLS",
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_NIXL_SIDE_CHANNEL_HOST",
    "VLLM_NIXL_SIDE_CHANNEL_PORT",
    "VLLM_SERVER_DEV_MODE",
    "VLLM_SSM_CONV_STATE_LAYOUT",
    "PYTEST_CURRENT_TEST",
    # What torch and vLLM set in the process that imports them, and a test may be the first to do that.
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TILELANG_CLEANUP_TEMP_FILES",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCHINDUCTOR_COMPILE_THREADS",
    "TRITON_CACHE_AUTOTUNING",
)
# cv2 puts a directory of its own before those of LD_LIBRARY_PATH when it is imported.
_OF_CV2 = re.compile(r"[^:]*/cv2/\.\./\.\./lib64:?")
SHARED = "LMCACHE_TEST_FORKS"
"""Names the socket of the process from which a run's workers are forked. All of them share the fork servers
beside it."""
_HOME = os.readlink("/proc/thread-self/ns/net")
ended_cpu_s = 0.0
"""Seconds of CPU time of all forked processes that have ended."""
_started_here: list[object] = []
_servers: dict[tuple[str, str, tuple[tuple[str, str], ...]], str] = {}


def fork_server(kind: str, environment: Mapping[str, str]) -> str:
    """The socket of a process that forks engines (`engine`) or runs `lmcache` (`lmcache`) with this
    environment; started when it is first asked for, ended with this process or with the whole run."""
    # Only of an engine, more than the interpreter itself reads variables before it is forked.
    read = {
        name: value
        for name, value in environment.items()
        if name not in OF_ONE
        and not name.startswith("PYTEST_")
        and (kind == "engine" or name.startswith(("PYTHON", "LD_")))
    }
    if libraries := _OF_CV2.sub("", read.pop("LD_LIBRARY_PATH", "")):
        read["LD_LIBRARY_PATH"] = libraries
    # A test may have moved this process into a network of its own.
    network = os.readlink("/proc/thread-self/ns/net")
    key = kind, network, tuple(sorted(read.items()))
    if key not in _servers:
        first = os.environ.get(SHARED, "")
        if first and network == _HOME:
            path = f"{os.path.dirname(first)}/{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}"
            with open(f"{path}.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not os.path.exists(path):
                    _started(path, kind, environment, forks=first)
        else:
            path = f"{tempfile.mkdtemp(prefix='lmcache-forks-')}/socket"
            _started(path, kind, environment)
        _servers[key] = path
    return _servers[key]


def share(number: int) -> list[str]:
    """Start the process from which so many workers of pytest-xdist are forked; returns what it is to run."""
    path = f"{tempfile.mkdtemp(prefix='lmcache-forks-')}/socket"
    _started(path, "python", os.environ)
    os.environ[SHARED] = path
    return [f"popen//python={sys.executable} {Path(__file__).with_name('forked_python.py')}"] * number


def _started(path: str, kind: str, environment: Mapping[str, str], *, forks: str = "") -> None:
    from harness.processes import ChildProcess

    program = [str(Path(__file__).with_name("fork_server.py")), kind, path]
    command = program[1:] if forks else [sys.executable, *program]
    process = ChildProcess(f"{kind}-forks", command, environment, forks=forks)
    if not forks:
        atexit.register(shutil.rmtree, os.path.dirname(path), ignore_errors=True)
        atexit.register(process.kill)
    process.wait_until_ready(lambda: os.path.exists(path), START_TIMEOUT_S, interval_s=0.01)
    _started_here.append(process)


def forked_by_any(kind: str, arguments: Sequence[str], output: int) -> "Forked | None":
    """Forked in whatever environment there is a fork server for, or None where there is none yet."""
    for each, _, environment in _servers:
        if each == kind:
            return Forked(kind, arguments, dict(environment), Path.cwd(), output)
    return None


class Forked:
    """What `subprocess.Popen` is, as far as the harness uses it, of a process that another one forked.

    `kind` is what fork_server.py is started with, or the socket at which one listens."""

    def __init__(
        self,
        kind: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        directory: Path,
        output: int,
        *,
        errors: int | None = None,
        pipes: bool = False,
    ) -> None:
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        self.returncode: int | None = None
        request = {
            "arguments": list(arguments),
            "environment": dict(environment),
            "directory": str(directory),
        }
        self._forks = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._forks.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self._forks.connect(kind if kind.startswith("/") else fork_server(kind, environment))
        streams = [
            os.open(os.devnull, os.O_RDONLY),
            os.dup(output),
            os.dup(output if errors is None else errors),
        ]
        if pipes:
            os.close(streams[0])
            os.close(streams[1])
            streams[0], written = os.pipe()
            read, streams[1] = os.pipe()
            self.stdin, self.stdout = os.fdopen(written, "wb", 0), os.fdopen(read, "rb", 0)
        try:
            socket.send_fds(self._forks, [json.dumps(request).encode()], streams)
        finally:
            for stream in streams:
                os.close(stream)
        (self.pid,) = self._receive()

    def _receive(self) -> Sequence[int]:
        answer = self._forks.recv(8)
        if not answer:
            raise RuntimeError("the process that forks others has ended")
        return array.array("i", answer)

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._forks], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            global ended_cpu_s
            self.returncode, cpu_ms = self._receive()
            ended_cpu_s += cpu_ms / 1000
            self._forks.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)
