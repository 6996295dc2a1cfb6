"""Each kind of model, in a real vLLM: served from the server, bit for bit what is computed.

Every case states first that tokens came from the server, then that tokens and logprobs are equal.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from harness.engine import Engine
from harness.lanes import all_but
from harness.prompts import prompt
from harness.server import LMCacheServer

CASES = {
    "llama": {},
    "gemma3": {},
    "gemma3-32": {"block_size": 32},
    "gemma4": {},
    "gemma4-32": {"block_size": 32},
    "gptoss": {},
    "gptoss-32": {"block_size": 32},
    "llama4": {},
    "llama4-32": {"block_size": 32},
    "qwen3next": {},
    "qwen3next-32": {"block_size": 32},
    "qwen35": {},
    "qwen35-32": {"block_size": 32},
    "falconh1": {},
    "falconh1-32": {"block_size": 32, "max_num_batched_tokens": 160},
    "nemotronh": {},
    "granite4": {},
    "zamba2": {"block_size": 128},
    "mamba2": {},
    "lfm2": {},
    "lfm2moe": {},
}


def chunk_size(server: LMCacheServer) -> int:
    return int(next(each for each in server.status()["namespaces"] if each["engines"])["chunk_size"])


@pytest.fixture(scope="module")
def server() -> Iterator[LMCacheServer]:
    # As users run it: the pieces of all objects are computed at once, which --checksums does not do.
    with LMCacheServer(l1_size_gb=0.5, checksums=False) as running:
        yield running


SCRATCH_SPECS = {"ring": "CircularBufferSpec", "replayed": "SlidingWindowMLASpec"}
SCRATCH = {
    "llama-ring-replayed": ("llama", ["ring", "replayed"]),
    "qwen3next-ring": ("qwen3next", ["ring"]),
    "gemma3-ring": ("gemma3", ["ring"]),
}
"""Models with groups that vLLM does not share between requests: as DeepSeek-V4.1, and as GLM-5 Next and Qwen4
Exp."""


# Of blocks of another size, one model of each kind is enough every time.
@pytest.mark.parametrize("case", all_but(CASES, "gemma4-32", "gptoss-32", "llama4-32", "qwen35-32"))
def test_model_is_restored_exactly(server: LMCacheServer, case: str) -> None:
    check_model(server, case.removesuffix("-32"), CASES[case])


@pytest.mark.parametrize("case", SCRATCH)
def test_groups_that_no_other_request_may_use_are_left_out(server: LMCacheServer, case: str) -> None:
    model, kinds = SCRATCH[case]
    with Engine(model, server=server, scratch=kinds) as engine:
        info = engine.info()
        assert info["group_kinds"][: len(kinds)] == [SCRATCH_SPECS[kind] for kind in kinds]
        assert info["replayed_tokens"] == (64 if "replayed" in kinds else 0)
        (namespace,) = [each for each in server.status()["namespaces"] if each["engines"]]
        assert len(namespace["groups"]) == len(info["group_kinds"]) - len(kinds)
    check_model(server, model, {"scratch": kinds})


def check_model(server: LMCacheServer, model: str, options: dict[str, Any]) -> None:
    server.clear()
    with Engine(model, server=server, **options) as engine:
        unified = engine.info()["unified_block_size"]
        chunk = chunk_size(server)
        assert chunk % unified == 0
        assert engine.compare_stored(prompt(2 * chunk + 40, 3), 2 * chunk) > 10_000
        cached = prompt(4 * chunk + min(20, unified // 2), 1)
        cold = engine.run(cached)
        assert cold.external_tokens == cold.local_tokens == 0

        # Where a resume starts changes the rounding, with or without a server. So an output must equal what
        # the engine computes from its own prefix cache, resumed at the same token.
        own = engine.run(cached)
        assert own.external_tokens == 0
        assert own.local_tokens == 4 * chunk

        # All of it from the server.
        assert engine.reset_prefix_cache()
        restored = engine.run(cached)
        assert restored.external_tokens == 4 * chunk
        assert restored.local_tokens == 0
        assert restored.output == own.output

        # The restored pages are what the output comes from: with them overwritten it changes.
        engine.corrupt_kv()
        corrupted = engine.run(cached)
        assert corrupted.local_tokens >= unified
        assert corrupted.output != own.output

        # A part held by the engine itself, the rest from the server.
        assert engine.reset_prefix_cache()
        engine.run(cached[: unified + 1])
        mixed = engine.run(cached)
        assert mixed.external_tokens > 0
        assert mixed.output == own.output

        # A growing conversation: the answer and a new question on top of what is stored.
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


def test_mla_is_stored_as_it_was_computed(server: LMCacheServer) -> None:
    """By its bytes alone: the CPU backend of vLLM cannot resume MLA, so the connector does not load it."""
    server.clear()
    with Engine("dsv2", server=server) as engine:
        chunk = chunk_size(server)
        assert engine.compare_stored(prompt(2 * chunk + 40, 3), 2 * chunk) > 10_000
        assert engine.reset_prefix_cache()
        assert engine.run(prompt(2 * chunk + 40, 3)).external_tokens == 0


def test_a_window_larger_than_the_chunk() -> None:
    with (
        LMCacheServer(l1_size_gb=0.2, chunk_size=64) as server,
        Engine("gemma3", server=server, block_size=32) as engine,
    ):
        assert chunk_size(server) == 64
        cached = prompt(64 * 11 + 10, 4)
        engine.run(cached)
        own = engine.run(cached)
        assert own.local_tokens == 64 * 11
        for length in (64 * 3, 64 * 7, 64 * 11):
            # The first prompt to part there leaves its window to the second.
            for number in range(2):
                assert engine.reset_prefix_cache()
                part = engine.run([*cached[:length], *prompt(40, length + number)])
            assert part.external_tokens == length
        assert engine.reset_prefix_cache()
        restored = engine.run(cached)
        assert restored.external_tokens == 64 * 11
        assert restored.output == own.output
