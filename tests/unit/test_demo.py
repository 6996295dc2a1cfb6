"""scripts/demo.py with stand-ins for vLLM and the server: what it prints, and what it says when they fail.

That the cache works is shown by the demo itself, and by the tests with real engines.
"""

import importlib
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from harness.processes import free_port, group_members

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"
STAND_IN = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

port, fault, cached = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
hits = 0
if fault == "ends":
    raise SystemExit(1 / 0)

class Handler(BaseHTTPRequestHandler):
    def answer(self, body, status=200):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self):
        global hits
        hits += 100
        self.answer(f'lmcache_tokens_total{{model="m",namespace="n",outcome="hit"}} {hits}\\n')

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        usage = {"prompt_tokens": 200, "prompt_tokens_details": {"cached_tokens": cached}}
        if self.path == "/reset_prefix_cache":
            self.answer('{"success": true}')
        elif fault == "refuses":
            self.answer("no such model", 404)
        elif fault == "dies":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"40\\r\\ndata: ")
            self.wfile.flush()
            os.kill(os.getpid(), 9)
        elif fault == "garbage":
            self.answer("data: [1, 2\\n")
        elif fault == "no usage":
            self.answer("data: [DONE]\\n")
        elif fault == "error":
            self.answer('data: {"error": {"message": "EngineCore is dead"}}\\n')
        elif self.path == "/v1/completions":
            self.answer(json.dumps({"choices": [{"text": "o", "logprobs": [-1.5]}], "usage": usage}))
        else:
            event = json.dumps({"choices": [{"delta": {"content": "An answer."}}], "usage": usage})
            self.answer(f"data: {event}\\n\\ndata: [DONE]\\n")

    def log_message(self, *_):
        pass

HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    """It starts stand-ins, kept in `started`, with faults by their names; "" is the server."""
    monkeypatch.syspath_prepend(SCRIPTS)
    module = importlib.import_module("demo")
    monkeypatch.setattr(module, "LOGS", tmp_path)
    monkeypatch.setattr(module, "prepared_models", lambda: {})
    monkeypatch.setattr(module, "started", [], raising=False)
    monkeypatch.setattr(module, "faults", {}, raising=False)

    def start(what: str, name: str, cached: int = 0) -> object:
        port = free_port()
        arguments = ["-c", STAND_IN, str(port), module.faults.get(name, ""), str(cached)]
        module.started.append(module.Service(what, arguments, {}, tmp_path / f"{name}.log", port, "/health"))
        return module.started[-1]

    monkeypatch.setattr(module.Demo, "start_server", lambda _: start("lmcache server", ""))
    monkeypatch.setattr(
        module.Demo, "start_vllm", lambda _, name, model, connected: start(name, name, 64 * connected)
    )
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield module
    for number, handler in handlers.items():
        signal.signal(number, handler)


def left(demo: ModuleType) -> list[int]:
    return [pid for service in demo.started for pid in group_members(service._process.pid)]


def test_it_says_what_will_happen_numbers_its_steps_and_ends_with_what_to_do_next(demo, capsys):
    code = demo.main()
    said = capsys.readouterr().out
    assert code == 0, said
    assert said.startswith("In 7 steps, a real model answers questions")
    first, last = said.partition("\n[1/7]")[0], said.partition("[7/7]")[2]
    assert "about four\nminutes" in first
    assert "often wrong" in first, "before the answers and the table"
    assert [line[1] for line in said.splitlines() if line.startswith("[")] == list("1234567")
    for part in (
        "s without a cache), 64 of 200 tokens from the server",
        "tiny random weights",
        "64 of 200 tokens from the server; the answer, with its log probabilities, equals the computed",
        f"its status page, while the demo runs: http://127.0.0.1:{demo.started[0].port}",
        " s, without the installation; logs in ",
        "http://127.0.0.1:8080",
    ):
        assert part in said, part
    assert "  turn 3, the server was killed: first token after 0." in last
    assert "0 of 200 tokens from the server" in last
    verdict = last.partition("PASS: every answer has the same text as without a cache.")[2]
    assert "as it may with vLLM's own prefix cache" in verdict, "no more than holds"
    assert "lmcache verify http://" in verdict
    assert verdict.strip().endswith("by hand.")
    assert len(demo.started) == 6
    assert not left(demo)
    # A page shows all of it but the figures, which are of another machine.
    printed = shape(demo, said)
    assert sum(line.endswith(" yes") for line in printed) == 7
    assert printed[-1].startswith("0 times sooner ")
    assert shape(demo, (SCRIPTS.parent / "docs/laptop.md").read_text()) == printed


def shape(demo: ModuleType, text: str) -> list[str]:
    """Without its figures: each row, its mark and verdict, the end."""
    lines = [re.sub(r"(?<!\S)(-+|\d+\.?\d*)(?!\S)", "0", line).split() for line in text.splitlines()]
    start = lines.index(demo.table([]).splitlines()[0].split())
    end = next(i for i in range(len(lines)) if lines[i][:1] == ["PASS:"])
    return [" ".join(line) for line in lines[start : end + 4]]


