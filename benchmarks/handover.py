"""What prefill and decode apart cost: `PYTHONPATH=tests/support python benchmarks/handover.py`.

Two engines of the demo's model have a server each, and the servers share a Valkey. New prompts of each length are
answered in three ways, by turns: by one engine; by both, the second waiting for what the first has stored; by both,
the second computing the prompt again. Prints a Markdown table of medians. The two engines take turns on the same
processors, as on one machine: the time of a network between hosts is not in the figures. Takes some five minutes on
two processors.
"""

import random
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests" / "support")]

import demo_model  # noqa: E402
from harness import stores  # noqa: E402
from harness.api_server import ApiServer  # noqa: E402
from harness.paths import LOGS, MODELS  # noqa: E402
from harness.routers import post  # noqa: E402
from harness.server import LMCacheServer  # noqa: E402
from harness.waiting import wait_until  # noqa: E402

LENGTHS, ROUNDS, TOP_ID = (600, 1100, 2100, 4200), 5, 40_000
"""Prompts of so many tokens, of ids below TOP_ID; an uneven number of each, for a median."""
REMOTE = {"do_remote_decode": True, "do_remote_prefill": False}
CHOOSE = random.Random(int(sys.argv[1]) if len(sys.argv) > 1 else 0)


class Answer(NamedTuple):
    seconds: float
    token: str
    cached: int
    transfer: dict[str, Any] | None


def ask(engine: ApiServer, prompt: list[int], transfer: dict[str, Any] | None = None) -> Answer:
    """The first token of the answer."""
    question = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    start_s = time.monotonic()
    answer = post(f"{engine.url}/v1/completions", question | {"kv_transfer_params": transfer})
    seconds = time.monotonic() - start_s
    details = answer["usage"].get("prompt_tokens_details") or {}
    token = answer["choices"][0]["text"]
    return Answer(seconds, token, details.get("cached_tokens") or 0, answer.get("kv_transfer_params"))


def rests(server: LMCacheServer) -> bool:
    return not any(tier["waiting_objects"] for tier in server.status()["tiers"])


class Times:
    """Of prompts of one length, in seconds."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.alone: list[float] = []
        self.prefill: list[float] = []
        self.decode: list[float] = []
        self.again: list[float] = []
        self.different = 0

    def measure(self, prefill: ApiServer, decode: ApiServer) -> None:
        ways: list[Callable[[], None]] = [
            lambda: self.alone.append(ask(prefill, new_prompt(self.length)).seconds),
            lambda: self.apart(prefill, decode),
            lambda: self.again.append(ask(decode, new_prompt(self.length)).seconds),
        ]
        CHOOSE.shuffle(ways)
        for way in ways:
            way()
            # What is still being written would slow the next one down.
            wait_until(lambda: rests(prefill.server) and rests(decode.server))

    def apart(self, prefill: ApiServer, decode: ApiServer) -> None:
        prompt = new_prompt(self.length)
        first = ask(prefill, prompt, REMOTE)
        wanted = (self.length - 1) // CHUNK * CHUNK
        assert first.transfer == {"lmcache.wait_tokens": wanted}, first
        second = ask(decode, prompt, first.transfer)
        assert second.cached == wanted, second
        self.prefill.append(first.seconds)
        self.decode.append(second.seconds)
        self.different += ask(prefill, prompt).token != second.token

    def row(self) -> str:
        alone, prefill, decode, again = (
            median(each) for each in (self.alone, self.prefill, self.decode, self.again)
        )
        cells = (
            f"{self.length:,}", f"{alone:.2f} s", f"{prefill:.2f} s", f"{decode:.2f} s",
            f"{(prefill + decode) / alone:.2f}", f"{(prefill + again) / alone:.2f}",
        )  # fmt: skip
        return f"| {' | '.join(cells)} |"


CHUNK = 256


def new_prompt(length: int) -> list[int]:
    return [CHOOSE.randrange(1, TOP_ID) for _ in range(length)]


def main() -> None:
    LOGS.mkdir(parents=True, exist_ok=True)
    model = demo_model.model_directory(MODELS) or demo_model.convert_into(MODELS, LOGS / "demo-convert.log")
    with ExitStack() as stack:
        store = stack.enter_context(stores.valkey(Path(stack.enter_context(TemporaryDirectory()))))
        tier = f"valkey://127.0.0.1:{store.port}?write=commit"
        flags = ["--served-model-name", "tiny", "--enable-prompt-tokens-details", "--max-model-len", "4608"]
        # vLLM's own hits end where ours do, so that the first tokens must be the same.
        flags += ["--block-size", str(CHUNK), "--kv-cache-memory-bytes", str(512 << 20)]
        engines = []
        for _ in range(2):
            server = stack.enter_context(LMCacheServer(l1_size_gb=2, chunk_size=CHUNK, tier=tier))
            waits = {"lmcache.mp.wait_timeout_s": 60}
            engines.append(stack.enter_context(ApiServer(str(model), server, *flags, text=True, **waits)))
        measured = [Times(length) for length in LENGTHS]
        for engine in engines:
            ask(engine, new_prompt(600))
        for _ in range(ROUNDS):
            for each in measured:
                each.measure(*engines)
    print(
        "| tokens | one engine | prefill | decode | both together, times one engine | without the hint, times one engine |"
    )
    print("|---|---|---|---|---|---|")
    print("\n".join(each.row() for each in measured))
    print(f"\n{sum(each.different for each in measured)} first tokens differed.")


if __name__ == "__main__":
    main()
