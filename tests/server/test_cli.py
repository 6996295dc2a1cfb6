"""The command line: help, one sentence for every error, and a real server asked by the other commands."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import msgpack
import pytest
import zmq

from lmcache_client.contract import messages
from lmcache_client.contract.messages import Done, Refused, Registered, StatusReport
from lmcache_server import app
from lmcache_server.commands import cli, ends
from lmcache_server.commands.status import explanation, summary
from lmcache_server.config import OPTIONS, Config, flag_name, variable_name
from lmcache_server.core.demand import SIZES
from lmcache_server.errors import StartError

LMCACHE = [sys.executable, "-m", "lmcache_server"]
START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 20.0
PORT = "5901"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("LMCACHE_")]:
        monkeypatch.delenv(name)
    with tempfile.TemporaryDirectory(prefix="lmc-") as directory:
        monkeypatch.setenv("LMCACHE_RUNTIME_DIR", directory)
        yield


def lmcache(*arguments):
    """(exit code, stdout, stderr) of the real command."""
    done = subprocess.run([*LMCACHE, *arguments], capture_output=True, text=True, timeout=30, check=False)
    return done.returncode, done.stdout, done.stderr


def sentence(code, *arguments):
    """The one line of stderr with which a command ends with exit code `code`."""
    returned, _, errors = lmcache(*arguments)
    lines = [line for line in errors.splitlines() if " INFO " not in line]
    assert (returned, len(lines)) == (code, 1), errors
    assert "Traceback" not in errors
    return lines[0]


@contextlib.contextmanager
def running(*arguments):
    """(process, lines logged until it was ready, base URL) of a server with 16 MB."""
    command = [*LMCACHE, "server", "--l1-size-gb", "0.016", "--http-port", "0", "--port", PORT, *arguments]
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


def in_process(capsys, *arguments):
    """(exit code, stdout, stderr) of the command, run here."""
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    output = capsys.readouterr()
    return ended.value.code or 0, output.out, output.err


# -- help -----------------------------------------------------------------------------------------------


def test_the_help_names_every_option_with_its_default_and_its_variable(capsys):
    code, text, _ = in_process(capsys, "server", "--help")
    words = " ".join(text.split())
    assert code == 0
    shown = {"host": "(a Unix socket)", "chunk_size": "(auto)", "l1_path": "(none)", "tier": "(none)"}
    assert "--config" in text
    for name, field in OPTIONS.items():
        default = f"no-{flag_name(name)[2:]}" if field.default is False else shown.get(name, field.default)
        assert flag_name(name) in text
        # Long words are broken at their hyphens.
        (values,) = re.findall(rf"\[env var: {variable_name(name)}\b(.*?)\]", words)
        assert f"default: {default}" in values.replace("- ", "-")
    assert "1 GB = 2**30 bytes" in words
    assert "without password or encryption" in words


@pytest.mark.parametrize("command", ["status", "clear", "ping", "unpin", "inspect", "bench"])
def test_the_other_commands_find_the_server_by_the_same_options(capsys, command):
    code, text, _ = in_process(capsys, command, "--help")
    assert code == 0
    for word in ("--host", "--port", "--config", "--timeout-s", "LMCACHE_PORT"):
        assert word in text


def test_no_command_shows_the_help(capsys):
    code, _, errors = in_process(capsys)
    assert code == 2
    assert "server" in errors
    assert "status" in errors


def test_version(capsys):
    assert in_process(capsys, "--version")[:2] == (0, f"lmcache, version {app.VERSION}\n")


def test_help_imports_nothing_heavy_and_the_server_neither_torch_nor_vllm():
    program = (
        "import sys\n"
        "import lmcache_server.commands.cli\n"
        "print(sorted({'zmq', 'numpy', 'prometheus_client', 'msgpack', 'asyncio'} & set(sys.modules)))\n"
        "import lmcache_server.app\n"
        "print(sorted({'torch', 'vllm'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[1] == "[]"
    assert set(json.loads(done.stdout.split("\n")[0].replace("'", '"'))) <= {"msgpack"}


# -- errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("server", "--port", "x"), "lmcache: --port must be an integer from 1 to 65535, not 'x'"),
        (("server", "--l1-size-gb", "-1"), "lmcache: --l1-size-gb must be a number from 0.001"),
        (
            ("server", "--config", "/nowhere.toml"),
            "lmcache: cannot read the configuration file /nowhere.toml",
        ),
        (("server", "--host", "0.0.0.0"), "lmcache: --host 0.0.0.0 lets other machines connect"),
        (("server", "--eviction-policy", "MRU"), "lmcache: --eviction-policy must be LRU, not 'MRU'"),
        (("server", "--no-such-flag"), "lmcache: No such option"),
        (("server", "--port"), "lmcache: Option '--port' requires an argument"),
        (("server", "surplus"), "lmcache: Got unexpected extra argument"),
        (("serve",), "lmcache: No such command 'serve'"),
        (("server", "--max-workers", "4"), "lmcache: LMCache's --max-workers is not needed here: remove it"),
        (("server", "--no-l1-use-lazy"), "lmcache: LMCache's --l1-use-lazy is not needed here: remove it"),
        (
            ("server", "--l2-adapter={}"),
            "lmcache: LMCache's --l2-adapter is '--tier' here (a directory, Valkey",
        ),
        (("ping", "kvcache", "--url", "http://x"), "lmcache: LMCache's command 'ping kvcache' is 'lmcache"),
        (("describe", "kvcache"), "lmcache: LMCache's command 'describe kvcache' is 'lmcache status' here"),
        (("coordinator", "list"), "lmcache: lmcache-mp has nothing like LMCache's command 'coordinator'"),
        (("quota", "list"), "lmcache: LMCache's command 'quota' is 'lmcache server' here (--quota-gb"),
        (("ping", "--timeout-s", "0"), "lmcache: Invalid value for '--timeout-s'"),
        (("server", "--http-host", "\udcff"), "lmcache: --http-host must be text that can be printed"),
        (("ping", "--host", "\udcff"), "lmcache: --host must be text that can be printed, not"),
        (("ping", "--config", "/dev/zero"), "lmcache: the configuration file /dev/zero has more than"),
        (("ping", "--port", "0"), "lmcache: --port must be an integer from 1 to 65535, not '0'"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(capsys, arguments, expected):
    code, output, errors = in_process(capsys, *arguments)
    assert (code, output) == (2, "")
    assert errors.startswith(expected)
    assert errors.count("\n") == 1


def test_lmcache_in_the_same_environment_is_told(capsys, monkeypatch, tmp_path):
    (tmp_path / "lmcache").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert in_process(capsys, "--version")[2] == ""
    (tmp_path / "lmcache" / "__init__.py").touch()
    assert in_process(capsys, "--version")[2] == f"lmcache: {ends.BESIDE_LMCACHE}\n"


@pytest.mark.parametrize("flags", [("--log-format=json",), ("--log-format", "JSON"), ()])
def test_wrong_usage_of_a_server_that_logs_json_is_a_json_object(monkeypatch, flags):
    monkeypatch.setenv("LMCACHE_LOG_FORMAT", "text" if flags else "json")
    for wrong in ("--port=x", "--host=0.0.0.0", "--no-such-flag", "--max-workers=4"):
        _, _, errors = lmcache("server", wrong, *flags)
        line = json.loads(errors)
        assert line["level"] == "critical"
        assert wrong.partition("=")[0] in line["message"]


def test_ping_measures_one_request_on_an_open_connection(capsys):
    """Connecting takes two seconds here, because the first reply does."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")

        def serve():
            for wait_s in (2.0, 0.0):
                frames = socket.recv_multipart()
                time.sleep(wait_s)
                request_id, _ = messages.decode_request(frames[-1])
                socket.send_multipart([frames[0], messages.encode_reply(bytes(16), request_id, Done())])

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        where = ("--host", "127.0.0.1", "--port", str(port), "--timeout-s", "30")
        code, output, _ = in_process(capsys, "ping", *where)
        thread.join(30)
    assert code == 0
    assert float(re.search(r"after ([\d.]+) ms", output)[1]) < 1500


