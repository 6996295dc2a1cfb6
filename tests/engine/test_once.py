"""A request may say that its prompt will not come back: then it pushes nothing out that others use."""

from collections.abc import Iterator
from typing import Any

import pytest
from harness.engine import Engine, Result
from harness.prompts import prompt
from harness.served import from_own_cache
from harness.server import LMCacheServer, server_of_a_file

ONCE = {"lmcache.once": True}
CHUNK = 32
LEFT_OUT = 'lmcache_objects_total{outcome="once"}'
CHATS = [prompt(4 * CHUNK + 20, number) for number in range(15)]


server = server_of_a_file(l1_size_gb=4 / 1024, chunk_size=CHUNK)
"""Room for 64 chunks of the tiny model; a twentieth of it may go to prompts that will not come back."""


@pytest.fixture(scope="module")
def engine(server: LMCacheServer) -> Iterator[Engine]:
    with Engine("llama", server=server, block_size=CHUNK) as running:
        yield running


def served(engine: Engine, prompts: list[list[int]], **options: Any) -> list[Result]:
    assert engine.reset_prefix_cache()
    return [engine.run(each, **options) for each in prompts]


def test_a_batch_that_will_not_come_back_leaves_the_chats_where_they_are(
    server: LMCacheServer, engine: Engine
) -> None:
    # L1 is full: of old prompts, which may go, and of chats.
    for number in range(100, 102):
        engine.run(prompt(4 * CHUNK + 20, number), 1)
    chats = [engine.run(each) for each in CHATS]
    assert server.status()["l1"]["free_bytes"] == 0
    left_out = server.metrics()[LEFT_OUT]
    batch = [prompt(6 * CHUNK + 20, 200 + number) for number in range(8)]
    engine.generate(batch[:4], transfer=ONCE)
    for each in batch[4:]:
        engine.run(each, transfer=ONCE)
    assert server.metrics()[LEFT_OUT] > left_out
    assert server.status()["failures"] == [], "nothing failed, so nobody needs more memory"
    again = served(engine, CHATS)
    assert [each.external_tokens for each in again] == [4 * CHUNK] * len(CHATS)
    assert [each.output for each in again] == [each.output for each in chats]

    # Prompts that will not come back share their beginning, when the engine keeps nothing itself.
    beginning = prompt(2 * CHUNK, 300)
    sharing = [[*beginning, *prompt(CHUNK // 2, 301 + number)] for number in range(3)]
    results = [served(engine, [each], transfer=ONCE)[0] for each in sharing]
    assert [each.external_tokens for each in results] == [0, 2 * CHUNK, 2 * CHUNK]
    assert [each.external_tokens for each in served(engine, CHATS)] == [4 * CHUNK] * len(CHATS)

    for each in batch:
        engine.run(each)
    assert served(engine, CHATS[:1])[0].external_tokens == 0, "the hint made the difference"

    for each, result in zip(sharing, results, strict=True):
        local = from_own_cache(engine, server, each, 2 * CHUNK, [*beginning, 5])
        assert not result.external_tokens or local.output == result.output


def test_a_hint_that_is_not_understood_is_ignored_with_one_warning(
    server: LMCacheServer, engine: Engine
) -> None:
    server.clear()
    first = prompt(2 * CHUNK + 20, 500)
    plain = engine.run(first)
    for hints in ({"lmcache.once": "yes"}, {"lmcache.once": 1, "lmcache.twice": True}, {"others": 1}, {}):
        (result,) = served(engine, [first], transfer=hints)
        assert (result.external_tokens, result.output) == (2 * CHUNK, plain.output)
    (result,) = served(engine, [first], transfer={"lmcache.load": False})
    assert (result.external_tokens, result.local_tokens, result.output) == (0, 0, plain.output)
    assert engine.log.read_text().count("ignored the hint") == 1
    assert "ignored the hint 'lmcache.once': 'yes' of a request" in engine.log.read_text()
