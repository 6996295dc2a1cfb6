"""Windows and states are stored where requests resume: at ends of prompts and where prompts part.

In every case the tokens came from the server first. Then the output equals what the engine computes from its
own prefix cache, resumed at the same token.
"""

from collections.abc import Iterator

import pytest
from harness.engine import Engine
from harness.prompts import prompt
from harness.server import LMCacheServer

MODELS = {
    "gemma3": {"block_size": 32},
    "gptoss": {"block_size": 32},
    "llama4": {"block_size": 32},
    "qwen3next": {"block_size": 32},
    "falconh1": {"block_size": 32, "max_num_batched_tokens": 160},
}


@pytest.fixture(scope="module")
def server() -> Iterator[LMCacheServer]:
    with LMCacheServer(l1_size_gb=0.5) as running:
        yield running


def chunk_size(server: LMCacheServer) -> int:
    return int(next(each for each in server.status()["namespaces"] if each["engines"])["chunk_size"])


@pytest.mark.parametrize("model", MODELS)
def test_a_conversation_a_new_answer_and_a_second_fork_are_served(server: LMCacheServer, model: str) -> None:
    server.clear()
    with Engine(model, server=server, **MODELS[model]) as engine:
        chunk = chunk_size(server)
        first = prompt(5 * chunk + 20, 1)
        asked = engine.run(first, 4)

        # The same prompt again, as for another answer, and the next turn of the conversation.
        turn = [*first, *asked.tokens, *prompt(3 * chunk, 2)]
        for again, resumed in ((first, 5 * chunk), (turn, 5 * chunk), (turn, len(turn) // chunk * chunk)):
            assert engine.reset_prefix_cache()
            restored = engine.run(again, 4)
            assert restored.external_tokens == resumed
            # Where a resume starts changes the rounding; the same prompt was computed from its beginning.
            assert again is turn or restored.output == asked.output

        # Two chunks are shared by all of these. The first to part finds nobody's window or state there, and
        # leaves its own to the others.
        shared = 2 * chunk
        parting = [[*first[: shared + 5], *prompt(2 * chunk, 10 + i)] for i in range(3)]
        served = []
        for each in parting:
            assert engine.reset_prefix_cache()
            served.append(engine.run(each))
        assert [each.external_tokens for each in served[1:]] == [shared, shared]

        server.clear()
        assert engine.reset_prefix_cache()
        engine.run(parting[0])
        engine.run(parting[1])
        server.clear()
        local = engine.run(parting[2])
        assert local.external_tokens == 0
        assert local.local_tokens == shared
        assert served[2].output == local.output


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
        assert engine.reset_prefix_cache()
        served = engine.run(parting[1])
        assert served.external_tokens == 4 * chunk
        assert engine.reset_prefix_cache()
        server.clear()
        engine.run(first, 1)
        server.clear()
        local = engine.run(parting[1])
        assert (local.external_tokens, local.local_tokens) == (0, 4 * chunk)
        assert served.output == local.output


def test_everything_is_stored_when_the_user_says_so(server: LMCacheServer) -> None:
    stored, parted = {}, {}
    for everything in (False, True):
        server.clear()
        settings = {"lmcache.mp.store_everything": everything}
        with Engine("gemma3", server=server, block_size=32, extra_config=settings) as engine:
            chunk = chunk_size(server)
            first = prompt(8 * chunk + 5, 4)
            engine.run(first, 1)
            stored[everything] = server.status()["l1"]["ready_bytes"]
            assert engine.reset_prefix_cache()
            parting = [*first[: 4 * chunk], *prompt(chunk, 5)]
            parted[everything] = engine.run(parting)
            assert parted[everything].external_tokens == (4 * chunk if everything else 0)
    # With a snapshot at every boundary, vLLM resumes there by itself.
    with Engine("gemma3", block_size=32, prefix_cache_retention_interval=None) as alone:
        assert alone.run(parting).output == parted[False].output
        assert alone.reset_prefix_cache()
        alone.run(first, 1)
        local = alone.run(parting)
        assert local.local_tokens == 4 * chunk
    assert parted[True].output == local.output, "what was restored is what was computed"
    assert stored[True] > 1.5 * stored[False]