def test_the_help_of_a_command_that_asks_speaks_of_the_server(capsys):
    _, text, _ = in_process(capsys, "status", "--help")
    assert "The TCP address of the server." in " ".join(text.split())


def test_no_line_of_the_list_of_commands_is_cut(capsys):
    assert "..." not in in_process(capsys, "--help")[1].partition("Commands:")[2]


def test_what_keeps_the_server_from_starting_is_one_sentence(capsys, monkeypatch):
    def run(_config):
        raise StartError("the moon is full: wait")

    monkeypatch.setattr(app, "run", run)
    assert in_process(capsys, "server") == (2, "", "lmcache: the moon is full: wait\n")


def test_flags_reach_the_server_and_its_exit_code_comes_back(capsys, monkeypatch):
    seen = []
    monkeypatch.setattr(app, "run", lambda config: seen.append(config) or 7)
    monkeypatch.setenv("LMCACHE_LEASE_S", "30")
    code, _, _ = in_process(capsys, "server", "--chunk-size", "544", "--l1-size-gb", "100", "--l1-hugetlb")
    assert (code, seen) == (7, [Config(chunk_size=544, l1_size_gb=100.0, l1_hugetlb=True, lease_s=30.0)])


def test_more_memory_than_the_machine_has():
    line = sentence(2, "server", "--l1-size-gb", "90000", "--http-port", "0", "--port", PORT)
    assert re.fullmatch(r"lmcache: --l1-size-gb asks for 90000\.00 GB, but [\d.]+ GB are available .*", line)


