"""Long prompts: as many tokens as users have, on models that are small enough for it."""

from typing import Any

import pytest
from harness.engine import Engine
from harness.lanes import all_but
from harness.prompts import prompt
from harness.served import chunk_size, held_blocks, served
from harness.server import LMCacheServer, server_of_a_file

LENGTHS = {"20,000": 20_000, "100,000": 100_500}
OPTIONS: dict[str, dict[str, Any]] = {
    "llama-long": {"dtype": "float32"},
    "gemma3-long": {"dtype": "float32"},
    # In steps of one chunk, a prompt that resumes goes on with the steps of one that does not.
    "qwen3next-long": {"max_num_batched_tokens": 256, "mamba_ssm_cache_dtype": "float32"},
}
MODEL_LENGTH = 131_072
CROWDS = {"8 of 2,000 tokens": (8, 2_000, 2, 0.002), "50 of 8,000 tokens": (50, 8_000, 10, 0.06)}
"""The prompts, the tokens of each, the engine's memory in MiB, and L1's in GB."""
ANSWER = 80
"""Tokens of an answer: beside each other, answers outgrow the engine's memory."""


server = server_of_a_file(l1_size_gb=0.5)


@pytest.mark.parametrize("length", all_but(LENGTHS, "100,000"))
@pytest.mark.parametrize("model", OPTIONS)
def test_a_long_prompt_is_resumed_at_its_end_and_in_its_middle(
    server: LMCacheServer, model: str, length: str
) -> None:
    server.clear()
    options = {"max_model_len": MODEL_LENGTH, "kv_cache_memory_bytes": 256 << 20, **OPTIONS[model]}
    with Engine(model, server=server, **options) as first:
        chunk = chunk_size(server)
        whole = LENGTHS[length] // chunk * chunk
        middle = whole // 2 // chunk * chunk
        long = prompt(whole + 20, 1)
        parted = [*long[:middle], *prompt(chunk // 2, 2)]
        # Windows and states are stored where prompts part, so this prompt comes twice.
        first.run(parted)
        first.run(long)
        own = first.run(long)
        assert (own.external_tokens, own.local_tokens) == (0, whole)
        own_parted = first.run(parted)
        assert (own_parted.external_tokens, own_parted.local_tokens) == (0, middle)
        first.corrupt_kv()
        assert first.run(long).output != own.output, "the answer depends on what is restored"
    with Engine(model, server=server, **options) as second:
        assert served(second, long, whole).output == own.output
        assert served(second, parted, middle).output == own_parted.output


@pytest.mark.parametrize("size", all_but(CROWDS, "50 of 8,000 tokens"))
def test_many_prompts_at_once_that_neither_the_engine_nor_the_server_can_hold(size: str) -> None:
    number, length, kv_mb, l1_gb = CROWDS[size]
    prompts = [prompt(length, 100 + each) for each in range(number)]
    options = {"max_model_len": length + 2 * ANSWER, "max_num_seqs": number, **OPTIONS["llama-long"]}
    with Engine("llama-long", kv_cache_memory_bytes=256 << 20, **options) as alone:
        right = [each.tokens for each in alone.collect(alone.submit(prompts, ANSWER))]
    with (
        LMCacheServer(l1_size_gb=l1_gb) as server,
        Engine("llama-long", server=server, kv_cache_memory_bytes=kv_mb << 20, **options) as engine,
    ):
        assert [each.tokens for each in engine.collect(engine.submit(prompts, ANSWER))] == right
        assert engine.reset_prefix_cache()
        # What was stored last is still there.
        found = engine.collect(engine.submit(prompts[::-1], ANSWER))
        assert [each.tokens for each in found] == right[::-1]
        assert any(each.external_tokens for each in found)
        assert engine.metrics()["vllm:num_preemptions"] > 0
        assert server.metrics()["lmcache_evicted_chunks_total"] > 0
        engine.settle()
        assert held_blocks(engine) == 0
