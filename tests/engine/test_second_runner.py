"""vLLM's second model runner, which GPUs use: it does as the first one does, and is served as exactly.

On a CPU, Triton's interpreter runs its kernels (harness/second_runner.py). Tests of models, drafters, lost
servers, preemption and resets have it too: those that get a `runner`, or a case that ends with `second`.
"""

import pytest
from harness.engine import Engine, Result
from harness.lanes import all_but
from harness.prompts import prompt
from harness.runners import SECOND
from harness.served import from_own_cache, served
from harness.server import LMCacheServer, server_of_a_file

server = server_of_a_file(l1_size_gb=0.1)


def answers(engine: Engine) -> list[Result]:
    """To a prompt, the same from the engine's own prefix cache, and four that are computed at once."""
    alone = [engine.run(prompt(300, 1)), engine.run(prompt(300, 1))]
    assert alone[1].local_tokens > 0
    return [*alone, *engine.generate([prompt(length, length) for length in (5, 128, 270, 500)], 12)]


def is_near(result: Result, other: Result) -> bool:
    """The second runner adds up the probabilities of a token in another order."""
    for ours, theirs in zip(result.logprobs, other.logprobs, strict=True):
        for (token, value), (same, right) in zip(ours, theirs, strict=True):
            if token != same or abs(float.fromhex(value) - float.fromhex(right)) > 1e-5:
                return False
    return result.tokens == other.tokens


@pytest.mark.parametrize("model", all_but(("llama", "gemma3", "qwen3next"), "llama", "gemma3"))
def test_both_runners_say_the_same_and_write_the_same_pages(model: str) -> None:
    said, pages = [], []
    for runner in ({}, {**SECOND, "async_scheduling": False}):
        with Engine(model, **runner) as engine:
            assert (engine.info()["runner"] == "vllm.v1.worker.cpu.model_runner") == bool(runner)
            said.append(answers(engine))
            pages.append(engine.call("kv_digests"))
    assert all(is_near(one, other) for one, other in zip(*said, strict=True))
    assert pages[0] == pages[1]


@pytest.mark.parametrize("model", all_but(("llama", "qwen3next"), "qwen3next"))
def test_another_engine_is_served_if_it_has_the_same_runner(server: LMCacheServer, model: str) -> None:
    server.clear()
    tokens = prompt(800, 1)
    with Engine(model, server=server, **SECOND) as engine:
        stored = engine.run(tokens)
    with Engine(model, server=server) as engine:
        served(engine, tokens, 0)
    with Engine(model, server=server, **SECOND) as engine:
        assert engine.info()["scheduler"] == "AsyncScheduler", "as on GPUs"
        restored = served(engine, tokens, 768)
        assert restored.output == from_own_cache(engine, server, tokens, 768, tokens).output
        assert restored.tokens == stored.tokens