@pytest.mark.parametrize("host", [(), ("--host", "127.0.0.1")])
def test_a_port_in_use(host):
    with running(*host):
        line = sentence(2, "server", "--l1-size-gb", "0.016", "--http-port", "0", "--port", PORT, *host)
    assert "in use" in line
    assert "--port" in line


def test_an_http_port_in_use():
    with running() as (_, _, url):
        number = url.rpartition(":")[2]
        line = sentence(2, "server", "--l1-size-gb", "0.016", "--http-port", number, "--port", "5902")
    assert f"127.0.0.1:{number}" in line
    assert "--http-port" in line
    assert not list(Path(os.environ["LMCACHE_RUNTIME_DIR"]).glob("5902.sock"))


@pytest.mark.parametrize("command", ["ping", "status", "clear", "bench"])
@pytest.mark.parametrize("host", [(), ("--host", "127.0.0.1")])
def test_no_server(capsys, command, host):
    code, output, errors = in_process(capsys, command, "--port", "5903", "--timeout-s", "0.2", *host)
    assert (code, output) == (1, "")
    assert re.fullmatch(r"lmcache: no lmcache server answers at \S+5903\S*: start one with .*\n", errors)


def test_a_socket_directory_that_others_may_enter_is_not_trusted(capsys):
    Path(os.environ["LMCACHE_RUNTIME_DIR"]).chmod(0o755)
    code, _, errors = in_process(capsys, "ping")
    assert code == 1
    assert "chmod 700" in errors
    assert "chmod 700" in sentence(2, "server", "--l1-size-gb", "0.016", "--http-port", "0")


# -- a real server --------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", [(), ("--host", "127.0.0.1")])
def test_the_commands_ask_a_running_server(capsys, tmp_path, host):
    with running(*host) as (process, lines, url):
        assert sum("configuration: " in line for line in lines) == 1
        where = ("--port", PORT, *host)
        code, output, _ = in_process(capsys, "ping", *where)
        assert code == 0
        assert output.startswith("the server answers")
        code, output, _ = in_process(capsys, "status", *where)
        assert code == 0
        assert f"pid {process.pid}" in output
        code, output, _ = in_process(capsys, "status", "--json", *where)
        report = json.loads(output)
        assert report["pid"] == process.pid
        assert report["l1"]["free_bytes"] == report["l1"]["total_bytes"] > 0
        assert in_process(capsys, "clear", *where)[:2] == (0, "forgot 0 chunks\n")
        assert in_process(capsys, "unpin", "--all", *where)[:2] == (0, "unpinned 0 chunks\n")
        code, output, errors = in_process(capsys, "unpin", "mine", *where)
        assert (code, output) == (1, "")
        assert errors == "lmcache: nothing is pinned as 'mine': 'lmcache status' lists the names that are\n"
        assert json.loads(in_process(capsys, "clear", "--json", *where)[1]) == {
            "chunks": 0,
            "tiers_failed": [],
        }
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text("[1, 2, 3]")
        for salt in ((), ("--salt-file", str(prompts))):
            code, output, errors = in_process(capsys, "inspect", str(prompts), *salt, *where)
            assert (code, output) == (1, "")
            assert errors.startswith("lmcache: no engine is connected: `lmcache status` lists models")
        code, _, errors = in_process(capsys, "inspect", str(prompts), "--salt-file", "/dev/null", *where)
        assert (code, errors) == (1, "lmcache: /dev/null is empty: write the cache_salt into it\n")
        for option in ("--model", "--namespace"):
            code, output, errors = in_process(capsys, "clear", option, "a\udcff", *where)
            assert (code, output) == (1, "")
            assert errors.startswith("lmcache: no namespace has this name: `lmcache status` lists")
        for digits in ("0b5d5f2", "my tenant"):
            code, output, errors = in_process(capsys, "clear", "--salt", digits, *where)
            assert (code, output) == (2, "")
            assert "--salt needs 8 or more hexadecimal digits" in errors
        with urllib.request.urlopen(f"{url}/status", timeout=5) as answer:
            assert json.load(answer)["boot_id"] == report["boot_id"]
        for page in ("healthz", "readyz", "healthcheck", "metrics"):
            with urllib.request.urlopen(f"{url}/{page}", timeout=5) as answer:
                assert answer.status == 200