FAULTS = {
    "ends": "does not start: it has ended with exit code 1",
    "refuses": "answered /v1/chat/completions with 404: no such model",
    "dies": "does not answer /v1/chat/completions: ",
    "garbage": "sent an answer that the demo cannot read (JSONDecodeError(",
    "no usage": "sent an answer that the demo cannot read (KeyError('prompt_tokens'))",
    "error": "failed: {'message': 'EngineCore is dead'}",
}


@pytest.mark.parametrize("name", ["vLLM without connector", "second vLLM"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_vllm_that_fails_ends_the_demo_with_a_sentence(demo, name, fault, capsys):
    demo.faults[name] = fault
    assert demo.main() == 1
    said = capsys.readouterr().err
    assert said.startswith(f"demo: {name} {FAULTS[fault]}"), said
    assert "Traceback" not in said
    assert ("it was killed (is there enough memory?)" in said) == (fault == "dies")
    assert ("ZeroDivisionError" in said) == (fault == "ends"), "the end of the log, without the stack"
    assert "  File" not in said
    assert not left(demo)


def test_a_server_that_is_killed_by_somebody_else_ends_the_demo_with_a_sentence(demo, monkeypatch, capsys):
    ask = demo.ask

    def ask_and_kill(vllm: object, messages: object, *tokens: int) -> object:
        answer = ask(vllm, messages, *tokens)
        if demo.started[-1].what == "second vLLM":
            demo.started[0].kill()
        return answer

    monkeypatch.setattr(demo, "ask", ask_and_kill)
    assert demo.main() == 1
    said = capsys.readouterr().err
    assert said.startswith("demo: lmcache server does not answer /metrics: ")
    assert "it was killed (is there enough memory?)" in said
    assert "Traceback" not in said
    assert not left(demo)


def test_the_table_and_what_it_proves(demo: ModuleType) -> None:
    reference = demo.Answer("text", 2.8, 1759, 0)
    rows = [
        demo.Row("turn 1", reference, reference, 0),
        demo.Row("turn 1, reset", demo.Answer("text", 0.5, 1759, 1600), reference, 1536, "after a reset"),
    ]
    hybrid = demo.Exact(*(demo.Answer("h", 0.1, 1800, 0, [1.0]),) * 3, 1792)
    lines = demo.table(rows).splitlines()
    assert lines[3].split() == ["turn", "1", "1759", "-", "-", "2.80", "s", "2.80", "s", "-", "yes"]
    served = ["1759", "1536", "64", "0.50", "s", "2.80", "s", "5.6", "yes"]
    assert lines[4].split() == [">", "turn", "1,", "reset", *served]
    said = demo.conclusion(rows, hybrid)
    assert said == "PASS: every answer has the same text as without a cache.\n 5.6 times sooner after a reset"


def test_a_busy_machine_is_told_by_what_nothing_can_speed_up(demo: ModuleType) -> None:
    reference = demo.Answer("text", 2.0, 1759, 0)
    served = demo.Row("reset", demo.Answer("text", 0.1, 1759, 1600), reference, 1536, "after a reset")

    def busy(seconds: float) -> str:
        return demo.busy([demo.Row("turn 1", demo.Answer("text", seconds, 1759, 0), reference, 0), served])

    assert busy(2.4) == busy(1.7) == ""
    assert "took 2.0 times as long" in busy(4.0)
    assert "took 0.5 times as long" in busy(1.0)


def test_a_time_is_the_median_and_a_wrong_text_is_never_left_out(demo: ModuleType) -> None:
    slow, fast, usual = (demo.Answer("text", seconds, 200, 0) for seconds in (3.0, 1.0, 2.0))
    wrong = demo.Answer("other", 9.0, 200, 0)
    assert demo.median([slow, fast, usual], "text") is usual
    assert demo.median([slow, wrong, usual], "text") is wrong
    assert demo.median([slow]) is slow


def test_what_failed_is_named(demo: ModuleType) -> None:
    reference = demo.Answer("text", 2.8, 1759, 0)
    wrong = demo.Row("turn 2", demo.Answer("other", 1.0, 1759, 0), reference, 0, "after a reset")
    computed = demo.Answer("h", 0.1, 1800, 0, [1.0])
    other = demo.Answer("h", 0.1, 1800, 1792, [1.1])
    assert "NO" in demo.table([wrong])
    said = demo.conclusion([wrong], demo.Exact(computed, computed, other, 1792)).splitlines()
    assert said[0] == "FAILED"
    assert said[1:4] == [
        "The text differs in: turn 2",
        "  with the server: 'other'",
        "  without a cache: 'text'",
    ]
    assert said[4] == "The server served nothing in: turn 2"
    assert said[5].endswith("DIFFERS from the computed one")
    assert demo.Exact(computed, other, other, 1792).equals == "the one from vLLM's own cache"
    assert not demo.Exact(computed, computed, computed, 0).is_good
