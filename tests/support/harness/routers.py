"""Routers that other projects wrote, as child processes, and what they say about their decisions."""

import json
import os
import re
import sys
import urllib.request
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from harness import tools
from harness.api_server import ApiServer
from harness.paths import ROUTERS
from harness.processes import ChildProcess, free_port
from harness.waiting import PATIENCE_S, answers

START_TIMEOUT_S = PATIENCE_S
COLOURS = re.compile(rb"\x1b\[[0-9;]*m")


def needs(package: str) -> None:
    if not (ROUTERS / package).is_dir():
        tools.missing(f"needs {ROUTERS / package}, which `make test` installs")


def post(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def ask(url: str, prompt: str, max_tokens: int = 2) -> str:
    question = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    text: str = post(f"{url}/v1/completions", question)["choices"][0]["text"]
    return text


class Router:
    """A program in front of engines. A context manager."""

    CREDITED = b""
    """What its log says of a request that it sends where the beginning of the prompt is."""

    def __init__(self, name: str, port: int, ready: str, *command: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._ready = f"{self.url}/{ready}"
        environment = {**os.environ, "PYTHONPATH": str(ROUTERS), "RUST_LOG": "debug", "NO_COLOR": "1"}
        self._process = ChildProcess(name, [sys.executable, "-m", *command], environment)

    def __enter__(self) -> Self:
        self._process.wait_until_ready(lambda: answers(self._ready), START_TIMEOUT_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.__exit__(kind, error, trace)

    def credits(self) -> list[int]:
        """The credits that it has given so far, in its own unit."""
        return [
            int(found)
            for found in re.findall(self.CREDITED, COLOURS.sub(b"", self._process.log.read_bytes()))
        ]

    def ask(self, prompt: str, max_tokens: int = 2) -> str:
        return ask(self.url, prompt, max_tokens)


class DynamoIndexer(Router):
    """`python -m dynamo.indexer` of ai-dynamo-runtime, which listens to one engine. With `replay_port`
    it asks for the messages that it has missed."""

    def __init__(self, events_port: int, block_size: int, replay_port: int = 0) -> None:
        port = free_port()
        super().__init__("dynamo.indexer", port, "workers", "dynamo.indexer", "--port", str(port))
        self._worker = {
            "instance_id": 1,
            "endpoint": f"tcp://127.0.0.1:{events_port}",
            "model_name": "tiny",
            "block_size": block_size,
            **({"replay_endpoint": f"tcp://127.0.0.1:{replay_port}"} if replay_port else {}),
        }

    def __enter__(self) -> Self:
        super().__enter__()
        assert post(f"{self.url}/register", self._worker) == {"status": "ok"}
        return self

    def tokens(self, prompt: Sequence[int]) -> tuple[int, int]:
        """How many leading tokens of a prompt the GPU has, and how many the GPU and the CPU have together."""
        answer = post(f"{self.url}/query", {"model_name": "tiny", "token_ids": list(prompt)})
        found = answer["instances"].get("1", {"gpu": 0, "cpu": 0})
        return found["gpu"], found["cpu"]


class VllmRouter(Router):
    """vllm-router in front of engines whose events come from these ports."""

    CREDITED = rb"KV prefix decision .*credited_prefix_tokens=(\d+)"

    def __init__(self, engines: Sequence[ApiServer], events_ports: Sequence[int], block_size: int) -> None:
        port = free_port()
        flags = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
        # A prefix in a server counts as much as one on the GPU, so that the log has its length.
        flags += ["--policy", "kv_aware", "--kv-penalty-host", "1.0", "--log-level", "debug"]
        flags += ["--kv-event-model", "tiny", "--kv-event-block-size", str(block_size)]
        for engine, events_port in zip(engines, events_ports, strict=True):
            flags += ["--kv-event-source", f"{engine.url}=tcp://127.0.0.1:{events_port}"]
        urls = [engine.url for engine in engines]
        super().__init__(
            "vllm-router", port, "health", "vllm_router.launch_router", *flags, "--worker-urls", *urls
        )


class PrefillDecodeRouter(Router):
    """vllm-router, which has one engine compute each prompt, and another one go on from there."""

    def __init__(self, prefill: ApiServer, decode: ApiServer) -> None:
        port = free_port()
        flags = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
        flags += ["--vllm-pd-disaggregation", "--kv-connector", "nixl"]
        flags += ["--prefill", prefill.url, "--decode", decode.url]
        super().__init__("vllm-router", port, "health", "vllm_router.launch_router", *flags)
