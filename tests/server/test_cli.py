"""The command line: help, one sentence for every error, and a real server asked by the other commands."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from harness.cli import LMCACHE, clean_environment, in_process, lmcache, sentence
from harness.processes import rss_bytes
from harness.waiting import PATIENCE_S

from lmcache_server import app
from lmcache_server.commands import ends, nearby
from lmcache_server.commands.status import explanation, summary
from lmcache_server.config import FLAGS, Config, flag_name, variable_name
from lmcache_server.errors import StartError

SERVER = ["server", "--l1-size-gb", "0.016"]
PORT = "5901"

__all__ = ["clean_environment"]


def refused_start(*arguments, exit_code=2):
    """The one line of stderr with which a server that finds its options right does not start."""
    code, _, errors = lmcache(*SERVER, *arguments)
    lines = [line for line in errors.splitlines() if not re.search(' INFO | WARNING |"info"', line)]
    assert (code, len(lines)) == (exit_code, 1), errors
    return lines[0]


@contextlib.contextmanager
def running(*arguments):
    """(process, lines logged until it was ready, base URL) of a server with 16 MB."""
    command = [*LMCACHE, *SERVER, "--http-port", "0", "--port", PORT, *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        lines = []
        while not lines or " ready: " not in lines[-1]:
            line = process.stderr.readline()
            assert line, "".join(lines)
            lines.append(line)
        yield process, lines, re.search(r"http://\S+", lines[-1]).group()
    finally:
        process.kill()
        process.communicate()


# -- help -----------------------------------------------------------------------------------------------


def test_the_help_names_every_option_with_its_default_and_its_variable(capsys):
    code, text, _ = in_process(capsys, "server", "--help")
    words = " ".join(text.split())
    assert code == 0
    shown = {"host": "(a Unix socket)", "chunk_size": "(auto)", "l1_path": "(none)", "tier": "(none)"}
    assert "--config" in text
    for name, field in FLAGS.items():
        default = f"no-{flag_name(name)[2:]}" if field.default is False else shown.get(name, field.default)
        assert flag_name(name) in text
        # Long words are broken at their hyphens.
        (values,) = re.findall(rf"\[env var: {variable_name(name)}\b(.*?)\]", words)
        assert f"default: {default}" in values.replace("- ", "-")
    assert "1 GB = 2**30 bytes" in words
    assert "without password or encryption" in words


def test_the_command_itself_and_the_other_commands_have_help(capsys):
    """And find the server by the same options."""
    code, _, errors = in_process(capsys)
    assert code == 2
    assert {"server", "status"} <= set(errors.split()), "no command shows the help"
    assert "..." not in in_process(capsys, "--help")[1].partition("Commands:")[2], "no line is cut"
    assert in_process(capsys, "--version")[:2] == (0, f"lmcache, version {app.VERSION}\n")
    for command in ("status", "clear", "ping", "unpin", "inspect", "bench"):
        code, text, _ = in_process(capsys, command, "--help")
        assert code == 0
        for word in ("--host", "--port", "--config", "--timeout-s", "LMCACHE_PORT"):
            assert word in text, command
        assert "The TCP address of the server." in " ".join(text.split()), command


def test_help_imports_nothing_heavy_and_the_server_neither_torch_nor_vllm():
    program = (
        "import sys\n"
        "import lmcache_server.commands.cli\n"
        "print(sorted({'zmq', 'numpy', 'prometheus_client', 'asyncio'} & set(sys.modules)))\n"
        "import lmcache_server.app\n"
        "print(sorted({'torch', 'vllm'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n[]\n"


# -- errors ---------------------------------------------------------------------------------------------


UNNAMED = ((), ("mine", "--all"), ("",))
BAD_NAMES = ("", "x" * 65, "a\nb", "a\udcff")
EMPTY = (("model", ""), ("namespace", ""), ("namespace", " "), ("salt", ""))
BAD_NAME = "a name has 1 to 64 printable characters"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("server", "--port", "x"), "lmcache: --port must be an integer from 1 to 65535, not 'x'"),
        (("server", "--host", "0.0.0.0"), "lmcache: --host 0.0.0.0 lets other machines connect"),
        (("server", "--no-such-flag"), "lmcache: No such option"),
        (("server", "--port"), "lmcache: Option '--port' requires an argument"),
        (("server", "surplus"), "lmcache: Got unexpected extra argument"),
        (("serve",), "lmcache: No such command 'serve'"),
        (("ping", "kvcache", "--url", "http://x"), "lmcache: LMCache's command 'ping kvcache' is 'lmcache"),
        (("coordinator", "list"), "lmcache: lmcache-mp has nothing like LMCache's command 'coordinator'"),
        (("ping", "--timeout-s", "0"), "lmcache: Invalid value for '--timeout-s'"),
        (("server", "--http-host", "\udcff"), "lmcache: --http-host must be text that can be printed"),
        (("ping", "--host", "\udcff"), "lmcache: --host must be text that can be printed, not"),
        (("ping", "--config", "/dev/zero"), "lmcache: the configuration file /dev/zero has more than"),
        (("ping", "--port", "0"), "lmcache: --port must be an integer from 1 to 65535, not '0'"),
        *((("unpin", *wrong), "pass a name or --all: 'lmcache status' lists") for wrong in UNNAMED),
        *((("pin", "http://127.0.0.1:9", "/dev/null", "--name", name), BAD_NAME) for name in BAD_NAMES),
        (("unpin", "x" * 65), BAD_NAME),
        *((("clear", f"--{only}", value), f"--{only} is empty") for only, value in EMPTY),
        (("ping", "--timeout-s", "nan"), "nan is not a number of seconds"),
        (("bench", "--seconds", "inf"), "inf is not a number of seconds"),
        (("verify", "http://x", "--timeout-s", "inf"), "inf is not a number of seconds"),
        (("verify", "http://x", "--prompts", "/dev/null", "--tokens", "9"), "--tokens is for the built-in"),
        (("status", "--json", "--namespace", "12"), "--json prints the whole report"),
        (("inspect", "/proc/version"), "line 1 is text: pass --url, so that vLLM makes token ids of it"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(capsys, arguments, expected):
    assert expected in sentence(capsys, 2, *arguments)


def test_lmcache_in_the_same_environment_is_told(capsys, monkeypatch, tmp_path):
    (tmp_path / "lmcache").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert in_process(capsys, "--version")[2] == ""
    (tmp_path / "lmcache" / "__init__.py").touch()
    assert in_process(capsys, "--version")[2] == f"lmcache: {ends.BESIDE_LMCACHE}\n"


def test_all_wrong_flags_of_lmcache_are_named_at_once(capsys):
    wrong = ("--enable-tracing", "--l1-size-gb", "5", "--max-workers", "8", "--l1-use-lazy", "--lease\nx=3")
    code, output, errors = in_process(capsys, "server", *wrong, "--port", "5556")
    assert (code, output) == (2, "")
    *lines, last = errors.splitlines()
    for line, flag in zip(lines, ("--enable-tracing", "--max-workers", "--l1-use-lazy"), strict=False):
        assert line.startswith("lmcache: ")
        assert flag in line
    assert lines[3:] == ["lmcache: there is no flag --lease\\nx"]
    assert last == "lmcache: without them: lmcache server --l1-size-gb 5 --port 5556"


@pytest.mark.parametrize("flags", [("--log-format=json",), ("--log-format", "JSON"), ()])
def test_wrong_usage_of_a_server_that_logs_json_is_a_json_object(capsys, monkeypatch, flags):
    monkeypatch.setenv("LMCACHE_LOG_FORMAT", "text" if flags else "json")
    for wrong in ("--port=x", "--host=0.0.0.0", "--no-such-flag", "--max-workers=4"):
        line = json.loads(in_process(capsys, "server", wrong, *flags)[2])
        assert line["level"] == "critical"
        assert wrong.partition("=")[0] in line["message"]
    if not flags:
        monkeypatch.setenv("LMCACHE_PORT", "x")
        assert json.loads(in_process(capsys, "server")[2])["level"] == "critical"


def test_flags_reach_the_server_and_its_exit_code_or_its_one_sentence_comes_back(capsys, monkeypatch):
    seen = []

    def run(config):
        seen.append(config)
        if len(seen) > 1:
            raise StartError("the moon is full: wait")
        return 7

    monkeypatch.setattr(app, "run", run)
    monkeypatch.setenv("LMCACHE_LEASE_S", "30")
    code, _, _ = in_process(capsys, "server", "--chunk-size", "544", "--l1-size-gb", "100", "--l1-hugetlb")
    assert (code, seen) == (7, [Config(chunk_size=544, l1_size_gb=100.0, l1_hugetlb=True, lease_s=30.0)])
    assert in_process(capsys, "server") == (2, "", "lmcache: the moon is full: wait\n")


def test_more_memory_than_the_machine_has(monkeypatch):
    """Its exit code lets a supervisor try again: the memory may be another process's, which ends."""
    assert refused_start("--l1-size-gb", "90000", "--http-port", "0", exit_code=1)
    monkeypatch.setenv("LMCACHE_LOG_FORMAT", "json")
    line = json.loads(refused_start("--l1-size-gb", "90000", "--http-port", "0", exit_code=1))
    assert line["level"] == "critical"
    said = line["message"]
    assert re.fullmatch(r"--l1-size-gb asks for 90000\.00 GB, but [\d.]+ GB are available .*", said)


