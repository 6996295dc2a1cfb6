"""Somebody who follows a page: types its commands, in order, in a directory of their own."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from harness.pages import Block
from harness.paths import CACHE, ROOT
from harness.processes import ChildProcess, environment, free_port, new_log
from harness.waiting import PATIENCE_S, answers

COMMAND_TIMEOUT_S = 300.0
START_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = PATIENCE_S
SERVER = re.compile(r"(\S+=\S+ )*lmcache server ")
VLLM = re.compile(r"(\S+=\S+ )*\S*python -m vllm\.entrypoints\.openai\.api_server ")
FIGURE = r"[\d.,:]"
UNIT = r"(?: (?:[KMGT]i?B|B|µs|ms|s)\b)?"
ACTIVATION = ". .venv/bin/activate"
BARE_PATH = "/usr/bin:/bin"
VARIABLE = re.compile(rf"(\S*/\S*|\b[0-9a-f]{{8,}}\b|\d{FIGURE}*{UNIT}|\s+)")


class Reader:
    """Runs the blocks of a page. A context manager, which ends what was started.

    A command that starts a server goes on in the background once it is ready, until the next of its kind
    or the end of the page. The directory has the files of the repository, `.venv` and `.cache`.

    On a page that works in `.venv` each terminal has the system's commands alone, until the page activates
    `.venv` in it. On any other page an environment with `lmcache` is active, which the reader installed.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._activation = ""
        """Precedes the commands of the terminal that is in use."""
        is_bare = any(".venv/" in block.text for block in blocks)
        path = BARE_PATH if is_bare else f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.directory = Path(tempfile.mkdtemp(prefix="lmcache-page-", dir="/tmp"))
        runtime_dir = self.directory / "run"
        runtime_dir.mkdir(mode=0o700)
        ports = {"8080": free_port(), "8000": free_port(), "5556": free_port()}
        self._ports = {SERVER: ports["8080"], VLLM: ports["8000"]}
        self.substitutes = {
            # What the page says, as a pattern, and what is done instead.
            r"--l1-size-gb 100": "--l1-size-gb 1",
            # What the machine of the tests lacks is no mistake of the page.
            r"^lmcache doctor$": "lmcache doctor || test $? = 1",
            r"/dev/shm/lmcache.l1": str(self.directory / "lmcache.l1"),
            r"/(nvme/lmcache|tmp/lmcache-tier)\b": str(self.directory / "tier"),
            r"(\.api_server) ": rf"\1 --port {ports['8000']} ",
            **{rf"(?<=[: ]){said}\b": str(port) for said, port in ports.items()},
        }
        self._environment = environment(
            {
                "PATH": path,
                "PYTHONPATH": f"{ROOT}:{ROOT}/kernels",
                # No page for users asks for a C++ compiler.
                "CXX": "/bin/false",
                "TORCHINDUCTOR_CACHE_DIR": str(runtime_dir / "compiled"),
                "LMCACHE_RUNTIME_DIR": str(runtime_dir),
                "LMCACHE_HTTP_PORT": str(ports["8080"]),
                "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_CACHE_ROOT": str(CACHE / "vllm"),
                "VLLM_CPU_CI_ENV": "1",
                "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            }
        )
        self._running: dict[re.Pattern[str], ChildProcess] = {}

    def __enter__(self) -> Self:
        for path in ROOT.iterdir():
            if path.name not in (".git", ".venv", ".cache", "build") and not path.name.endswith(".egg-info"):
                (self.directory / path.name).symlink_to(path)
        (self.directory / ".venv").symlink_to(sys.prefix)
        (self.directory / ".cache").symlink_to(CACHE)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._running.values():
            process.__exit__(kind, error, trace)
        shutil.rmtree(self.directory, ignore_errors=True)

    def follow(self, block: Block) -> str | None:
        """Do what the block says; returns what is then on the screen, None where nothing was done: a target
        of make takes its time, and has tests of its own. Raises AssertionError, and RuntimeError where a
        server does not start."""
        if block.opens_terminal:
            self._activation = ""
        commands = [command for command in block.commands() if not command.startswith("make ")]
        return "".join([self._do(command, block.where) for command in commands]) if commands else None

    def _do(self, command: str, where: str) -> str:
        command = re.sub(r"^pip install", "pip install --dry-run --no-deps --no-build-isolation", command)
        for said, done in self.substitutes.items():
            command = re.sub(said, done, command)
        for kind, port in self._ports.items():
            if kind.match(command):
                return self._start(kind, command, port, where)
        if command == ACTIVATION:
            self._activation = f"{command}\n"
        result = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", f"{self._activation}{command}"],
            cwd=self.directory,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        assert result.returncode == 0, f"{where}: {command}: exit code {result.returncode}\n{result.stdout}"
        assert "does not provide the extra" not in result.stdout, f"{where}: {command}\n{result.stdout}"
        return result.stdout

    def _start(self, kind: re.Pattern[str], command: str, port: int, where: str) -> str:
        if kind in self._running:
            # As Ctrl-C does.
            assert self._running.pop(kind).stop(STOP_TIMEOUT_S, signal.SIGINT) == 0, "it did not end in order"
        # `exec` comes behind the variables that the page sets for the command.
        command = re.sub(r"^((?:\S+=\S+ )*)", r"\1exec ", command)
        shell = ["/usr/bin/env", "bash", "-c", f"{self._activation}{command}"]
        name = f"{where}: {command}"
        process = ChildProcess(name, shell, self._environment, new_log("page"), cwd=self.directory)
        self._running[kind] = process
        url = f"http://127.0.0.1:{port}/{'readyz' if kind is SERVER else 'health'}"
        # The server answers a moment before its log says so.
        said = "ready: " if kind is SERVER else ""
        process.wait_until_ready(
            lambda: answers(url) and said in process.log.read_text(errors="replace"),
            START_TIMEOUT_S,
            interval_s=0.05,
        )
        return process.log.read_text(errors="replace")


def differences(said: str, shown: str) -> list[str]:
    """The lines of a page's block of output that are not on the screen.

    `…` stands for anything, a path and a number of eight hexadecimal digits or more for any other, a figure
    with its unit for any other: one that is not zero for one that is not.
    """
    return [line for line in said.splitlines() if not all(map(shown_in(shown), line.split("…")))]


def shown_in(shown: str) -> Callable[[str], bool]:
    return lambda fragment: bool(re.search(_pattern(fragment.strip()), shown))


def _pattern(fragment: str) -> str:
    parts = []
    for part in VARIABLE.split(fragment):
        if "/" in part:
            parts.append(r"\S+")
        elif re.fullmatch(r"[0-9a-f]{8,}", part):
            parts.append(r"[0-9a-f]+")
        elif part[:1].isdigit():
            parts.append(rf"{FIGURE}*[1-9]{FIGURE}*" if re.search("[1-9]", part) else rf"{FIGURE}+")
            parts.append(r" \w+" if " " in part else "")
        else:
            parts.append(r"\s+" if part.isspace() else re.escape(part))
    return "".join(parts)
