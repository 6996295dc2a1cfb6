"""`make demo`: a real model, served by vLLM, whose KV cache outlives resets, restarts and engines.

The demo sends a conversation about a long text to vLLM's OpenAI server. The first vLLM has no connector and
nothing cached: its texts and times are the reference. The references come first because each later turn
sends their answers as part of its prompt, and each answer is compared as soon as it comes. Then follow vLLM
processes that share one `lmcache server`, one of them with a hybrid model. At last the server is killed.
Requests go one at a time, because vLLM's numerics depend on the batch. Processes start side by side, because
a start takes longer than most requests. Nothing is timed meanwhile.
"""

import contextlib
import itertools
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import demo_model
from demo_processes import DemoError, Service, free_port, say, start_and_wait
from demo_report import Answer, Exact, Row, busy, conclusion, median, progress, table

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests" / "support"))

from harness.models import text_model_path  # noqa: E402
from harness.paths import CACHE, LOGS, MODELS  # noqa: E402
from harness.processes import ONE_THREAD  # noqa: E402

HYBRID = "qwen3next"
"""A tiny model of the tests. Its tokens are bytes."""
# The real model's own is bfloat16, too. A processor without instructions for it takes 60 times as long, and
# with so few bits an answer from any cache differs more often. vLLM's kernels for the hybrid one need it.
DTYPES = {demo_model.NAME: "float32", HYBRID: "bfloat16"}
TEXT = (ROOT / "scripts" / "demo_text.txt").read_text(encoding="utf-8")
QUESTIONS = (
    "Here is a text. Read it, then tell me in one sentence what it is about.\n\n" + TEXT,
    "Who was the first keeper of the lighthouse?",
    "What did Ruth Marsh do during the great storm?",
)
WARM_UP = [{"role": "user", "content": "Hello!"}]
"""The first request to an engine is always slow. This one is too short to be looked up or stored."""
ANSWER_TOKENS = 40
REPEATS = 3
"""How often the time of a request is measured, if it can be measured again."""
STEPS = 7
OPENING = f"""\
In {STEPS} steps, a real model answers questions about a long text: in vLLM alone, then with `lmcache server`.
A hybrid model joins, vLLM is restarted, and at last the server is killed. This takes about four
minutes on two quiet processors (the first time, one more) and needs no GPU.
The model has 135M parameters and is often wrong. What counts is that the cache never changes an answer.
"""
NEXT = """\
Your own vLLM can do this now:
  pip install .                       in its environment
  lmcache server --l1-size-gb 4       status page: http://127.0.0.1:8080
  vllm serve MODEL --kv-transfer-config '{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both"}'
  lmcache verify http://127.0.0.1:8000
With other models and prompts an answer may differ in rare cases, as it may with vLLM's own prefix cache: vLLM
computes only the rest of a prompt, and may round otherwise. `lmcache verify` tells this from a fault.
docs/laptop.md does the demo's steps by hand.\
"""
HYBRID_PROMPT = TEXT[:1800]
VLLM_TIMEOUT_S = 300.0
ALONE, FIRST, WITH_HYBRID, AGAIN, SECOND = (
    *("vLLM without connector", "vLLM with connector", "vLLM with a hybrid model"),
    *("vLLM again", "second vLLM"),
)
VLLMS = {
    ALONE: (ALONE, demo_model.NAME, False),
    WITH_HYBRID: (WITH_HYBRID, HYBRID, True),
    **{name: (name, demo_model.NAME, True) for name in (FIRST, AGAIN, SECOND)},
}
"""Names, models, and whether they have the connector."""
SERVER_TIMEOUT_S = 30.0
RESET_TIMEOUT_S = 30.0
HITS = re.compile(r'^lmcache_tokens_total\{.*outcome="hit".*\} (\S+)$', re.MULTILINE)

Message = dict[str, str]