def test_an_address_that_this_machine_does_not_have_yet():
    absent = "192.0.2.1"  # of documentation (RFC 5737)
    for flags in (("--host", absent, "--http-port", "0"), ("--http-host", absent)):
        line = refused_start("--allow-remote", *flags, exit_code=1)
        assert "cannot assign requested address" in line
        assert "choose another --h" in line


HOSTS = ((), ("--host", "127.0.0.1"))


def test_no_server(capsys):
    for host in HOSTS:
        for command in ("ping", "status", "clear", "bench"):
            line = sentence(capsys, 1, command, "--port", "5903", "--timeout-s", "0.2", *host)
            start = (
                f"start one with 'lmcache server{' --host 127.0.0.1' if host else ''} --port 5903', or pass"
            )
            assert re.match(rf"lmcache: no lmcache server answers at \S+5903\S*: {start} the --host", line)
    line = sentence(capsys, 1, "status", "--host", "no-such-host.invalid")
    assert line.startswith("lmcache: cannot find the address of --host no-such-host.invalid (")


def test_a_host_that_no_address_can_have(capsys):
    for host in ("a\udcff", "a b", "x" * 300, "%", "\n"):
        for command in ("ping", "status", "clear", "bench"):
            code, output, errors = in_process(capsys, command, "--host", host, "--timeout-s", "0.1")
            assert (output, errors.count("\n")) == ("", 1)
            assert code in (1, 2)
            said = (
                ["--host"]
                if code == 2
                else ["pass another --host", "no lmcache server answers", "is no host: "]
            )
            assert any(each in errors for each in said), (host, command, errors)


