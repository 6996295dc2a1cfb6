"""Starts the demo's processes, `lmcache server` and vLLM's OpenAI server, waits for them and stops them."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

TAIL_LINES = 8
STACK = re.compile(r"Traceback \(most recent|^\s|\] {2,}")
"""The lines of a stack trace, also behind what vLLM puts before each of them."""
REPORT_EVERY_S = 15.0
POLL_S = 0.1
STOP_TIMEOUT_S = 20.0
END_TIMEOUT_S = 1.0
# Run before the real program, which gets SIGTERM if the demo is killed. vLLM then stops its own children.
_TETHER = (
    "import ctypes, os, signal, sys; "
    "ctypes.CDLL(None).prctl(1, signal.SIGTERM); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)

# A proxy that the user's environment names reaches nothing on this machine.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class DemoError(Exception):
    """The demo cannot go on; the message tells its user why."""


def say(text: str) -> None:
    print(text, flush=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _inherited() -> dict[str, str]:
    """This process's environment, without the user's settings for other servers and engines."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("LMCACHE_") and name != "VLLM_CPU_KVCACHE_SPACE"
    }


def _group_is_alive(group: int) -> bool:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[2]) == group and fields[0] != "Z":
                return True
    return False


class Service:
    """A child process that leads its own process group and answers over HTTP. A context manager."""

    def __init__(
        self, what: str, arguments: list[str], environment: Mapping[str, str], log: Path, port: int, path: str
    ) -> None:
        """A GET of `path` succeeds as soon as the service is ready."""
        self.what = what
        self.port = port
        self._log = log
        self._ready_path = path
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _TETHER, sys.executable, *arguments],
                env={**_inherited(), **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def __enter__(self) -> "Service":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def wait_until_ready(self, timeout_s: float) -> None:
        """Raises DemoError if the process ends or is not ready in time."""
        start = time.monotonic()
        next_report_s = REPORT_EVERY_S
        while True:
            if self._process.poll() is not None:
                raise self.failure("does not start")
            with contextlib.suppress(OSError, http.client.HTTPException):
                _direct.open(self._url(self._ready_path), timeout=10).close()
                return
            elapsed_s = time.monotonic() - start
            if elapsed_s > timeout_s:
                raise self.failure(f"was not ready after {timeout_s:.0f} s")
            if elapsed_s > next_report_s:
                say(f"  still waiting for {self.what}, {elapsed_s:.0f} s")
                next_report_s += REPORT_EVERY_S
            time.sleep(POLL_S)

    def get(self, path: str) -> str:
        """Raises DemoError."""
        return "\n".join(self._lines(urllib.request.Request(self._url(path)), 10.0))

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float = 300.0) -> Iterator[str]:
        """The lines of the answer, as they come. Raises DemoError with the service's error."""
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        return self._lines(urllib.request.Request(self._url(path), data, headers, method="POST"), timeout_s)

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def _lines(self, request: urllib.request.Request, timeout_s: float) -> Iterator[str]:
        try:
            with _direct.open(request, timeout=timeout_s) as response:
                for line in response:
                    yield line.decode(errors="replace").rstrip("\n")
        except urllib.error.HTTPError as error:
            reason = error.msg
            with contextlib.suppress(OSError, http.client.HTTPException):
                reason = error.read().decode(errors="replace")
            raise self.failure(f"answered {request.selector} with {error.code}: {reason}") from None
        except (OSError, http.client.HTTPException) as error:
            raise self.failure(f"does not answer {request.selector}: {error}") from None

    def failure(self, what: str) -> DemoError:
        """The error that the service has done `what`, and that it has ended, if it has."""
        # A connection breaks a moment before the process has ended.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)
        if (code := self._process.poll()) == -signal.SIGKILL:
            what += ": it was killed (is there enough memory?)"
        elif code is not None:
            what += f": it has ended with exit code {code}"
        return DemoError(f"{self.what} {what}\n{self.tail()}")

    def tail(self) -> str:
        """The last lines of the log. Stack traces are left out: the log has them."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        told = [line for line in lines if line and not STACK.search(line)]
        return "\n".join([f"the end of its log, {self._log}:", *told[-TAIL_LINES:]])

    def kill(self) -> None:
        """End it without a warning, as a crash would."""
        self._process.kill()
        self._process.wait()

    def terminate(self) -> None:
        """Ask it to end, without waiting."""
        self._process.terminate()

    def stop(self) -> None:
        """Stop the process with SIGTERM, then kill the rest of its group."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while _group_is_alive(self._process.pid) and time.monotonic() < deadline:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.poll()
            time.sleep(POLL_S)
        self._process.wait()


def start_and_wait(start: Callable[[], Service], timeout_s: float) -> Service:
    """Start a service and wait until it is ready; stop it if it does not get ready."""
    service = start()
    try:
        service.wait_until_ready(timeout_s)
    except BaseException:
        service.stop()
        raise
    return service
