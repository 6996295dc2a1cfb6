"""What a router gains by the connector's KV events: `PYTHONPATH=tests/support python benchmarks/routing.py`.

Two engines of the demo's model have a server each, as on two hosts. Each computes its prompts and evicts most of
them. Then a router gets all prompts again, in three arms: it hears all events, only vLLM's own, or sends by turns.
Prints a Markdown table. Needs the routers that `make test` installs, and some three minutes on two processors.
"""

import itertools
import json
import random
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

import msgspec
import zmq

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests" / "support")]

import demo_model  # noqa: E402
from harness.api_server import ApiServer  # noqa: E402
from harness.paths import LOGS, MODELS  # noqa: E402
from harness.processes import free_port  # noqa: E402
from harness.routers import Router, VllmRouter, post  # noqa: E402
from harness.server import LMCacheServer  # noqa: E402

BLOCK, PROMPTS, ROUNDS = 32, 12, 2
WORDS = (ROOT / "scripts" / "demo_text.txt").read_text(encoding="utf-8").split()
CHOOSE = random.Random(int(sys.argv[1]) if len(sys.argv) > 1 else 0)


class WithoutOurs(threading.Thread):
    """Publishes at `port` what an engine publishes, without the events of medium CPU."""

    def __init__(self, events_port: int) -> None:
        super().__init__(daemon=True)
        self.port = free_port()
        self.announced = 0
        """Blocks that are stored in medium CPU, so far."""
        self._from, self._to = (zmq.Context.instance().socket(kind) for kind in (zmq.SUB, zmq.PUB))
        self._from.connect(f"tcp://127.0.0.1:{events_port}")
        self._from.subscribe(b"")
        self._to.bind(f"tcp://127.0.0.1:{self.port}")
        self.start()

    def run(self) -> None:
        while True:
            topic, number, payload = self._from.recv_multipart()
            batch = msgspec.msgpack.decode(payload)
            ours = [event for event in batch[1] if event.get("medium") == "CPU"]
            batch[1] = [event for event in batch[1] if event not in ours]
            self.announced += sum(len(each["block_hashes"]) for each in ours if each["type"] == "BlockStored")
            self._to.send_multipart([topic, number, msgspec.msgpack.encode(batch)])


def ask(url: str, prompt: str) -> tuple[str, int, int]:
    """The first token of the answer, and how many tokens the prompt has and were cached."""
    question = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    answer = post(f"{url}/v1/completions", question)
    usage = answer["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return answer["choices"][0]["text"], usage["prompt_tokens"], cached


def prompts(count: int) -> list[str]:
    """Prompts of some 980 tokens that begin differently."""
    return [" ".join(CHOOSE.sample(WORDS, 640)) for _ in range(count)]


def settle(engines: list[ApiServer]) -> None:
    """Lets each engine take steps, which publish its events, and the routers apply them."""
    for _ in range(3):
        for engine in engines:
            ask(engine.url, "Hello!")
        time.sleep(0.5)


@dataclass
class Arm:
    """What was measured of one way to send requests; `urls` take them by turns."""

    name: str
    urls: list[str]
    tokens: int = 0
    cached: int = 0
    served: int = 0
    """By the servers; the rest of what is cached was on the engines."""
    seconds: list[float] = field(default_factory=list)

    def run(self, engines: list[ApiServer]) -> None:
        asked, owners = prompts(PROMPTS), [index % 2 for index in range(PROMPTS)]
        CHOOSE.shuffle(owners)
        computed = [ask(engines[owner].url, each)[0] for owner, each in zip(owners, asked, strict=True)]
        settle(engines)
        before = sum(engine.server.tokens() for engine in engines)
        for url, each, right in zip(itertools.cycle(self.urls), asked, computed, strict=False):
            start = time.monotonic()
            text, length, hit = ask(url, each)
            self.seconds.append(time.monotonic() - start)
            assert text == right
            self.tokens += length
            self.cached += hit
        self.served += sum(engine.server.tokens() for engine in engines) - before

    def row(self) -> str:
        shares = (f"{each / self.tokens:.0%}" for each in (self.cached, self.served))
        return f"| {self.name} | {' | '.join(shares)} | {mean(self.seconds):.2f} s |"


def main() -> None:
    LOGS.mkdir(parents=True, exist_ok=True)
    model = demo_model.model_directory(MODELS) or demo_model.convert_into(MODELS, LOGS / "demo-convert.log")
    with ExitStack() as stack:
        engines, ports = [], [free_port(), free_port()]
        for port in ports:
            config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}"}
            flags = ["--kv-events-config", json.dumps(config), "--block-size", str(BLOCK)]
            flags += ["--num-gpu-blocks-override", "40", "--max-model-len", "1200", "--enable-scale-out"]
            flags += ["--served-model-name", "tiny", "--enable-prompt-tokens-details"]
            server = stack.enter_context(LMCacheServer(l1_size_gb=2, chunk_size=256))
            engines.append(stack.enter_context(ApiServer(str(model), server, *flags, text=True)))
        others = [WithoutOurs(port) for port in ports]
        hears_all: Router = stack.enter_context(VllmRouter(engines, ports, BLOCK))
        hears_vllm = stack.enter_context(VllmRouter(engines, [each.port for each in others], BLOCK))
        settle(engines)
        arms = [
            Arm("hears all events", [hears_all.url]),
            Arm("hears vLLM's own events", [hears_vllm.url]),
            Arm("sends by turns", [engine.url for engine in engines]),
        ]
        for each in arms * ROUNDS:
            each.run(engines)
    print("| the router | tokens of prompts that were cached | by the servers | mean time to first token |")
    print("|---|---|---|---|")
    print("\n".join(each.row() for each in arms))


if __name__ == "__main__":
    main()
