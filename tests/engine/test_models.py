"""Each kind of model, in a real vLLM: served from the server, bit for bit what is computed.

Every case states first that tokens came from the server, then that tokens and logprobs are equal.
"""

from typing import Any

import pytest
from harness.device import ON_GPU
from harness.engine import Engine
from harness.lanes import all_but
from harness.prompts import prompt
from harness.runners import SECOND
from harness.served import chunk_size, from_own_cache, served
from harness.server import LMCacheServer, server_of_a_file

CASES: dict[str, dict[str, Any]] = {
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


# With vLLM's second model runner, which GPUs use, each kind of model once.
CASES |= {f"{case}-second": {**options, **SECOND} for case, options in CASES.items() if "-32" not in case}
OFTEN = ("llama-second", "gemma3-second", "qwen3next-second")


server = server_of_a_file(l1_size_gb=0.2, checksums=False)


SCRATCH_SPECS = {"ring": "CircularBufferSpec", "replayed": "SlidingWindowMLASpec"}
SCRATCH = {
    "llama-ring-replayed": ("llama", ["ring", "replayed"]),
    "qwen3next-ring": ("qwen3next", ["ring"]),
    "gemma3-ring": ("gemma3", ["ring"]),
}
"""Models with groups that vLLM does not share between requests: as DeepSeek-V4.1, and as GLM-5 Next and Qwen4
Exp."""


# Of blocks of another size, a model with windows and a recurrent one are enough every time.
@pytest.mark.parametrize(
    "case",
    all_but(
        CASES,
        *(f"{each}-32" for each in ("gemma4", "gptoss", "llama4", "qwen35", "falconh1")),
        *(each for each in CASES if each.endswith("-second") and each not in OFTEN),
    ),
)
def test_model_is_restored_exactly(server: LMCacheServer, case: str) -> None:
    check_model(server, case.partition("-")[0], CASES[case])


@pytest.mark.parametrize("case", all_but(SCRATCH, "gemma3-ring", "qwen3next-ring"))
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
    with Engine(model, server=server, **{"dtype": "bfloat16", **options}) as engine:
        unified = engine.info()["unified_block_size"]
        chunk = chunk_size(server)
        assert chunk % unified == 0
        # On a GPU, a chunk may have 16 tokens.
        whole = max(2 * chunk, 256 // chunk * chunk)
        assert engine.compare_stored(prompt(whole + min(40, chunk // 2), 3), whole) > 10_000
        stored = 3 * chunk
        cached = prompt(stored + min(20, unified // 2), 1)
        cold = engine.run(cached)
        assert cold.external_tokens == cold.local_tokens == 0

        # Where a resume starts changes the rounding, with or without a server. So an output must equal what
        # the engine computes from its own prefix cache, resumed at the same token.
        own = engine.run(cached)
        assert (own.external_tokens, own.local_tokens) == (0, stored)

        # All of it from the server.
        assert served(engine, cached, stored).output == own.output

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
        # What the engine holds was computed in a short step, which the MLA kernels of a GPU round otherwise.
        assert mixed.tokens == own.tokens
        if not (ON_GPU and model == "dsv2"):
            assert mixed.output == own.output

        # A growing conversation: the answer and a new question on top of what is stored.
        longer = [*cached, *cold.tokens, *prompt(300, 2)]
        grown = served(engine, longer, stored)
        assert grown.output == from_own_cache(engine, server, longer, stored, cached, cached).output


def test_mla_is_stored_as_it_was_computed(server: LMCacheServer) -> None:
    """By its bytes alone: the CPU backend of vLLM cannot resume MLA, so the connector does not load it."""
    if ON_GPU:
        check_model(server, "dsv2", {})
        return
    server.clear()
    with Engine("dsv2", server=server) as engine:
        chunk = chunk_size(server)
        assert engine.compare_stored(prompt(2 * chunk + 40, 3), 2 * chunk) > 10_000
        served(engine, prompt(2 * chunk + 40, 3), 0)


def test_a_window_larger_than_the_chunk() -> None:
    with (
        LMCacheServer(l1_size_gb=0.1, chunk_size=64) as server,
        Engine("gemma3", server=server, block_size=32) as engine,
    ):
        assert chunk_size(server) == 64
        cached = prompt(64 * 11 + 10, 4)
        engine.run(cached)
        own = engine.run(cached)
        assert own.local_tokens == 64 * 11
        for length in (64 * 3, 64 * 7, 64 * 11):
            # The first prompt to part there leaves its window to the second.
            assert engine.reset_prefix_cache()
            engine.run([*cached[:length], *prompt(40, length)])
            served(engine, [*cached[:length], *prompt(40, length + 1)], length)
        assert served(engine, cached, 64 * 11).output == own.output


# Windows and states are stored where requests resume: at ends of prompts and where prompts part.
FORKS = ("gemma3", "gptoss", "llama4", "qwen3next", "falconh1", "gemma3-second", "qwen3next-second")


@pytest.mark.parametrize("case", all_but(FORKS, "gptoss", "llama4", "falconh1", "qwen3next-second"))
def test_a_conversation_a_new_answer_and_a_second_fork_are_served(server: LMCacheServer, case: str) -> None:
    server.clear()
    model, _, runner = case.partition("-")
    with Engine(model, server=server, **CASES[f"{model}-32"], **(SECOND if runner else {})) as engine:
        chunk = chunk_size(server)
        first = prompt(3 * chunk + 20, 1)
        asked = engine.run(first, 4)

        # The same prompt again, as for another answer, and the next turn of the conversation. Where a resume
        # starts changes the rounding; the same prompt was computed from its beginning.
        assert served(engine, first, 3 * chunk, 4).output == asked.output
        turn = [*first, *asked.tokens, *prompt(2 * chunk, 2)]
        for resumed in (3 * chunk, len(turn) // chunk * chunk):
            served(engine, turn, resumed, 4)

        # Two chunks are shared by all of these. The first to part finds nobody's window or state there, and
        # leaves its own to the others.
        shared = 2 * chunk
        parting = [[*first[: shared + 5], *prompt(chunk, 10 + i)] for i in range(3)]
        assert engine.reset_prefix_cache()
        engine.run(parting[0])
        served(engine, parting[1], shared)
        third = served(engine, parting[2], shared)

        assert third.output == from_own_cache(engine, server, parting[2], shared, *parting[:2]).output


def test_a_prompt_that_left_the_engines_own_cache_leaves_a_fork(server: LMCacheServer) -> None:
    """The server has lost what the engine still has: the next to share it resumes there, from the server."""
    server.clear()
    with Engine("gemma3", server=server, block_size=32) as engine:
        chunk = chunk_size(server)
        first = prompt(4 * chunk + 5, 3)
        engine.run(first, 1)
        server.clear()
        parting = [[*first[:-5], *prompt(3 * chunk + 5, 20 + i)] for i in range(2)]
        assert engine.run(parting[0]).local_tokens == 4 * chunk
        restored = served(engine, parting[1], 4 * chunk)
        assert restored.output == from_own_cache(engine, server, parting[1], 4 * chunk, first).output
