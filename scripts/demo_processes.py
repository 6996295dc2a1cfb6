"""Starts the demo's processes, `lmcache server` and vLLM's OpenAI server, waits for them and stops them."""

import contextlib
import ctypes
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

TAIL_BYTES = 4000
REPORT_EVERY_S = 15.0
POLL_S = 0.1
STOP_TIMEOUT_S = 20.0
PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None)


class DemoError(Exception):
    """The demo cannot go on; the message tells its user why."""


def say(text: str) -> None:
    print(text, flush=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _end_with_parent() -> None:
    """Let the child get SIGTERM if the demo is killed; vLLM's server then stops its own children."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


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
            fields = stat.read_text().rpartition(")")[2].split()
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
                [sys.executable, *arguments],
                env={**_inherited(), **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=_end_with_parent,  # noqa: PLW1509 (the demo has no threads)
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
                raise DemoError(f"{self.what} ended with exit code {self._process.returncode}\n{self.tail()}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                self.get(self._ready_path)
                return
            elapsed_s = time.monotonic() - start
            if elapsed_s > timeout_s:
                raise DemoError(f"{self.what} was not ready after {timeout_s:.0f} s\n{self.tail()}")
            if elapsed_s > next_report_s:
                say(f"  still waiting for {self.what}, {elapsed_s:.0f} s")
                next_report_s += REPORT_EVERY_S
            time.sleep(POLL_S)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as response:
            body: bytes = response.read()
        return body.decode()

    def post(self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = 300.0) -> Any:
        """The open response; the caller reads and closes it. Raises DemoError with the service's error."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=json.dumps(body or {}).encode(),
            headers={"Content-Type": "application/json"},
            method="POST",
        )
        try:
            return urllib.request.urlopen(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            raise DemoError(
                f"{self.what} answered {path} with {error.code}: {error.read().decode()}"
            ) from None
        except OSError as error:
            raise DemoError(f"{self.what} does not answer {path}: {error}\n{self.tail()}") from None

    def tail(self) -> str:
        content = self._log.read_bytes()[-TAIL_BYTES:]
        return f"the end of its log, {self._log}:\n{content.decode(errors='replace')}"

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
