"""`make demo`: a real model, served by vLLM, whose KV cache outlives resets, restarts and engines.

The demo sends a conversation about a long text to vLLM's OpenAI server. The first vLLM has no connector and
nothing cached: its texts and times are the reference. Then follow vLLM processes that share one
`lmcache server`. Requests go one at a time, because vLLM's numerics depend on the batch.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import demo_model
from demo_processes import DemoError, Service, free_port, say, start_and_wait

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("LMCACHE_DEMO_CACHE") or ROOT / ".cache")
LOGS = CACHE / "logs"
TEXT = (ROOT / "scripts" / "demo_text.txt").read_text(encoding="utf-8")
QUESTIONS = (
    "Here is a text. Read it, then tell me in one sentence what it is about.\n\n" + TEXT,
    "Who was the first keeper of the lighthouse?",
    "What did Ruth Marsh do during the great storm?",
)
WARM_UP = [{"role": "user", "content": "Hello!"}]
"""The first request to an engine is always slow. This one is too short to be looked up or stored."""
ANSWER_TOKENS = 40
VLLM_TIMEOUT_S = 300.0
SERVER_TIMEOUT_S = 30.0
RESET_TIMEOUT_S = 5.0
HITS = 'lmcache_tokens_total{outcome="hit"} '

Message = dict[str, str]


@dataclass(frozen=True)
class Answer:
    """The answer to one request. `cached_tokens` came from vLLM's own cache or from the server."""

    text: str
    first_token_s: float
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class Row:
    """One line of the table: the `answer` to check, and the `reference` of vLLM without the connector."""

    step: str
    answer: Answer
    reference: Answer
    served_tokens: int
    must_be_served: bool

    @property
    def is_equal(self) -> bool:
        return self.answer.text == self.reference.text

    @property
    def is_good(self) -> bool:
        return self.is_equal and (self.served_tokens > 0 or not self.must_be_served)


def ask(vllm: Service, messages: list[Message]) -> Answer:
    """Send a conversation and stream the answer."""
    body = {
        "model": demo_model.NAME,
        "messages": messages,
        "temperature": 0,
        "max_tokens": ANSWER_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start = time.monotonic()
    first_token_s = 0.0
    parts: list[str] = []
    usage: dict[str, Any] = {}
    with vllm.post("/v1/chat/completions", body) as response:
        for line in response:
            data = line.decode().strip().removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise DemoError(f"{vllm.what} failed: {event['error']}\n{vllm.tail()}")
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                if text := choice["delta"].get("content"):
                    first_token_s = first_token_s or time.monotonic() - start
                    parts.append(text)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Answer("".join(parts), first_token_s, usage["prompt_tokens"], cached)


def forget_own_cache(vllm: Service) -> None:
    """Reset vLLM's own prefix cache, so that only the server can have cached pages. Raises DemoError."""
    deadline = time.monotonic() + RESET_TIMEOUT_S
    while time.monotonic() < deadline:
        with vllm.post("/reset_prefix_cache") as response:
            if json.loads(response.read())["success"]:
                return
        time.sleep(0.1)
    raise DemoError(f"{vllm.what} did not reset its prefix cache within {RESET_TIMEOUT_S} s\n{vllm.tail()}")


class Demo:
    """Starts the processes, holds the conversation and collects the rows of the table."""

    def __init__(self, model: Path, runtime_dir: str) -> None:
        self.model = model
        self.runtime_dir = runtime_dir
        self.port = free_port()
        self.rows: list[Row] = []
        self.references: list[Answer] = []
        self.conversation: list[Message] = []
        self.server: Service | None = None

    def start_server(self) -> Service:
        http_port = free_port()
        arguments = ["-m", "lmcache_server", "server", "--port", str(self.port), "--l1-size-gb", "0.5"]
        return Service(
            "lmcache server",
            [*arguments, "--http-port", str(http_port)],
            {"LMCACHE_RUNTIME_DIR": self.runtime_dir},
            LOGS / "demo-server.log",
            http_port,
            "/readyz",
        )

    def start_vllm(self, name: str, connected: bool) -> Service:
        port = free_port()
        arguments = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model)]
        arguments += ["--served-model-name", demo_model.NAME, "--host", "127.0.0.1", "--port", str(port)]
        arguments += ["--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-seqs", "4"]
        arguments += ["--kv-cache-memory-bytes", str(256 << 20), "--enforce-eager"]
        arguments += ["--enable-prompt-tokens-details"]
        if connected:
            config = {
                "kv_connector": "LMCacheMPConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"lmcache.mp.port": self.port},
            }
            arguments += ["--kv-transfer-config", json.dumps(config)]
        environment = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": str(CACHE / "vllm"),
            "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache
            "VLLM_CPU_CI_ENV": "1",  # no warm-up for shapes that a demo does not meet
            # With a connector, vLLM would reserve one more core, and the times would not be comparable.
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "LMCACHE_RUNTIME_DIR": self.runtime_dir,
        }
        log = LOGS / f"demo-{name.replace(' ', '-')}.log"
        return Service(name, arguments, environment, log, port, "/health")

    @contextlib.contextmanager
    def vllm(self, name: str, connected: bool = True) -> Iterator[Service]:
        say(f"starting {name} ...")
        start = time.monotonic()
        with start_and_wait(lambda: self.start_vllm(name, connected), VLLM_TIMEOUT_S) as service:
            ask(service, WARM_UP)
            say(f"  ready, {time.monotonic() - start:.0f} s")
            yield service
            say(f"stopping {name}")

    def collect_references(self) -> None:
        """Hold the conversation with a vLLM that has no connector and nothing cached."""
        with self.vllm("vLLM without connector", connected=False) as vllm:
            for number, question in enumerate(QUESTIONS, start=1):
                self.conversation.append({"role": "user", "content": question})
                forget_own_cache(vllm)
                answer = ask(vllm, self.conversation)
                if answer.cached_tokens:
                    raise DemoError("the reference was not computed from nothing: its cache reset failed")
                self.references.append(answer)
                self.conversation.append({"role": "assistant", "content": answer.text})
                say(f"  turn {number}: {answer.prompt_tokens} tokens, {answer.first_token_s:.1f} s to first")
                say(f"    {answer.text!r}")
            say("  (A model this small makes things up. What counts is that the texts stay the same.)")

    def hits(self) -> int:
        """Tokens that the server has served so far."""
        assert self.server is not None
        for line in self.server.get("/metrics").splitlines():
            if line.startswith(HITS):
                return int(float(line.removeprefix(HITS)))
        raise DemoError(f"lmcache server's /metrics has no {HITS}")

    def turn(self, vllm: Service, number: int, step: str, must_be_served: bool) -> None:
        """Send the conversation up to turn `number` and add its row."""
        before = self.hits()
        answer = ask(vllm, self.conversation[: 2 * number - 1])
        # A hit that vLLM could not use does not count as served.
        served = min(self.hits() - before, answer.cached_tokens)
        row = Row(f"turn {number}, {step}", answer, self.references[number - 1], served, must_be_served)
        self.rows.append(row)
        say(f"  {row.step}: {served} of {answer.prompt_tokens} tokens from the server")

    def run(self) -> None:
        self.collect_references()
        say("starting lmcache server ...")
        with contextlib.ExitStack() as stack:
            self.server = stack.enter_context(start_and_wait(self.start_server, SERVER_TIMEOUT_S))
            with self.vllm("vLLM with connector") as vllm:
                self.turn(vllm, 1, "nothing cached anywhere", must_be_served=False)
                forget_own_cache(vllm)
                self.turn(vllm, 1, "vLLM's own cache was reset", must_be_served=True)
                self.turn(vllm, 2, "the conversation goes on", must_be_served=False)
            with self.vllm("vLLM started again") as vllm:
                self.turn(vllm, 2, "vLLM was stopped and started", must_be_served=True)
                self.turn(vllm, 3, "the conversation goes on", must_be_served=False)
                with self.vllm("second vLLM process") as second:
                    self.turn(second, 3, "second vLLM process", must_be_served=True)


