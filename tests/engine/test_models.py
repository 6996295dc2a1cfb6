"""Each kind of model, in a real vLLM: served from the server, bit for bit what is computed.

Every case states first that tokens came from the server, then that tokens and logprobs are equal.
"""

import random
from collections.abc import Iterator

import pytest
from harness.engine import Engine
from harness.server import LMCacheServer

CASES = {
    "llama": {},
    "gemma3": {},
    "gemma3-32": {"block_size": 32},
    "gemma4": {},
    "gemma4-32": {"block_size": 32},
    "gptoss": {"block_size": 32},
    "llama4": {},
    "llama4-32": {"block_size": 32},
    "qwen3next": {},
    "qwen3next-32": {"block_size": 32},
    "qwen35": {},
    "qwen35-32": {"block_size": 32},
    "falconh1": {"block_size": 128, "max_num_batched_tokens": 128},
}


def prompt(tokens: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randint(3, 500) for _ in range(tokens)]


@pytest.fixture(scope="module")
def server() -> Iterator[LMCacheServer]:
    with LMCacheServer(l1_size_gb=0.5) as running:
        yield running


@pytest.mark.parametrize("case", CASES)
def test_model_is_restored_exactly(server: LMCacheServer, case: str) -> None:
    model = case.removesuffix("-32")
    server.clear()
    with Engine(model, server=server, **CASES[case]) as engine:
        unified = engine.info()["unified_block_size"]
        chunk = next(each for each in server.status()["namespaces"] if each["engines"])["chunk_size"]
        assert chunk % unified == 0
        cached = prompt(4 * chunk + min(20, unified // 2), 1)
        cold = engine.run(cached)
        assert cold.external_tokens == cold.local_tokens == 0

        # All of it from the server.
        assert engine.reset_prefix_cache()
        restored = engine.run(cached)
        assert restored.external_tokens == 4 * chunk
        assert restored.local_tokens == 0
        assert restored.output == cold.output

        # The restored pages are what the output comes from: with them overwritten it changes.
        engine.corrupt_kv()
        corrupted = engine.run(cached)
        assert corrupted.local_tokens >= unified
        assert corrupted.output != cold.output

        # A part held by the engine itself, the rest from the server.
        assert engine.reset_prefix_cache()
        engine.run(cached[: unified + 1])
        mixed = engine.run(cached)
        assert mixed.external_tokens > 0
        assert mixed.output == cold.output

        # A growing conversation: the answer and a new question on top of what is stored. Where a resume
        # starts changes the rounding of some models, with or without a server: what the engine computes
        # from its own prefix cache, resumed at the same token, is what the output must equal.
        longer = [*cached, *cold.tokens, *prompt(300, 2)]
        assert engine.reset_prefix_cache()
        grown = engine.run(longer)
        assert grown.external_tokens == 4 * chunk
        server.clear()
        assert engine.reset_prefix_cache()
        engine.run(cached)
        engine.run(cached)
        server.clear()
        local = engine.run(longer)
        assert local.external_tokens == 0
        assert local.local_tokens == grown.external_tokens
        assert grown.output == local.output


@pytest.mark.parametrize("model", ["llama", "gemma3", "gemma4", "llama4", "qwen3next", "dsv2"])
def test_stored_bytes_are_the_pages_that_were_computed(server: LMCacheServer, model: str) -> None:
    """MLA is checked by this alone: the CPU backend of vLLM cannot resume it."""
    server.clear()
    with Engine(model, server=server) as engine:
        chunk = next(each for each in server.status()["namespaces"] if each["engines"])["chunk_size"]
        assert engine.compare_stored(prompt(2 * chunk + 40, 3), 2 * chunk) > 10_000