def ask(vllm: Service, messages: list[Message], tokens: int = ANSWER_TOKENS) -> Answer:
    """Send a conversation and stream the answer. Raises DemoError."""
    body = {
        "model": demo_model.NAME,
        "messages": messages,
        "temperature": 0,
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start = time.monotonic()
    first_token_s = 0.0
    parts: list[str] = []
    usage: dict[str, Any] = {}
    with readable(vllm):
        for line in vllm.post("/v1/chat/completions", body):
            data = line.strip().removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise vllm.failure(f"failed: {event['error']}")
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                if text := choice["delta"].get("content"):
                    first_token_s = first_token_s or time.monotonic() - start
                    parts.append(text)
        return Answer("".join(parts), first_token_s, usage["prompt_tokens"], cached_tokens(usage))


def complete(vllm: Service, prompt: str) -> Answer:
    """The answer to a prompt, with the log probabilities of each token and its rivals. Raises DemoError."""
    body = {"prompt": prompt, "temperature": 0, "max_tokens": ANSWER_TOKENS, "logprobs": 5}
    start = time.monotonic()
    with readable(vllm):
        found = json.loads("".join(vllm.post("/v1/completions", {"model": demo_model.NAME, **body})))
        choice, usage = found["choices"][0], found["usage"]
        seconds, cached = time.monotonic() - start, cached_tokens(usage)
        return Answer(choice["text"], seconds, usage["prompt_tokens"], cached, choice["logprobs"])


def cached_tokens(usage: dict[str, Any]) -> int:
    return (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


@contextlib.contextmanager
def readable(service: Service) -> Iterator[None]:
    """Raises DemoError if the answer that is read here is cut off or is none."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise service.failure(f"sent an answer that the demo cannot read ({error!r})") from None


def forget_own_cache(vllm: Service) -> None:
    """Reset vLLM's own prefix cache, so that only the server can have cached pages. Raises DemoError."""
    deadline = time.monotonic() + RESET_TIMEOUT_S
    while time.monotonic() < deadline:
        with readable(vllm):
            if json.loads("".join(vllm.post("/reset_prefix_cache", {})))["success"]:
                return
        time.sleep(0.1)
    raise vllm.failure(f"did not reset its prefix cache within {RESET_TIMEOUT_S} s")


class Demo:
    """Starts the processes, holds the conversation and collects the rows of the table."""

    def __init__(self, models: dict[str, Path], runtime_dir: str) -> None:
        """`models` are directories by the names in demo_model."""
        self.models = models
        self.runtime_dir = runtime_dir
        self.port = free_port()
        self.rows: list[Row] = []
        self.references: list[Answer] = []
        self.conversation: list[Message] = []
        self.server: Service | None = None
        self.hybrid: Exact | None = None
        self._steps = itertools.count(1)

    def step(self, what: str) -> None:
        say(f"[{next(self._steps)}/{STEPS}] {what}")

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

    def start_vllm(self, name: str, model: str, connected: bool) -> Service:
        port = free_port()
        arguments = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(self.models[model])]
        arguments += ["--served-model-name", demo_model.NAME, "--host", "127.0.0.1", "--port", str(port)]
        arguments += ["--dtype", DTYPES[model], "--max-model-len", "4096", "--max-num-seqs", "4"]
        arguments += ["--kv-cache-memory-bytes", str(256 << 20), "--enforce-eager"]
        arguments += ["--enable-prompt-tokens-details", "--distributed-executor-backend", "uni"]
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
            # The worker runs in the engine's process: one import of vLLM less.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "TORCH_COMPILE_DISABLE": "1",  # a compiler for log probabilities alone
            **ONE_THREAD,
            "LMCACHE_RUNTIME_DIR": self.runtime_dir,
        }
        log = LOGS / f"demo-{name.replace(' ', '-')}.log"
        return Service(name, arguments, environment, log, port, "/health")

    @contextlib.contextmanager
    def vllms(self, *names: str) -> Iterator[list[Service]]:
        """Ready vLLM processes that were started side by side. They end in the reverse order."""
        say(f"  starting {', '.join(names)} ...")
        start = time.monotonic()
        with contextlib.ExitStack() as stack:
            started = [stack.enter_context(self.start_vllm(*VLLMS[name])) for name in names]
            for vllm, name in zip(started, names, strict=True):
                vllm.wait_until_ready(VLLM_TIMEOUT_S)
                if VLLMS[name][1] == demo_model.NAME:
                    ask(vllm, WARM_UP)
            say(f"  ready, {time.monotonic() - start:.0f} s")
            yield started
            say(f"  stopping {', '.join(names)}")
            for vllm in started:
                vllm.terminate()

    def collect_references(self, vllm: Service) -> None:
        """Hold the conversation with a vLLM that has no connector and nothing cached."""
        for number, question in enumerate(QUESTIONS, start=1):
            self.conversation.append({"role": "user", "content": question})
            # The time to the first token is measured again, the rest of the answer is not.
            answers = [ask(vllm, self.conversation)]
            text = answers[0].text
            for _ in range(REPEATS - 1):
                forget_own_cache(vllm)
                answers.append(ask(vllm, self.conversation, 1))
            if any(each.cached_tokens for each in answers):
                raise DemoError("the reference was not computed from nothing: its cache reset failed")
            answer = replace(median(answers), text=text)
            self.references.append(answer)
            self.conversation.append({"role": "assistant", "content": text})
            tokens = answer.prompt_tokens
            say(f"  turn {number}: {tokens} tokens, first token after {answer.first_token_s:.2f} s")
            say(f"    {text!r}")
            forget_own_cache(vllm)

    def hits(self) -> int:
        """Tokens that the server has served so far."""
        assert self.server is not None
        found = HITS.findall(self.server.get("/metrics"))
        if not found:
            raise DemoError("lmcache server's /metrics has no lmcache_tokens_total")
        return int(sum(map(float, found)))

    def turn(self, vllm: Service, number: int, step: str, proves: str = "", is_alone: bool = False) -> None:
        """Send the conversation up to turn `number` and add its row. `is_alone`: the server is dead."""
        answers, served = [], []
        for _ in range(REPEATS if proves else 1):
            if answers:
                forget_own_cache(vllm)
            before = 0 if is_alone else self.hits()
            answers.append(ask(vllm, self.conversation[: 2 * number - 1]))
            # A hit that vLLM could not use does not count as served.
            served.append(0 if is_alone else min(self.hits() - before, answers[-1].cached_tokens))
        reference = self.references[number - 1]
        row = Row(f"turn {number}, {step}", median(answers, reference.text), reference, min(served), proves)
        self.rows.append(row)
        say(progress(row))

    def compare_hybrid(self, vllm: Service) -> None:
        """Let the hybrid model's answer be computed, taken from vLLM's own cache, and served."""
        computed = complete(vllm, HYBRID_PROMPT)
        own = complete(vllm, HYBRID_PROMPT)
        forget_own_cache(vllm)
        before = self.hits()
        served = complete(vllm, HYBRID_PROMPT)
        self.hybrid = Exact(computed, own, served, min(self.hits() - before, served.cached_tokens))
        say(f"  {self.hybrid}")

    def run(self) -> None:
        with contextlib.ExitStack() as stack:
            self.step("lmcache server, and three vLLM processes: alone, with the server, with a hybrid model")
            self.server = stack.enter_context(start_and_wait(self.start_server, SERVER_TIMEOUT_S))
            say(f"  its status page, while the demo runs: http://127.0.0.1:{self.server.port}")
            with self.vllms(ALONE, FIRST, WITH_HYBRID) as (alone, first, with_hybrid):
                self.step("vLLM alone: each answer is computed from nothing. The others must equal it")
                self.collect_references(alone)
                self.step("vLLM with the server: its own cache forgets, the server does not")
                self.turn(first, 1, "nothing cached anywhere")
                forget_own_cache(first)
                self.turn(first, 1, "vLLM's cache was reset", "after vLLM forgot the prompt")
                self.turn(first, 2, "conversation goes on")
                self.step("a hybrid model: full attention and recurrent layers, tiny random weights")
                self.compare_hybrid(with_hybrid)
            self.step("all vLLM processes were stopped: a new one finds what an old one computed")
            with self.vllms(AGAIN, SECOND) as (again, second):
                self.turn(again, 2, "vLLM was restarted", "after vLLM was restarted")
                self.turn(again, 3, "conversation goes on")
                self.step("the vLLM process beside it")
                self.turn(second, 3, "second vLLM process", "in another vLLM process")
                self.step("the server is killed (-9), and vLLM's own cache reset: vLLM computes the answer")
                forget_own_cache(second)
                self.server.kill()
                self.turn(second, 3, "the server was killed", is_alone=True)