def table(rows: list[Row]) -> str:
    """The rows as aligned columns."""
    lines = [
        ("", "prompt", "from the", "from vLLM's", "first", "first token", "same text as"),
        ("request", "tokens", "server", "own cache", "token", "without", "without"),
    ]
    for row in rows:
        own = row.answer.cached_tokens - row.served_tokens
        lines.append(
            (
                row.step,
                str(row.answer.prompt_tokens),
                str(row.served_tokens),
                str(own),
                f"{row.answer.first_token_s:.2f} s",
                f"{row.reference.first_token_s:.2f} s",
                "yes" if row.is_equal else "NO",
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    rule = "-" * len(shown[0])
    return "\n".join([*shown[:2], rule, *shown[2:]])


def conclusion(rows: list[Row]) -> str:
    if all(row.is_good for row in rows):
        return "Every text is the same, and the server served each request it had to."
    lines = []
    for row in rows:
        if not row.is_equal:
            lines.append(f"The text differs in: {row.step}")
            lines.append(f"  with the server: {row.answer.text!r}")
            lines.append(f"  without:         {row.reference.text!r}")
        if row.must_be_served and not row.served_tokens:
            lines.append(f"The server served nothing in: {row.step}")
    return "\n".join(["FAILED", *lines])


def prepared_model() -> Path:
    models = CACHE / "models"
    if path := demo_model.model_directory(models):
        return path
    say(f"converting {demo_model.NAME} to safetensors, once (about a minute) ...")
    log = LOGS / "demo-convert.log"
    try:
        return demo_model.convert_into(models, log)
    except subprocess.CalledProcessError:
        raise DemoError(
            f"the conversion failed: see {log}\n{log.read_text(errors='replace')[-2000:]}"
        ) from None


def with_cleanup(action: Callable[[str], None]) -> None:
    """Run `action` with a temporary runtime directory. The first SIGTERM or Ctrl-C stops it cleanly."""

    def interrupt(number: int, frame: object) -> None:
        # From here on children are being stopped; a second signal must not leave some behind.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)
    runtime_dir = tempfile.mkdtemp(prefix="lmcache-demo-", dir="/tmp")
    try:
        action(runtime_dir)
    finally:
        shutil.rmtree(runtime_dir, ignore_errors=True)


def main() -> int:
    start = time.monotonic()
    rows: list[Row] = []
    LOGS.mkdir(parents=True, exist_ok=True)

    def action(runtime_dir: str) -> None:
        demo = Demo(prepared_model(), runtime_dir)
        demo.run()
        rows.extend(demo.rows)

    try:
        with_cleanup(action)
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted, everything it started is stopped", file=sys.stderr)
        return 130
    print(f"\n{table(rows)}\n\n{conclusion(rows)}")
    print(f"{time.monotonic() - start:.0f} s in all; logs in {LOGS}")
    return 0 if all(row.is_good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
