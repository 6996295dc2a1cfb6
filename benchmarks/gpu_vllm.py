"""What a real vLLM saves on a GPU, as Markdown: time to the first token of a prompt that the server has, beside
that of a prompt that nobody has, that vLLM itself has, and that vLLM's own offloading has; and what the
connector costs a decode step. The model has random weights, which vLLM makes on the GPU. `make bench-gpu-vllm`.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.engine import Engine
from harness.prompts import prompt
from harness.server import LMCacheServer

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "vocab_size": 32000, "dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "max_position_embeddings": 131072, "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip
"""The shape of Llama 3.1 8B, with a smaller vocabulary."""
ENGINE = {
    "load_format": "dummy", "max_model_len": 70_000, "max_num_seqs": 64, "max_num_batched_tokens": 8192,
    "kv_cache_memory_bytes": 14 << 30, "gpu_memory_utilization": 0.85,
}  # fmt: skip
# A few tokens more than whole chunks of 256, so that both caches resume at the same token.
LENGTHS = tuple(256 * chunks + 8 for chunks in (8, 32, 125, 250))
SYSTEMS = ("nothing", "lmcache-mp", "vLLM's offloading")
REPEATS = 5


@contextmanager
def started(name: str, model: str, l1_gb: float, options: dict[str, Any]) -> Iterator[Engine]:
    if name == "lmcache-mp":
        with (
            LMCacheServer(l1_size_gb=l1_gb, checksums=False) as server,
            Engine(model, server=server, **options) as engine,
        ):
            server.wait_until(lambda l1: l1["pinned_bytes"] == l1["total_bytes"], 120)
            yield engine
    else:
        extra = {"cpu_bytes_to_use": int(l1_gb * 1e9)}
        connector = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
        with Engine(model, connector=connector if name != "nothing" else None, **options) as engine:
            yield engine


def answered(engine: Engine, tokens: list[int]) -> tuple[float, Any]:
    """Seconds to the first token of a prompt alone, and the answer."""
    start = time.perf_counter()
    result = engine.run(tokens, 1, settle=False)
    taken_s = time.perf_counter() - start
    engine.settle()
    return taken_s, result


def first_tokens(engine: Engine, is_cached: bool) -> list[tuple[Any, ...]]:
    rows = []
    for length in LENGTHS:
        computed, own, restored, restored_tokens, is_equal = [], [], [], 0, True
        for repeat in range(REPEATS):
            tokens = prompt(length, 100 * length + repeat)
            computed.append(answered(engine, tokens)[0])
            local_s, local = answered(engine, tokens)
            own.append(local_s)
            if is_cached:
                assert engine.reset_prefix_cache()
                taken_s, result = answered(engine, tokens)
                restored.append(taken_s)
                restored_tokens = result.external_tokens
                is_equal &= (result.external_tokens, result.output) == (local.local_tokens, local.output)
        rows.append((length, computed, own, restored, restored_tokens, is_equal))
    return rows


def decode_ms(engine: Engine) -> float:
    """Of a step of 32 requests, from what 160 more tokens each take."""
    prompts = [prompt(500, 7000 + number) for number in range(32)]
    taken = []
    for tokens in (16, 176, 16, 176, 16, 176):
        start = time.perf_counter()
        engine.generate(prompts, tokens, logprobs=None, settle=False)
        taken.append(time.perf_counter() - start)
        engine.settle()
    return 1e3 * min(long - short for short, long in zip(taken[2::2], taken[3::2], strict=True)) / 160


def milliseconds(values: list[float]) -> str:
    return f"{1e3 * statistics.median(values):.0f}" if values else "-"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--systems", default=",".join(SYSTEMS))
    options.add_argument("--l1-gb", type=float, default=24)
    options.add_argument(
        "--graphs", action="store_true", help="decode with CUDA graphs, as vLLM does by default"
    )
    chosen = options.parse_args()
    graphs = {"enforce_eager": False, "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
    print(
        "| cache | tokens | computed, ms | vLLM's prefix cache, ms | restored, ms | tokens restored | same answer |"
    )
    print("|---|---|---|---|---|---|---|", flush=True)
    steps = []
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(MODEL))
        for system in chosen.systems.split(","):
            settings = ENGINE | (graphs if chosen.graphs else {})
            with started(system, directory, chosen.l1_gb, settings) as engine:
                answered(engine, prompt(3000, 1))
                for length, computed, own, restored, restored_tokens, is_equal in first_tokens(
                    engine, system != "nothing"
                ):
                    equal = ("yes" if is_equal else "NO") if restored else "-"
                    figures = " | ".join(map(milliseconds, (computed, own, restored)))
                    print(f"| {system} | {length} | {figures} | {restored_tokens} | {equal} |", flush=True)
                steps.append((system, f"{decode_ms(engine):.2f}"))
    print("\n| cache | decode step of 32 requests, ms |\n|---|---|")
    for row in steps:
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