def test_variables_that_set_nothing_are_warned_about(monkeypatch):
    monkeypatch.setenv("LMCACHE_L1_SIZE_G", "1")
    with running() as (_, lines, _):
        (warning,) = [line for line in lines if " WARNING " in line]
    assert "LMCACHE_L1_SIZE_G sets nothing: did you mean LMCACHE_L1_SIZE_GB?" in warning


def test_the_commands_find_the_server_by_the_environment(capsys, monkeypatch):
    with running():
        monkeypatch.setenv("LMCACHE_PORT", PORT)
        assert in_process(capsys, "ping")[0] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_with_0_and_leaves_no_socket(number):
    with running() as (process, _, _):
        started_s = time.monotonic()
        process.send_signal(number)
        assert process.wait(START_TIMEOUT_S) == 0
        assert time.monotonic() - started_s < STOP_TIMEOUT_S
    assert not list(Path(os.environ["LMCACHE_RUNTIME_DIR"]).glob("*.sock"))


def test_a_signal_while_memory_is_populated_ends_the_server_in_time():
    with running("--l1-size-gb", "2") as (process, _, _):
        started_s = time.monotonic()
        process.terminate()
        assert process.wait(START_TIMEOUT_S) == 0
        assert time.monotonic() - started_s < STOP_TIMEOUT_S


def test_the_server_is_small():
    with running() as (process, _, _):
        status = Path(f"/proc/{process.pid}/status").read_text()
        resident_bytes = int(re.search(r"VmRSS:\s+(\d+) kB", status).group(1)) * 1024
    assert resident_bytes - 17 * (1 << 20) < 60 * (1 << 20)


# -- what answers is not what was asked for --------------------------------------------------------------

GROUP = {"kind": "sliding_window", "block_size": 16, "window": 512, "layers": 3, "block_bytes": 1536}
WINDOW = {"tokens": 40, "hit_rates": dict.fromkeys(SIZES, 0.75), "namespaces": {}}
REPORT = {
    "version": "1.2.3", "boot_id": "ab", "pid": 42, "uptime_s": 3725.0,
    "config": {"chunk_size": None, "l1_size_gb": 4.0, "l1_path": "", "l1_hugetlb": False},
    "l1": {
        "total_bytes": 4 << 30, "free_bytes": 3 << 30, "ready_bytes": 1 << 30, "reserved_bytes": 0,
        "stored_bytes": 1 << 30, "populated_bytes": 0, "chunks": 5, "leases": 2,
    },
    "namespaces": [{
        "namespace": "0123456789abcdef" * 4, "model": "some/model", "chunk_size": 256, "chunks": 5,
        "lookahead_tokens": 0,
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
            "read_bytes_per_s": 0, "read_bytes": 3 << 20, "written_bytes": 1 << 30,
            "read_objects": {"read": 12, "gone": 2, "damaged": 1, "failed": 0},
            "written_objects": {
                "written": 30, "present": 5, "full": 6, "evicted": 0, "dropped": 7, "failed": 8,
            },
        },
        {
            "url": "dir:///tier?size_gb=1", "write": "cold", "failing": "", "waiting_objects": 0,
            "read_bytes_per_s": 0, "read_bytes": 0, "written_bytes": 0,
            "read_objects": {"read": 0, "gone": 0, "damaged": 0, "failed": 0},
            "written_objects": {
                "written": 0, "present": 0, "full": 0, "evicted": 0, "dropped": 0, "failed": 0,
            },
        },
    ],
    "tenants": [
        {"tenant": "ca978112ca1bbdcafac231b39a23dc4d", "bytes": 3 << 20, "quota_bytes": 1 << 30},
        {"tenant": "3e23e8160039594a33894f6564e1b134", "bytes": 0, "quota_bytes": None},
    ],
    "namespaces_left_out": 0, "sessions_left_out": 0, "tenants_left_out": 7,
    "explained": [
        {"engine": "engine-1", "namespace": "0123456789abcdef", "model": "m", "fields": {"weights": "ab"}}
    ],
    "tokens": {"computed": 10, "hit": 30, "miss": 10, "tail": 1}, "hit_rate": 0.75,
    "demand": {"exact_bytes": None, "windows": dict.fromkeys(("hour", "day", "start"), WINDOW)},
    "objects": {"stored": 5, "present": 2, "busy": 0, "no_room": 1, "once": 0, "quota": 0, "failed": 0},
}  # fmt: skip
ASKING = (["ping"], ["clear"], ["unpin", "mine"], ["status"], ["status", "--json"], ["plan"],
          ["bench", "--requests", "1"])  # fmt: skip
