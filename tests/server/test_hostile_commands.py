"""Every command against a server that lies: one clear sentence and an exit code, never a traceback."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.cli import clean_environment, in_process, lmcache
from harness.hostile import LIES, HostileServer, Lie, says
from test_cli import REPORT

from lmcache_client.contract.control import Inspect, Status, StatusReport
from lmcache_client.contract.messages import (
    Clear,
    Hello,
    Message,
    Ping,
    Refused,
    Store,
    Unpin,
)

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


@pytest.fixture
def error_of(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The one line on stderr with which a command in this process fails."""

    def fails(*command: str, timeout_s: str = "0.3") -> str:
        code, output, errors = in_process(capsys, *command, "--port", PORT, "--timeout-s", timeout_s)
        assert (code, output, errors.count("\n")) == (1, "", 1), (command, output, errors)
        assert errors.startswith("lmcache: ")
        assert errors[:-1].isprintable()
        return str(errors[:-1])

    return fails


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_one_sentence_about_a_server_that_lies(
    error_of: Callable[..., str],
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
        is_answer = what in ("Registered", "garbage", "another version")
        said = error_of(*command, timeout_s="30" if is_answer else "0.3")
        if is_answer:
            assert "is not a compatible lmcache server" in said, what


def test_ping_measures_one_request_on_an_open_connection(
    capsys: pytest.CaptureFixture[str], hostile: HostileServer
) -> None:
    """Connecting takes two seconds here, because the first reply does."""

    def slow_at_first(number: int, message: Message) -> None:
        time.sleep(2.0 if sum(hostile.asked.values()) == 1 else 0.0)

    hostile.script = slow_at_first
    code, output, _ = in_process(capsys, "ping", "--port", PORT, "--timeout-s", "30")
    assert code == 0
    assert float(output.partition("after ")[2].partition(" ms")[0]) < 1500


def without(path: str) -> Any:
    report: Any = json.loads(json.dumps(REPORT))
    *way, last = path.split(".")
    part = report
    for step in way:
        part = part[int(step) if isinstance(part, list) else step]
    del part[last]
    return report


FIELDS = (
    "version", "l1.total_bytes", "config.chunk_size", "explained", "pins", "namespaces.0.groups.0.kind",
    "namespaces.0.missed.evicted", "sessions.0.not_cached", "tiers.0.written_objects.dropped",
)  # fmt: skip
BAD_VALUES: tuple[dict[str, Any], ...] = (
    {"uptime_s": "x"}, {"uptime_s": float("inf")}, {"uptime_s": 10**400}, {"pid": 1.5}, {"sessions": {}},
    {"hit_rate": float("nan")}, {"hit_rate": 10.0**18}, {"l1": {**REPORT["l1"], "total_bytes": -1}},
    {"config": {**REPORT["config"], "l1_path": 5}}, {"config": {**REPORT["config"], "tier": 5}},
)  # fmt: skip
READING = (["status"], ["status", "--json"], ["plan"], ["bench", "--requests", "1"])
UNREADABLE = "sent a status that this version cannot read: install the same version of lmcache-mp"
NAME = "m\x1b[2J\x1b]0;owned\x07\nlmcache server 9.9.9"


def report_of(report: Any) -> Lie:
    text = report if isinstance(report, str) else json.dumps(report)
    return says(StatusReport(tuple(text[i : i + 4096] for i in range(0, len(text), 4096))))


def test_a_status_that_cannot_be_read_is_one_sentence(
    capsys: pytest.CaptureFixture[str], error_of: Callable[..., str], hostile: HostileServer
) -> None:
    texts = ("", "{", "[]", "{}", "null", "[" * 60_000, "9" * 5000)
    for report in (*texts, *map(without, FIELDS), *({**REPORT, **each} for each in BAD_VALUES)):
        hostile.lies = {Status: report_of(report)}
        for command in READING:
            assert UNREADABLE in error_of(*command, timeout_s="30"), report
    code, output, errors = in_process(capsys, "doctor", "--port", PORT)
    assert (code, errors) == (1, "")
    assert re.search(f"^fail  server: .* {UNREADABLE}", output, re.MULTILINE)


def test_names_that_clients_chose_move_no_cursor_and_begin_no_line(
    capsys: pytest.CaptureFixture[str], error_of: Callable[..., str], hostile: HostileServer
) -> None:
    report: Any = json.loads(json.dumps(REPORT))
    report["namespaces"][0]["model"] = report["sessions"][0]["engine_id"] = NAME
    report["explained"][0] |= {"engine": NAME, "fields": {NAME: NAME}}
    report["pins"][0]["name"] = report["version"] = report["sessions"][0]["not_cached"] = NAME
    hostile.lies = {Status: report_of(report)}
    for command in (["status"], ["status", "--json"], ["status", "--explain"], ["doctor"]):
        _, output, errors = in_process(capsys, *command, "--port", PORT)
        assert output.count("owned") >= 2
        assert all(line.isprintable() for line in output.split("\n")), output
        assert not any(line.startswith("lmcache server 9.9.9") for line in output.split("\n"))
        assert not errors
    hostile.script = says(Refused("x", NAME))
    for command in (["ping"], ["clear"], ["unpin", "mine"], *READING):
        assert (
            error_of(*command, timeout_s="30")
            == "lmcache: m\\x1b[2J\\x1b]0;owned\\x07\\nlmcache server 9.9.9"
        )


def test_the_bench_ends_with_a_sentence(hostile: HostileServer) -> None:
    hostile.lies = {Store: LIES["garbage"]}
    settings = ("--requests", "1", "--page-kb", "1", "--only", "store")
    code, output, errors = lmcache("bench", "--port", PORT, *settings)
    said = [line for line in errors.splitlines() if not line.startswith("storing ")]
    assert (code, output, len(said)) == (1, "", 1), (output, errors)
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