def prepared_models() -> dict[str, Path]:
    """The directories of both models, which are made the first time. Raises DemoError."""
    log = LOGS / "demo-convert.log"
    real = demo_model.model_directory(MODELS)
    try:
        if real is None:
            say(f"converting {demo_model.NAME} to safetensors, once (about a minute) ...")
            real = demo_model.convert_into(MODELS, log)
        if not any(MODELS.glob(f"tiny-{HYBRID}-*-text")):
            say("making the hybrid model, once (some 15 seconds) ...")
        return {demo_model.NAME: real, HYBRID: text_model_path(HYBRID)}
    except subprocess.CalledProcessError:
        last = log.read_text(errors="replace").strip().rpartition("\n")[2]
        raise DemoError(f"the conversion of the model failed: {last}\nSee {log}") from None
    except RuntimeError as error:
        raise DemoError(str(error).strip().rpartition("\n")[2]) from None


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
    demos: list[Demo] = []
    LOGS.mkdir(parents=True, exist_ok=True)
    say(OPENING)

    def action(runtime_dir: str) -> None:
        demos.append(Demo(prepared_models(), runtime_dir))
        demos[0].run()

    try:
        with_cleanup(action)
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted, everything it started is stopped", file=sys.stderr)
        return 130
    rows, hybrid = demos[0].rows, demos[0].hybrid
    assert hybrid is not None
    print(f"\n{table(rows)}\n\n{conclusion(rows, hybrid)}\n{busy(rows)}")
    print(f"{time.monotonic() - start:.0f} s, without the installation; logs in {LOGS}")
    if not (all(row.is_good for row in rows) and hybrid.is_good):
        return 1
    print(NEXT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