NOT_COMPATIBLE = "is not a compatible lmcache server"
UNREADABLE = "sent a status that this version cannot read: install the same version of lmcache-mp"
HOSTILE = "m\x1b[2J\x1b]0;owned\x07\nlmcache server 9.9.9"


@contextlib.contextmanager
def answering(make):
    """Meanwhile something at PORT answers each frame with the frames that `make(request id)` returns."""
    stop = threading.Event()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(f"ipc://{os.environ['LMCACHE_RUNTIME_DIR']}/{PORT}.sock")

        def serve():
            while not stop.is_set():
                if router.poll(20):
                    identity, frame = router.recv_multipart()
                    router.send_multipart([identity, *make(messages.decode_request(frame)[0])])

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def reply(message, request_id=None):
    return lambda asked: [messages.encode_reply(bytes(16), request_id or asked, message)]


def status_reply(report):
    text = report if isinstance(report, str) else json.dumps(report)
    return reply(StatusReport(tuple(text[i : i + 4096] for i in range(0, len(text), 4096))))


def error_of(capsys, *command):
    """The one line on stderr with which a command in this process fails."""
    code, output, errors = in_process(capsys, *command, "--port", PORT, "--timeout-s", "2")
    assert (code, output, errors.count("\n")) == (1, "", 1), (output, errors)
    assert errors[:-1].isprintable()
    return errors


@pytest.mark.parametrize(
    "make",
    [
        reply(Registered(256, "")),
        reply(Done(), 2),
        lambda _: [b""],
        lambda _: [b"\xc1\xc1"],
        lambda _: [b"a", b"b"],
        lambda _: [msgpack.packb([99, 1, bytes(16), 0, []])],
    ],
)
def test_a_reply_to_another_question_is_one_sentence(capsys, make):
    with answering(make):
        for command in ASKING:
            assert NOT_COMPATIBLE in error_of(capsys, *command)


def test_what_says_done_to_everything_has_only_answered_a_ping(capsys):
    with answering(reply(Done())):
        assert in_process(capsys, "ping", "--port", PORT)[0] == 0
        for command in ASKING[1:]:
            assert NOT_COMPATIBLE in error_of(capsys, *command)


def without(path):
    report = json.loads(json.dumps(REPORT))
    *way, last = path
    part = report
    for step in way:
        part = part[step]
    del part[last]
    return report


@pytest.mark.parametrize(
    "report",
    [
        "", "{", "[]", "{}", "null", "[" * 60_000, "9" * 5000,
        without(["version"]), without(["l1", "total_bytes"]), without(["config", "chunk_size"]),
        without(["explained"]), without(["pins"]), without(["demand", "windows", "hour"]),
        without(["demand", "windows", "day", "hit_rates", "1"]),
        without(["namespaces", 0, "groups", 0, "kind"]), without(["namespaces", 0, "missed", "evicted"]),
        without(["sessions", 0, "not_cached"]), without(["tiers", 0, "written_objects", "dropped"]),
        {**REPORT, "uptime_s": "x"}, {**REPORT, "pid": 1.5}, {**REPORT, "sessions": {}},
        {**REPORT, "hit_rate": float("nan")}, {**REPORT, "hit_rate": 10.0**18},
        {**REPORT, "uptime_s": float("inf")}, {**REPORT, "uptime_s": 10**400},
        {**REPORT, "l1": {**REPORT["l1"], "total_bytes": -1}},
    ],
)  # fmt: skip
def test_a_status_that_cannot_be_read_is_one_sentence(capsys, report):
    with answering(status_reply(report)):
        for command in ASKING[3:]:
            assert UNREADABLE in error_of(capsys, *command)
        code, output, errors = in_process(capsys, "doctor", "--port", PORT)
        assert (code, errors) == (1, "")
        assert re.search(f"^fail  server: .* {UNREADABLE}", output, re.MULTILINE)


