"""What an engine generates is stored behind all prompts: it takes what is free, and is the first to go."""

from collections.abc import Iterator

import pytest
from harness.engine import Engine, Result
from harness.prompts import prompt
from harness.served import from_own_cache
from harness.server import LMCacheServer

CHUNK = 32
PROMPT = prompt(8 * CHUNK + 20, 1)
"""The answer begins in its ninth chunk."""
LONG = 20 * CHUNK
LEFT_OUT = 'lmcache_objects_total{outcome="once"}'


@pytest.fixture(scope="module")
def server() -> Iterator[LMCacheServer]:
    """Room for 64 chunks of the tiny model."""
    with LMCacheServer(l1_size_gb=4 / 1024, chunk_size=CHUNK) as running:
        running.wait_until_populated()
        yield running


@pytest.fixture(scope="module")
def engine(server: LMCacheServer) -> Iterator[Engine]:
    with Engine("llama", server=server, block_size=CHUNK) as running:
        yield running


@pytest.fixture(autouse=True)
def _empty(server: LMCacheServer) -> None:
    server.clear()


def served(engine: Engine, tokens: list[int], answer: int = 8) -> Result:
    assert engine.reset_prefix_cache()
    return engine.run(tokens, answer)


def chat(tokens: list[int], result: Result) -> list[int]:
    """The next turn's prompt: all that was said, and a question."""
    return [*tokens, *result.tokens, *prompt(40, 99)]


def test_long_answers_leave_a_prompt_in_an_l1_that_holds_it(server: LMCacheServer, engine: Engine) -> None:
    first = engine.run(PROMPT)
    chats = [prompt(8 * CHUNK + 20, number) for number in range(2, 7)]
    for each in chats:
        engine.run(each)
    before = server.metrics()[LEFT_OUT]
    for number in range(10, 12):
        engine.run(prompt(20, number), LONG)
    assert server.metrics()[LEFT_OUT] > before, "more was generated than had room"
    again = served(engine, PROMPT)
    assert (again.external_tokens, again.output) == (8 * CHUNK, first.output)
    for each in chats:
        assert served(engine, each).external_tokens == 8 * CHUNK


def test_the_next_turn_finds_the_answer_and_from_then_on_it_is_as_good_as_a_prompt(
    server: LMCacheServer, engine: Engine
) -> None:
    first = engine.run(PROMPT, 5 * CHUNK)
    second = chat(PROMPT, first)
    assert engine.reset_prefix_cache()
    found = engine.run(second)
    assert found.external_tokens == 13 * CHUNK
    own = from_own_cache(engine, server, second, 13 * CHUNK, second[: 13 * CHUNK + 1])
    assert found.output == own.output

    # An answer that was read outlives those that nobody has read.
    server.clear()
    assert engine.reset_prefix_cache()
    assert engine.run(PROMPT, 5 * CHUNK).tokens == first.tokens
    assert served(engine, second, 1).external_tokens == 13 * CHUNK
    for number in range(20, 23):
        engine.run(prompt(20, number), LONG)
    assert served(engine, second, 1).external_tokens == 14 * CHUNK, "and a chunk of the question"


def assert_stored(server: LMCacheServer, engine: Engine, hints: dict[str, int], chunks: int) -> None:
    server.clear()
    assert engine.reset_prefix_cache()
    first = engine.run(PROMPT, 5 * CHUNK, transfer=hints)
    assert server.status()["l1"]["chunks"] == chunks
    assert served(engine, chat(PROMPT, first)).external_tokens == chunks * CHUNK


def test_less_is_stored_if_the_user_says_so(server: LMCacheServer, engine: Engine) -> None:
    most = "lmcache.max_offload_tokens"
    assert_stored(server, engine, {most: 5 * CHUNK + 7}, 5)
    assert_stored(server, engine, {most: 11 * CHUNK}, 11)
    no_answers = {"lmcache.mp.save_decode_cache": False}
    with Engine("llama", server=server, block_size=CHUNK, extra_config=no_answers) as other:
        # The chunk in which the prompt ends is the prompt's.
        assert_stored(server, other, {}, 9)
        assert_stored(server, other, {most: 0}, 0)


def test_an_answer_of_a_model_with_windows() -> None:
    with LMCacheServer() as large, Engine("gemma3", server=large) as running:
        tokens = prompt(300, 1)
        second = chat(tokens, running.run(tokens, 300))
        found = served(running, second)
        assert found.external_tokens > 500, "nearly all of the answer, too"
        resume = found.external_tokens
        assert found.output == from_own_cache(running, large, second, resume, second[: resume + 1]).output
