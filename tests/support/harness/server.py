"""The real server as a child process."""

import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import pytest
from prometheus_client.parser import text_string_to_metric_families

from harness.processes import (
    ChildProcess,
    environment,
    free_port,
    new_log,
    rss_bytes,
    run_forked,
    tail,
)
from harness.waiting import PATIENCE_S, answers, get, wait_until
from lmcache_client.contract import endpoint

START_TIMEOUT_S = STOP_TIMEOUT_S = PATIENCE_S

# Gives up a capability, then becomes the program in its arguments.
_WITHOUT = (
    "import ctypes, os, sys; "
    "ctypes.CDLL(None).prctl(24, int(sys.argv[1])); "
    "os.execv(sys.argv[2], sys.argv[2:])"
)

# Limits its open files, then becomes the program in its arguments.
_WITH_FILES = (
    "import os, resource, sys; "
    "resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2]))); "
    "os.execv(sys.argv[3], sys.argv[3:])"
)


class LMCacheServer:
    """`lmcache server` on free ports, with a runtime directory of its own. A context manager.

    `flags` are the server's options by their names in Python: `l1_size_gb=0.01, chunk_size=256`;
    True stands for a flag without a value, False for none, a tuple for several values; `--checksums` is on
    unless a test says otherwise.
    `without_capability` is a number of capabilities(7) that the server must not have even when the tests
    run as root. `descriptors` are the soft and the hard limit of open files that it starts with. `through` is
    a program, with arguments, that becomes the server.
    """

    def __init__(
        self,
        *,
        without_capability: int | None = None,
        descriptors: tuple[int, int] | None = None,
        through: Sequence[str] = (),
        **flags: Any,
    ) -> None:
        self._without_capability = without_capability
        self._descriptors = descriptors
        self._through = through
        self.flags = {"l1_size_gb": 0.5, "chunk_size": "auto", "checksums": True, **flags}
        self.port = int(self.flags.setdefault("port", free_port()))
        self.http_port = int(self.flags.setdefault("http_port", free_port()))
        self.runtime_dir = tempfile.mkdtemp(prefix="lmcache-test-", dir="/tmp")
        self.environment = environment({"LMCACHE_RUNTIME_DIR": self.runtime_dir})
        self.log = new_log("server")
        self.process: ChildProcess | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()
        if error is not None:
            error.add_note(tail(self.log))
        elif self.log.exists():
            # As when the garbage collector meets a memoryview that is in use, which crashes some CPythons.
            assert "Exception ignored" not in self.log.read_text(errors="replace"), tail(self.log)

    def start(self) -> None:
        assert self.process is None, "the server is running"
        command = [sys.executable, "-m", "lmcache_server", "server"]
        if self._without_capability is not None:
            command = [sys.executable, "-c", _WITHOUT, str(self._without_capability), *command]
        if self._descriptors is not None:
            command = [sys.executable, "-c", _WITH_FILES, *map(str, self._descriptors), *command]
        command = [*self._through, *command]
        command += self._options()
        # As it is, it can be forked.
        is_plain = command[:2] == [sys.executable, "-m"]
        self.process = ChildProcess(
            "the server",
            command[3:] if is_plain else command,
            self.environment,
            self.log,
            forks="lmcache" if is_plain else "",
        )
        self.process.wait_until_ready(self._is_ready, START_TIMEOUT_S)

    def _options(self) -> list[str]:
        options = []
        for name, given in self.flags.items():
            for value in given if isinstance(given, tuple) else (given,):
                if value is not False:
                    options += ["--" + name.replace("_", "-"), *([] if value is True else [str(value)])]
        return options

    def _is_ready(self) -> bool:
        return answers(f"http://127.0.0.1:{self.http_port}/readyz")

    def get(self, path: str) -> str:
        """The body at an HTTP path; raises OSError unless the answer is a success."""
        return get(f"http://127.0.0.1:{self.http_port}{path}")

    def selftest(self, path: str = "/selftest") -> tuple[int, Any]:
        """The HTTP status and the report of a self-test."""
        try:
            return 200, json.loads(self.get(path))
        except urllib.error.HTTPError as failure:
            with failure:
                return failure.code, json.loads(failure.read())

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics, by `name` or `name{label="value",…}` with labels in order of name, and
        summed over models and namespaces."""
        samples: dict[str, float] = {}
        for family in text_string_to_metric_families(self.get("/metrics")):
            for sample in family.samples:
                kept = sorted(pair for pair in sample.labels.items() if pair[0] not in ("model", "namespace"))
                labels = ",".join(f'{name}="{value}"' for name, value in kept)
                name = f"{sample.name}{{{labels}}}" if labels else sample.name
                samples[name] = samples.get(name, 0.0) + float(sample.value)
        return samples

    def tokens(self, outcome: str = "hit") -> int:
        return int(self.metrics()[f'lmcache_tokens_total{{outcome="{outcome}"}}'])

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(self.get("/status"))
        return status

    @property
    def address(self) -> str:
        """Where it listens, with its key file."""
        if "host" in self.flags:
            return endpoint.address(self.flags["host"], self.port, str(self.flags.get("key_file", "")))
        return f"ipc://{self.runtime_dir}/{self.port}.sock"

    @property
    def pid(self) -> int:
        assert self.process is not None, "the server is not running"
        return self.process.pid

    def rss_bytes(self) -> int:
        """Resident memory, what is populated of L1 included."""
        return rss_bytes(self.pid)

    def wait_for_status(
        self, condition: Callable[[dict[str, Any]], bool], timeout_s: float = PATIENCE_S
    ) -> None:
        what = lambda: f"the server's status is as it should be; it is {self.status()}"  # noqa: E731
        wait_until(lambda: condition(self.status()), timeout_s, what)

    def wait_until(self, condition: Callable[[dict[str, int]], bool], timeout_s: float = PATIENCE_S) -> None:
        self.wait_for_status(lambda status: condition(status["l1"]), timeout_s)

    def wait_for_metric(self, name: str, value: float, timeout_s: float = PATIENCE_S) -> None:
        """Wait until a sample of /metrics has this value; some are counted once a second."""
        what = lambda: f"{name} is {value:g}; it is {self.metrics()[name]:g}"  # noqa: E731
        wait_until(lambda: self.metrics()[name] == value, timeout_s, what)

    def wait_for_log(self, text: str, times: int = 1) -> None:
        """Wait until its log has this text so many times, and see that it has it no more often. A thread
        writes the lines, so one may come after the answer that it is about."""
        said = lambda: self.log.read_text().count(text)  # noqa: E731
        what = lambda: f"the log says {times} times: {text}\n{tail(self.log)}"  # noqa: E731
        wait_until(lambda: said() >= times, what=what)
        assert said() == times, f"the log says this more often than {times} times: {text}"

    def answered(self) -> float:
        metrics = self.metrics()
        return sum(metrics[name] for name in metrics if name.startswith("lmcache_requests_total"))

    def wait_for_engine(self) -> int:
        """Wait until one engine uses the server, on both sides of its connector; returns its chunk size."""
        both = ["scheduler", "worker"]
        self.wait_for_status(lambda status: sorted(each["role"] for each in status["sessions"]) == both)
        time.sleep(0.3)  # until the scheduler has read that it has joined

        def served() -> int:
            return sum(each["chunk_size"] for each in self.status()["namespaces"] if each["engines"])

        return int(wait_until(served))

    def tier(self, number: int = 0) -> Any:
        return self.status()["tiers"][number]

    def wait_until_written(self) -> None:
        """Wait until the first tier has written something, and nothing waits."""

        def is_written() -> bool:
            tier = self.tier()
            return bool(tier["written_objects"]["written"] and not tier["waiting_objects"])

        wait_until(is_written)

    def wait_until_populated(self) -> None:
        # Beside loops that are not niced, the thread that does it is given seconds of each hour.
        self.wait_until(lambda l1: l1["populated_bytes"] == l1["total_bytes"], 5 * PATIENCE_S)

    def wait_at_rest(self, sessions: int = 0, timeout_s: float = PATIENCE_S) -> None:
        """Wait until only `sessions` sessions are left and nothing is held by any: no lease, no reader, no
        reserved frame, every frame free or ready."""

        def rests(status: dict[str, Any]) -> bool:
            l1 = status["l1"]
            lost = l1["total_bytes"] - l1["free_bytes"] - l1["ready_bytes"] - l1["reserved_bytes"]
            assert lost == 0, f"{lost} bytes of L1 are neither free nor ready"
            held = any(l1[name] for name in ("leases", "readers", "reserved_bytes"))
            return len(status["sessions"]) == sessions and not held

        self.wait_for_status(rests, timeout_s)

    def cli(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run `lmcache` with this server's port and runtime directory; the server may take its time."""
        patience = () if arguments[0] == "doctor" else ("--timeout-s", str(PATIENCE_S))
        command = [*arguments, *patience, "--port", str(self.port)]
        return run_forked("lmcache", command, self.environment, 2 * PATIENCE_S)

    def clear(self) -> None:
        """Forget everything that is cached, in tiers, too."""
        result = self.cli("clear", "--tiers")
        if result.returncode != 0:
            raise RuntimeError(f"lmcache clear failed: {result.stdout}{result.stderr}\n{tail(self.log)}")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process = None

    def terminate(self) -> int:
        """End it with SIGTERM; returns the exit code."""
        assert self.process is not None, "the server is not running"
        process, self.process = self.process, None
        return process.stop(STOP_TIMEOUT_S)

    def restart(self) -> None:
        """Crash it and start it again at the same address, empty."""
        self.kill()
        self.start()

    def beside(self) -> "LMCacheServer":
        """Another server for the same address, not started."""
        other = LMCacheServer(l1_size_gb=0.02, port=self.port)
        shutil.rmtree(other.runtime_dir)
        other.runtime_dir, other.environment = self.runtime_dir, self.environment
        return other

    def _remove(self) -> None:
        self.kill()
        shutil.rmtree(self.runtime_dir, ignore_errors=True)


def server_of_a_file(**flags: Any) -> Any:
    """A fixture: a server with these options for all tests of a file."""
    return pytest.fixture(lambda: (yield from _running(flags)), scope="module")


def server_of_a_test(**flags: Any) -> Any:
    """A fixture: a server with these options for one test."""
    return pytest.fixture(lambda: (yield from _running(flags)))


def _running(flags: dict[str, Any]) -> Iterator[LMCacheServer]:
    with LMCacheServer(**flags) as server:
        yield server


def refusal(exit_code: int = 2, **flags: Any) -> str:
    """The one line with which a server does not start."""
    try:
        with LMCacheServer(**flags):
            raise AssertionError("it has started")
    except RuntimeError as error:
        said = str(error)
    assert f"did not start (exit code {exit_code})" in said
    assert "Traceback" not in said
    return said.splitlines()[-1]