def test_names_that_clients_chose_move_no_cursor_and_begin_no_line(capsys):
    report = json.loads(json.dumps(REPORT))
    report["namespaces"][0]["model"] = report["sessions"][0]["engine_id"] = HOSTILE
    report["explained"][0] |= {"engine": HOSTILE, "fields": {HOSTILE: HOSTILE}}
    report["pins"][0]["name"] = HOSTILE
    report["version"] = report["sessions"][0]["not_cached"] = HOSTILE
    with answering(status_reply(report)):
        for command in (["status"], ["status", "--json"], ["status", "--explain"], ["doctor"]):
            _, output, errors = in_process(capsys, *command, "--port", PORT)
            assert output.count("owned") >= 2
            assert all(line.isprintable() for line in output.split("\n")), output
            assert not any(line.startswith("lmcache server 9.9.9") for line in output.split("\n"))
            assert not errors
    with answering(reply(Refused("x", HOSTILE))):
        for command in ASKING:
            assert error_of(capsys, *command) == (
                "lmcache: m\\x1b[2J\\x1b]0;owned\\x07\\nlmcache server 9.9.9\n"
            )


@pytest.mark.parametrize("command", ["ping", "status", "clear", "bench"])
@pytest.mark.parametrize("host", ["a\udcff", "a b", "x" * 300, "%", "\n"])
def test_a_host_that_no_address_can_have(capsys, command, host):
    code, output, errors = in_process(capsys, command, "--host", host, "--timeout-s", "0.1")
    assert (output, errors.count("\n")) == ("", 1)
    if code == 2:
        assert "--host" in errors
        return
    assert code == 1
    assert "pass another --host or --port" in errors or "no lmcache server answers" in errors


def test_a_socket_directory_that_cannot_be_looked_at(capsys, monkeypatch):
    monkeypatch.setenv("LMCACHE_RUNTIME_DIR", "/dev/null/below")
    assert in_process(capsys, "ping")[2] == (
        "lmcache: cannot use /dev/null/below for the socket (Not a directory): name another directory in "
        "LMCACHE_RUNTIME_DIR\n"
    )


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
        "pinned as 'prompts.jsonl': 3 chunks, 3.0 MiB",
        "tier valkey://one:6379: FAILING: it is on fire; read 12 objects, 3.0 MiB; wrote 30, 1.0 GiB; "
        "4 wait; 2 gone, 1 damaged, 6 without room, 7 dropped, 8 not written\n",
        "tier dir:///tier?size_gb=1: works; read 0 objects, 0 B; wrote 0, 0 B; 0 wait\n",
        "tenants: 9, of which 7 are not shown\n  ca978112ca1b  3.0 MiB of 1.0 GiB\n  3e23e8160039  0 B\n",
    ):  # fmt: skip
        assert part in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("unpin",), "pass a name or --all: 'lmcache status' lists the names"),
        (("unpin", "mine", "--all"), "pass a name or --all: 'lmcache status' lists the names"),
        (("inspect", "/proc/version"), "line 1 is text: pass --url, so that vLLM makes token ids of it"),
        (("unpin", ""), "pass a name or --all: 'lmcache status' lists the names"),
        (("unpin", "x" * 65), "a name has 1 to 64 printable characters"),
        (("pin", "http://127.0.0.1:9", "/dev/null", "--name", ""), "a name has 1 to 64 printable characters"),
        (
            ("pin", "http://127.0.0.1:9", "/dev/null", "--name", "x" * 65),
            "a name has 1 to 64 printable characters",
        ),
        (
            ("pin", "http://127.0.0.1:9", "/dev/null", "--name", "a\nb"),
            "a name has 1 to 64 printable characters",
        ),
        (
            ("pin", "http://127.0.0.1:9", "/dev/null", "--name", "a\udcff"),
            "a name has 1 to 64 printable characters",
        ),
    ],
)
def test_what_a_command_cannot_take_is_a_wrong_option(arguments, said):
    assert said in sentence(2, *arguments)