def test_a_socket_directory_that_others_may_enter_or_nobody_can_look_at(capsys, monkeypatch):
    directory = Path(os.environ["LMCACHE_RUNTIME_DIR"])
    directory.chmod(0o755)
    said = (
        f"may enter {directory}: set LMCACHE_RUNTIME_DIR to one that is closed to others, such as a new "
        f"{directory}"
    )
    assert said in sentence(capsys, 1, "ping")
    assert said in refused_start("--http-port", "0")
    (directory / "5555.sock").touch()
    for line in (sentence(capsys, 1, "ping"), refused_start("--http-port", "0")):
        assert f"may enter {directory}: run 'chmod 700 {directory}', or set" in line
    monkeypatch.setenv("LMCACHE_RUNTIME_DIR", "/dev/null/below")
    assert sentence(capsys, 1, "ping") == (
        "lmcache: cannot use /dev/null/below for the socket (Not a directory): set LMCACHE_RUNTIME_DIR to "
        "the server's directory"
    )


def test_what_a_server_says_of_a_place_where_it_cannot_listen(capsys, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "full" / f"{PORT}.sock").mkdir(parents=True)
    (tmp_path / "full").chmod(0o700)
    another = "set LMCACHE_RUNTIME_DIR to another directory of this user"
    for directory, said in {
        "none/below": f"/none/below: No such file or directory): mkdir -m 700 -p {tmp_path}/none/below, or",
        "file": f"({tmp_path}/file: File exists):",
        "full": f"({tmp_path}/full/{PORT}.sock: Is a directory):",
    }.items():
        monkeypatch.setenv("LMCACHE_RUNTIME_DIR", str(tmp_path / directory))
        line = refused_start("--http-port", "0", "--port", PORT)
        assert line.startswith(f"lmcache: cannot use {tmp_path}/{directory} for the socket (")
        assert line.endswith(f"{said} {another}")
    monkeypatch.setenv("LMCACHE_RUNTIME_DIR", "below")
    start = refused_start("--http-port", "0", "--port", PORT)
    for line, port in ((start, PORT), (sentence(capsys, 1, "ping"), 5555)):
        assert line.startswith(f"lmcache: below/{port}.sock does not begin with /: set LMCACHE_RUNTIME_DIR")


