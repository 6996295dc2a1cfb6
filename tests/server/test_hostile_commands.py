"""Every command against a server that lies: one clear sentence and an exit code, never a traceback."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.hostile import LIES, HostileServer
from test_cli import REPORT, clean_environment, in_process, lmcache

from lmcache_client import channel
from lmcache_client.contract.control import Inspect
from lmcache_client.contract.messages import (
    Clear,
    Goodbye,
    Hello,
    Join,
    Load,
    Lookup,
    Message,
    Ping,
    Prove,
    Register,
    Release,
    Status,
    Store,
    Unpin,
)
from lmcache_server.commands.bench import client as bench_client
from lmcache_server.commands.bench import crew, run
from lmcache_server.commands.bench.workload import BenchError

__all__ = ["clean_environment"]
PORT = "5902"
TRUE_ENOUGH = {"twice", "two parts", "another boot id"}
"""With these replies a command has what it asked for."""
COMMANDS: dict[str, tuple[list[str], type[Message], set[str]]] = {
    "ping": (["ping"], Ping, {"Done"}),
    "status": (["status"], Status, set()),
    "status --json": (["status", "--json"], Status, set()),
    "plan": (["plan"], Status, set()),
    "clear": (["clear"], Clear, {"Cleared"}),
    "clear, greeting": (["clear"], Hello, {"Welcome", "a process that is not there"}),
    "unpin": (["unpin", "--all"], Unpin, {"Unpinned"}),
    "inspect": (["inspect", "IDS"], Inspect, set()),
    "bench": (["bench", "--requests", "1"], Status, set()),
}
"""What is called, the question that is answered with a lie, and the lies that answer it."""


@pytest.fixture
def hostile() -> Iterator[HostileServer]:
    directory = Path(os.environ["LMCACHE_RUNTIME_DIR"])
    with HostileServer(directory, int(PORT), chunk_size=64, report=json.dumps(REPORT)) as server:
        yield server


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_one_sentence_about_a_server_that_lies(
    capsys: pytest.CaptureFixture[str],
    hostile: HostileServer,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command, kind, right = COMMANDS[name]
    (tmp_path / "IDS").write_text(str([1] * 5))
    monkeypatch.chdir(tmp_path)
    for what in LIES.keys() - TRUE_ENOUGH - right:
        hostile.lies = {kind: LIES[what]}
        code, output, errors = in_process(capsys, *command, "--port", PORT, "--timeout-s", "0.3")
        assert (code, output, errors.count("\n")) == (1, "", 1), (what, output, errors)
        assert errors.startswith("lmcache: "), what
        assert errors[:-1].isprintable(), what


@pytest.mark.parametrize("what", ["Stored", "StatusReport", "garbage", "nested", "silence", "refused as ''"])
def test_doctor_counts_a_server_that_lies_as_a_failure(
    capsys: pytest.CaptureFixture[str], hostile: HostileServer, what: str
) -> None:
    hostile.lies = {Status: LIES[what]}
    code, output, errors = in_process(capsys, "doctor", "--port", PORT)
    assert not errors
    said = next(line for line in output.splitlines() if "server: " in line)
    assert said.startswith("warn" if what == "silence" else "fail"), output
    assert code == 1 or what == "silence"


KINDS = (Hello, Register, Prove, Join, Store, Lookup, Load, Release, Goodbye)
BENCH_LIES = (
    "Done", "Found", "Hello", "garbage", "another boot id", "found 9223372036854775807 of lease 0",
    "refused as 'internal'", "refused as 'not_registered'",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_client_of_the_bench_ends_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, hostile: HostileServer, kind: type[Message]
) -> None:
    """In this process, where each lie takes a moment."""
    for name, value in (("ANSWER_S", 0.2), ("REGISTER_S", 0.2), ("CONNECT_S", 5.0)):
        monkeypatch.setattr(bench_client, name, value)
    for name, value in (("GREET_TIMEOUT_S", 0.2), ("KEEPER_INTERVAL_S", 0.01)):
        monkeypatch.setattr(channel, name, value)
    monkeypatch.setattr("lmcache_client.engine.REGISTER_S", 0.2)
    monkeypatch.setattr(crew, "_start", threading.Barrier(1), raising=False)
    sizes = {"page_kb": 1, "layers": 1, "groups": "hybrid", "chunks": 1, "requests": 1, "seconds": None}
    settings = {"workers": 1, "clients": 1, "only": "lookup,store,load", **sizes}
    crews = run.crews("lmcache bench test", 64, {}, **settings)
    for what in BENCH_LIES:
        hostile.lies = {kind: LIES[what]}
        for each in crews:
            with contextlib.suppress(BenchError):
                crew._client(hostile.address, each, 0)


@pytest.mark.parametrize("what", ["Done", "garbage", "refused as 'internal'"])
def test_the_bench_ends_with_a_sentence(hostile: HostileServer, what: str) -> None:
    hostile.lies = {Store: LIES[what]}
    settings = ("--requests", "1", "--page-kb", "1", "--only", "store")
    code, output, errors = lmcache("bench", "--port", PORT, *settings)
    said = [line for line in errors.splitlines() if not line.startswith("storing ")]
    assert (code, output, len(said)) == (1, "", 1), (what, output, errors)
    assert said[0].startswith("lmcache: ")


def test_an_output_that_cannot_be_written_is_one_sentence() -> None:
    for command in (["--version"], ["doctor"], ["status", "--help"]):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [sys.executable, "-m", "lmcache_server", *command],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
        assert done.returncode == 1
        assert done.stderr == "lmcache: cannot write the output: No space left on device\n"
