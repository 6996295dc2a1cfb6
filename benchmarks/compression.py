"""A tier with `compress=auto` beside one with `compress=off`: what the store keeps, and when the first token comes.

The model is the demo's, in bfloat16, and the prompts are this project's documentation. Each setting has a real vLLM
engine with a server, whose L1 holds less than the prompts, and a Valkey of its own. All prompts are asked once and
computed, and then again, always in the same order, so that each comes from the tier. The engines take turns, prompt
by prompt. A proxy lets so many bytes pass in each direction between a server and its store.
"""

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import systems
from engine import prepared_model
from harness import stores
from harness.processes import free_port
from harness.proxy import Proxy
from harness.waiting import get, wait_until
from section import ROOT, Section, median, millis
from systems import Probe

L1_GB = 0.21
PROMPTS, LENGTH, TAIL = 6, 2048, 24
AGAIN = 2
UNCOUNTED = 1
"""Until a server has fetched once, it waits for a fetch only 5 % of the time that computing takes."""
STORES = {200: ("off", "auto"), 0: ("off", "auto")}
"""By MB/s, where 0 is as fast as it comes: the settings."""
MAX_SHARE, MAX_TIME, NOT_SLOWER = 0.70, 0.75, 1.05


class System(NamedTuple):
    engine: Probe
    http_port: int

    def tier(self) -> Any:
        return json.loads(get(f"http://127.0.0.1:{self.http_port}/status"))["tiers"][0]


def prompts(model: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    found = AutoTokenizer.from_pretrained(model)(text)["input_ids"]
    each = LENGTH + TAIL
    return [found[start : start + each] for start in range(0, PROMPTS * each, each)]


@contextlib.contextmanager
def started(model: Path, mb_s: int) -> Iterator[dict[str, System]]:
    with contextlib.ExitStack() as stack:
        found = {}
        for setting in STORES[mb_s]:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            port, http_port = stack.enter_context(stores.valkey(folder, maxmemory="2gb")).port, free_port()
            if mb_s:
                proxy = stack.enter_context(Proxy(port))
                proxy.bytes_per_s, port = mb_s * 1e6, proxy.port
            tier = f"valkey://127.0.0.1:{port}?compress={setting}"
            engine = systems.vllm_with_ours(model, L1_GB, tier=tier, http_port=http_port)
            found[setting] = System(stack.enter_context(engine), http_port)
        yield found


def ask_all(found: dict[str, System], texts: list[list[int]]) -> dict[str, list[dict[str, Any]]]:
    """The answers to all prompts, the engines in turns; who begins changes."""
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in found}
    for number, text in enumerate(texts):
        for name in list(found) if number % 2 else reversed(found):
            engine = found[name].engine
            engine.ask("forget")
            answers[name].append(engine.ask("first_token", prompt=text, max_tokens=4))
            engine.ask("settle")
            wait_until(lambda name=name: not found[name].tier()["waiting_objects"], 120)
    return answers


def measure(section: Section) -> None:
    model = prepared_model()
    texts, rows = prompts(model), []
    for mb_s in STORES:
        store = f"{mb_s} MB/s" if mb_s else "as fast as it comes"
        with started(model, mb_s) as found:
            ask_all(found, [text[:20] for text in texts[:1]])
            first = ask_all(found, texts)
            again = {name: list[dict[str, Any]]() for name in found}
            for _ in range(AGAIN):
                for name, answers in ask_all(found, texts).items():
                    again[name] += answers
            tiers = {name: system.tier() for name, system in found.items()}
        seconds, shares = {}, {}
        for name, tier in tiers.items():
            counted = [each for each in again[name][UNCOUNTED:] if each["cached"] == LENGTH]
            seconds[name] = [each["seconds"] for each in counted]
            shares[name] = tier["stored_bytes"] / tier["written_bytes"]
            differ = sum(
                one["tokens"] != other["tokens"]
                for one, other in zip(first["off"] * (1 + AGAIN), first[name] + again[name], strict=True)
            )
            rate = tier["read_bytes_per_s"] / 1e6
            rows.append(
                [store, name, f"{shares[name]:.2f}", f"{rate:,.0f} MB/s", millis(median(seconds[name]))]
            )
            rows[-1] += [f"{median(seconds[name]) / median(seconds['off']):.2f}"]
            rows[-1] += [f"{len(counted)} of {PROMPTS * AGAIN - UNCOUNTED}", str(differ)]
            print("  ", *rows[-1], flush=True)
        ratio = median(seconds["auto"]) / median(seconds["off"])
        if mb_s:
            share = shares["auto"]
            section.bar(
                f"bytes in the store, auto: ≤ {MAX_SHARE} of the pages", f"{share:.2f}", share <= MAX_SHARE
            )
            section.bar(
                f"first token through {store}, auto: ≤ {MAX_TIME} of off", f"{ratio:.2f}", ratio <= MAX_TIME
            )
        else:
            name = f"first token from a Valkey {store}, auto: ≤ {NOT_SLOWER} of off"
            section.bar(name, f"{ratio:.2f}", ratio <= NOT_SLOWER)
    columns = [
        "store",
        "compress=",
        "bytes ÷ pages",
        "pages restored",
        "first token",
        "÷ off",
        "from the tier",
    ]
    section.table(
        f"{PROMPTS} prompts of {LENGTH + TAIL:,} tokens, asked again {AGAIN} times. `pages restored`: payload that "
        f"fetches brought lately. `first token`: the median of the prompts that came from the tier. `differ`: answers "
        f"of 4 tokens that are not what the engine with `off` computed.",
        [*columns, "differ"],
        rows,
    )


if __name__ == "__main__":
    measured = Section("compression", "Compressed tiers", str(__doc__))
    measure(measured)
    measured.save()