def test_a_mistyped_variable_is_named_where_no_server_answers(capsys, monkeypatch):
    monkeypatch.setenv("LMCACHE_PROT", "5560")
    said = "the environment variable LMCACHE_PROT sets nothing: did you mean LMCACHE_PORT?; start one with"
    assert said in sentence(capsys, 1, "ping", "--port", PORT)


def test_of_a_server_elsewhere_nothing_is_suggested_that_changes_it(monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    for sudo, prefix in (("/usr/bin/sudo", "run 'sudo -u root env "), (None, "as root, run '")):
        monkeypatch.setattr(shutil, "which", {"sudo": sudo}.get)
        for words, kept in (
            ("clear --tiers", "status"),
            ("pin a", "status"),
            ("status --json", "status --json"),
        ):
            monkeypatch.setattr(sys, "argv", ["lmcache", *words.split(), "--port", "7", "--host=x"])
            command = (
                f"LMCACHE_RUNTIME_DIR=/run/lmcache {sys.executable} -I -m lmcache_server {kept} --port 7'"
            )
            assert nearby.again(Path("/run/lmcache"), 0, 7) == prefix + command
    monkeypatch.setattr(sys, "argv", ["lmcache", "clear", "--tiers"])
    for owner_id in (0, 12345):
        monkeypatch.setattr(os, "getuid", lambda: 12345 - owner_id)  # noqa: B023
        own = nearby.again(Path("/run/lmcache"), 12345 - owner_id, 5555)
        assert own == "run 'LMCACHE_RUNTIME_DIR=/run/lmcache lmcache status'"


def test_what_a_page_says_of_its_address_is_never_a_risk(monkeypatch):
    monkeypatch.setattr(nearby, "_directories", lambda: ())
    monkeypatch.setattr(sys, "argv", ["lmcache", "doctor", "--port=7", "--tier", "dir:///a?size_gb=1"])
    good = {"host": "10.0.0.9", "port": 7, "key_file": "/a/key"}
    for changed, command in (
        ({}, "--port 7 --host 10.0.0.9 --key-file /a/key"),
        ({"host": "::1", "key_file": "", "port": 5555}, "--host ::1"),
        ({"host": "[::1]", "key_file": ""}, "--port 7 --host '[::1]'"),
        ({"host": ""}, ""), ({"host": 7}, ""), ({"host": None}, ""), ({"host": "$(reboot)"}, ""),
        ({"host": "'"}, ""), ({"host": "a b"}, ""), ({"host": "a\nb"}, ""), ({"host": "\x1b[2J"}, ""),
        ({"host": "\u0430"}, ""), ({"host": "x" * 256}, ""), ({"port": "7"}, ""), ({"port": -7}, ""),
        ({"key_file": "/a;reboot"}, ""), ({"key_file": "/`reboot`"}, ""), ({"key_file": "k" * 1001}, ""),
    ):  # fmt: skip
        page = json.dumps({"config": {**good, **changed}}).encode()
        monkeypatch.setattr(nearby, "page", lambda *_: page)  # noqa: B023
        said = nearby.instead("ipc:///none/7.sock")
        start = "one is shown at http://127.0.0.1:8080: "
        run = f"run \"lmcache doctor --tier 'dir:///a?size_gb=1' {command}\""
        assert said == start + (run if command else f"{nearby.LOGGED}"), changed
    for page in (b"", b"{", b"[" * 100_000, b'{"config": 7}', b"\xff", b"{}"):
        monkeypatch.setattr(nearby, "page", lambda *_: page)  # noqa: B023
        assert nearby.instead("ipc:///none/7.sock").endswith(nearby.LOGGED)


# -- a real server --------------------------------------------------------------------------------------


def test_a_server_that_runs_but_does_not_answer(capsys):
    with running() as (process, _, url):
        port = url.rpartition(":")[2]
        line = refused_start("--http-port", port, "--port", "5902")
        fix = "another lmcache server uses this port: choose another --http-port (0 takes a free one)"
        assert line.endswith(fix)
        process.send_signal(signal.SIGSTOP)
        for command in ("ping", "status", "clear"):
            line = sentence(capsys, 1, command, "--port", PORT, "--timeout-s", "0.2")
            assert f"{PORT}.sock, process {process.pid}, does not answer in time: see its log and" in line


def test_the_command_that_reaches_a_server_at_a_tcp_address_is_printed_and_works(
    capsys, monkeypatch, tmp_path
):
    key = str(tmp_path / "key")
    assert in_process(capsys, "key", key)[0] == 0
    for more in ((), ("--key-file", key)):
        with running("--host", "127.0.0.1", *more) as (_, _, url):
            monkeypatch.setattr(FLAGS["http_port"], "default", int(url.rpartition(":")[2]))
            monkeypatch.setattr(sys, "argv", ["lmcache", "ping", "--port", "5903", "--key-file=none"])
            line = sentence(capsys, 1, "ping", "--port", "5903")
            _, _, command = line.partition(f"5903.sock: one is shown at {url}: run '")
            assert command == " ".join(["lmcache ping --port", PORT, "--host 127.0.0.1", *more]) + "'"
            code, output, _ = in_process(capsys, *command[:-1].split()[1:])
            assert (code, output[:18]) == (0, "the server answers")
            code, output, errors = in_process(capsys, "ping", "--host", "127.0.0.1", "--port", "5903")
            assert f"run '{command}" in errors


@pytest.mark.parametrize(("host", "number"), [*zip(HOSTS, (signal.SIGTERM, signal.SIGINT), strict=True)])
def test_the_commands_ask_a_running_server(capsys, monkeypatch, tmp_path, host, number):
    monkeypatch.setenv("LMCACHE_L1_SIZE_G", "1")
    with running(*host) as (process, lines, url):
        assert sum("configuration: " in line for line in lines) == 1
        (warning,) = [line for line in lines if " WARNING " in line]
        assert "LMCACHE_L1_SIZE_G sets nothing: did you mean LMCACHE_L1_SIZE_GB?" in warning
        assert rss_bytes(process.pid) < (17 + 60) * (1 << 20), "the server is small"

        monkeypatch.setenv("LMCACHE_PORT", PORT)  # by which the commands find it
        code, output, _ = in_process(capsys, "ping", *host)
        assert code == 0
        assert output.startswith("the server answers")
        code, output, _ = in_process(capsys, "status", *host)
        assert code == 0
        assert f"pid {process.pid}" in output
        report = json.loads(in_process(capsys, "status", "--json", *host)[1])
        assert report["pid"] == process.pid
        assert report["l1"]["free_bytes"] == report["l1"]["total_bytes"] > 0
        assert in_process(capsys, "clear", *host)[:2] == (0, "forgot 0 chunks\n")
        assert in_process(capsys, "clear", "--tiers", *host)[:2] == (0, "forgot 0 chunks\n")
        cleared = json.loads(in_process(capsys, "clear", "--json", *host)[1])
        assert cleared == {"chunks": 0, "tiers_kept": [], "tiers_cleared": [], "tiers_failed": []}
        assert in_process(capsys, "unpin", "--all", *host)[:2] == (0, "unpinned 0 chunks\n")

        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text("[1, 2, 3]")
        no_engine = "lmcache: no engine is connected: `lmcache status` lists models"
        no_namespace = "lmcache: no namespace has this name: `lmcache status` lists"
        inspect = ("inspect", str(prompts))
        http = url.rpartition(":")[2]
        for code, said, *command in (
            (1, "lmcache: nothing is pinned as 'mine': 'lmcache status' lists", "unpin", "mine"),
            (1, no_engine, *inspect),
            (1, no_engine, *inspect, "--salt-file", str(prompts)),
            (1, "lmcache: /dev/null is empty: write the cache_salt", *inspect, "--salt-file", "/dev/null"),
            (1, no_namespace, "clear", "--model", "a\udcff"),
            (1, no_namespace, "clear", "--namespace", "a\udcff"),
            (2, "lmcache: --salt needs 8 or more hexadecimal digits", "clear", "--salt", "0b5d5f2"),
            (2, "lmcache: --salt needs 8 or more hexadecimal digits", "clear", "--salt", "my tenant"),
        ):
            assert sentence(capsys, code, *command, *host).startswith(said), command
        line = refused_start("--http-port", "0", "--port", PORT, *host)
        assert (
            line.endswith("uses it: choose another --port") if host else "; choose another --port, or" in line
        )
        line = refused_start("--http-port", http, "--port", "5902")
        assert f"127.0.0.1:{http}" in line
        assert "--http-port" in line
        assert not list(Path(os.environ["LMCACHE_RUNTIME_DIR"]).glob("5902.sock"))

        with urllib.request.urlopen(f"{url}/status", timeout=PATIENCE_S) as answer:
            assert json.load(answer)["boot_id"] == report["boot_id"]
        for page in ("healthz", "readyz", "healthcheck", "metrics"):
            with urllib.request.urlopen(f"{url}/{page}", timeout=PATIENCE_S) as answer:
                assert answer.status == 200
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == 0
    assert not list(Path(os.environ["LMCACHE_RUNTIME_DIR"]).glob("*.sock"))


def test_a_signal_while_memory_is_populated_ends_the_server():
    with running("--l1-size-gb", "2") as (process, _, _):
        process.terminate()
        assert process.wait(PATIENCE_S) == 0


# -- what the status says --------------------------------------------------------------------------------

GROUP = {"kind": "sliding_window", "block_size": 16, "window": 512, "layers": 3, "block_bytes": 1536}
SIZES = ("0.25", "0.5", "1", "2", "4", "10", "unlimited")
WINDOW = {"tokens": 40, "hit_rates": dict.fromkeys(SIZES, 0.75), "namespaces": {}}
REPORT = {
    "version": "1.2.3", "boot_id": "ab", "pid": 42, "uptime_s": 3725.0,
    "config": {"chunk_size": None, "l1_size_gb": 4.0, "l1_path": "", "l1_hugetlb": False, "tier": []},
    "l1": {
        "total_bytes": 4 << 30, "free_bytes": 3 << 30, "ready_bytes": 1 << 30, "reserved_bytes": 0,
        "stored_bytes": 1 << 30, "populated_bytes": 0, "chunks": 5, "leases": 2,
    },
    "namespaces": [{
        "namespace": "0123456789abcdef" * 4, "model": "some/model", "chunk_size": 256, "chunks": 5,
        "capacity_tokens": 812_000, "lookahead_tokens": 0,
        "world_size": 2, "ephemeral": False, "engines": ["engine-1"], "groups": [GROUP],
        "tokens": {"computed": 10, "hit": 30, "miss": 10, "tail": 1},
        "missed": {
            "not_stored": 3, "evicted": 7, "tier_down": 0, "tier_late": 0, "no_state": 0, "partial": 0,
            "of a later version": 1,
        },
    }],
    "sessions": [{
        "session_id": 9, "pid": 77, "role": "worker", "engine_id": "engine-1", "rank": 1, "age_s": 61.0,
        "client_version": "1.2.3", "vllm_version": "0.32.0", "not_cached": "",
    }],
    "pins": [{"name": "prompts.jsonl", "chunks": 3, "bytes": 3 << 20}],
    "tiers": [
        {
            "url": "valkey://one:6379", "write": "commit", "failing": "it is on fire", "waiting_objects": 4,
            "read_bytes_per_s": 0, "read_bytes": 3 << 20, "written_bytes": 1 << 30, "stored_bytes": 3 << 28,
            "used_bytes": None, "capacity_bytes": None, "records": None, "evicted_records": None,
            "oldest_age_seconds": None,
            "read_objects": {"read": 12, "gone": 2, "damaged": 1, "failed": 0},
            "written_objects": {
                "written": 30, "present": 5, "full": 6, "evicted": 0, "dropped": 7, "failed": 8,
            },
        },
        {
            "url": "dir:///tier?size_gb=1", "write": "cold", "failing": "", "waiting_objects": 0,
            "read_bytes_per_s": 0, "read_bytes": 0, "written_bytes": 0, "stored_bytes": 0,
            "used_bytes": 3 << 20, "capacity_bytes": 1 << 30, "records": 28, "evicted_records": 44,
            "oldest_age_seconds": 5400,
            "read_objects": {"read": 0, "gone": 0, "damaged": 0, "failed": 0},
            "written_objects": {
                "written": 0, "present": 0, "full": 0, "evicted": 0, "dropped": 0, "failed": 0,
            },
        },
    ],
    "tier_hit_tokens": 1234,
    "tenants": [
        {"tenant": "ca978112ca1bbdcafac231b39a23dc4d", "bytes": 3 << 20, "quota_bytes": 1 << 30},
        {"tenant": "3e23e8160039594a33894f6564e1b134", "bytes": 0, "quota_bytes": None},
    ],
    "namespaces_left_out": 0, "sessions_left_out": 0, "tenants_left_out": 7,
    "explained": [
        {"engine": "engine-1", "namespace": "0123456789abcdef", "model": "m", "fields": {"weights": "ab"}}
    ],
    "tokens": {"computed": 10, "hit": 30, "miss": 10, "tail": 1}, "hit_rate": 0.75, "test_hit_tokens": 51200,
    "demand": {"exact_bytes": None, "windows": dict.fromkeys(("hour", "day", "start"), WINDOW)},
    "objects": {"stored": 5, "present": 2, "busy": 0, "no_room": 1, "once": 0, "quota": 0, "failed": 0},
}  # fmt: skip


def test_what_differs_between_namespaces_is_shown_alone() -> None:
    engines = {
        "b": ("01", {"weights": "x", "vllm": "0.32.0"}),
        "a": ("02", {"weights": "y", "vllm": "0.32.0"}),
    }
    engines["c"] = ("f3", {"weights": "z", "vllm": "0.33.0", "fp8": "e4m3"})
    explained = [
        {"engine": engine, "namespace": namespace, "model": "m", "fields": fields}
        for engine, (namespace, fields) in engines.items()
    ]
    two = ["engine a, namespace 02", "  weights: y", "engine b, namespace 01", "  weights: x"]
    assert explanation({"explained": explained}, ("0",)).splitlines() == two
    assert explanation({"explained": explained}, ("01", "02")).splitlines() == two
    assert explanation({"explained": explained}, ("01", "f")).splitlines()[3:] == [
        *("engine c, namespace f3", "  weights: z", "  vllm: 0.33.0", "  fp8: e4m3"),
    ]
    assert len(explanation({"explained": explained}).splitlines()) == 3 + 7
    assert explanation({"explained": explained}, ("9",)).startswith("no engine has a namespace that begins")
    assert explanation({"explained": []}) == "no engine is connected: start one, then ask again"


def test_a_status_of_everything_that_can_be_shown():
    text = summary(REPORT)
    for part in (
        "1.2.3", "25.0 %", "75.0 %", "some/model", "0123456789ab", "chunk size 256", "sliding window", "512",
        "1.5 KiB", "engine-1", "rank 1", "pid 77", "30 hit, 10 missed: 3 never stored, 7 evicted\n",
        "tests (bench, verify, self-tests): 51,200 tokens hit, counted apart\n",
        "pinned as 'prompts.jsonl': 3 chunks, 3.0 MiB",
        "tiers: 1,234 of the hit tokens were fetched while requests waited\n",
        "tier valkey://one:6379: FAILING: it is on fire; read 12 objects, 3.0 MiB; wrote 30, 1.0 GiB "
        "as 768.0 MiB (0.75); 4 wait; 2 gone, 1 damaged, 6 without room, 7 dropped, 8 not written\n",
        "tier dir:///tier?size_gb=1: works; holds 3.0 MiB of 1.0 GiB in 28 records, the oldest use "
        "1 h 30 min ago, 44 evicted; read 0 objects, 0 B; wrote 0, 0 B; 0 wait\n",
        "tenants: 9, of which 7 are not shown\n  ca978112ca1b  3.0 MiB of 1.0 GiB\n  3e23e8160039  0 B\n",
    ):  # fmt: skip
        assert part in text
