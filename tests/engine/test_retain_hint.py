"""A request may say that its prompt comes back later: others are evicted before it. vLLM's typed hints say
what the keys in kv_transfer_params say."""

from pathlib import Path
from typing import Any

import pytest
from harness.engine import Engine
from harness.prompts import prompt
from harness.served import from_own_cache, served
from harness.server import LMCacheServer, server_of_a_file
from vllm import SamplingParams
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.request import Request

from lmcache_client.connector.option import Hints
from lmcache_client.options import classes

CHUNK = 32
RETAIN = {"lmcache.retain_s": 600}


server = server_of_a_file(l1_size_gb=8 / 1024, chunk_size=CHUNK)
"""A quarter of it has room for a prompt."""


def test_an_agent_that_pauses_finds_its_prompt_and_the_answer_again(server: LMCacheServer) -> None:
    paused, other = (prompt(6 * CHUNK + 20, number) for number in (1, 2))
    with Engine("llama", server=server, block_size=CHUNK) as engine:
        for hint, served in ((None, 0), (RETAIN, 7 * CHUNK)):
            server.clear()
            assert engine.reset_prefix_cache()
            turn = [*paused, *engine.run(paused, CHUNK, transfer=hint).tokens, *prompt(20, 4)]
            engine.run(other)
            for number in range(60):
                engine.run(prompt(6 * CHUNK + 20, 200 + number), 1)
            assert engine.reset_prefix_cache()
            assert engine.run(other, 1).external_tokens == 0, "the flood is larger than L1"
            result = engine.run(turn)
            assert result.external_tokens == served
        local = from_own_cache(engine, server, turn, served, [*turn[:-20], 5])
        assert local.output == result.output


def test_a_prompt_that_comes_back_after_a_while_is_in_memory_again(tmp_path: Path) -> None:
    """A tier has it, which the prompt's own lookup need not ask."""
    flags = {"tier": f"dir://{tmp_path}/tier?size_gb=1&write=commit", "l1_size_gb": 8 / 1024}
    with (
        LMCacheServer(chunk_size=CHUNK, **flags) as server,
        Engine("gemma3", server=server, block_size=CHUNK) as engine,
    ):
        counted = lambda what: server.metrics()[f"lmcache_{what}"]  # noqa: E731
        paused = prompt(6 * CHUNK + 20, 1)
        ended = lambda: [counted(f'prefetches_total{{outcome="{each}"}}') for each in ("brought", "nothing")]  # noqa: E731
        for seconds in (4, 16, 64, 256):
            before = ended()
            engine.run(paused, transfer={"lmcache.prefetch_s": seconds})
            server.wait_until_written()
            for number in range(30):
                engine.run(prompt(6 * CHUNK + 20, 200 + number), 1)
            if ended() == before:  # otherwise the flood took longer, and may have evicted it again
                break
        server.wait_for_metric('lmcache_prefetches_total{outcome="brought"}', before[0] + 1)
        fetches = counted('tier_fetches_total{outcome="ended"}')
        result = served(engine, paused, 6 * CHUNK)
        assert counted('tier_fetches_total{outcome="ended"}') == fetches
        assert from_own_cache(engine, server, paused, 6 * CHUNK, [*paused[:-20], 5]).output == result.output


def read(action: str, payload: dict[str, Any], params: dict[str, Any] | None = None) -> tuple[dict, int]:
    hints = Hints({key: hint for option in classes().values() for key, hint in option.HINTS.items()})
    envelope = KvHintsEnvelope("1", "message", [KvHintAction("1", action, "1", payload)])
    request = Request("r", [1, 2, 3], SamplingParams(), None, kv_hints=envelope)
    request.kv_transfer_params = params
    return hints.read(request)


@pytest.mark.parametrize(
    ("action", "payload", "hints"),
    [
        ("retain", {"seconds": 60}, {"lmcache.retain_s": 60}),
        ("retain", {"seconds": 60, "priority": 5}, {"lmcache.retain_s": 60, "lmcache.priority": 5}),
        ("prefetch", {"after_seconds": 30}, {"lmcache.prefetch_s": 30}),
        ("demote", {}, {"lmcache.once": True}),
        ("no_store", {"after_tokens": 0}, {"lmcache.max_offload_tokens": 0}),
    ],
)
def test_a_typed_hint_says_what_a_key_says(action: str, payload: dict, hints: dict) -> None:
    assert read(action, payload) == (hints, 0)


WRONG = [("retain", {"seconds": value}) for value in (0, 1e9, True)]
WRONG += [("retain", {"priority": 5}), ("prefetch", {"after_seconds": 0})]
UNKNOWN = [(action, {}) for action in ("prefetch", "lmcache.load", "", "retain")]


@pytest.mark.parametrize(("action", "payload"), [*UNKNOWN, *WRONG, ("no_store", {"after_tokens": "all"})])
def test_an_unknown_or_wrong_typed_hint_is_ignored_and_counted(action: str, payload: dict) -> None:
    assert read(action, payload, {"lmcache.once": True, "another": 1}) == ({"lmcache.once": True}, 1)
    assert read(action, payload, {"lmcache.twice": True}) == ({}, 2)


@pytest.mark.parametrize("value", [-1, True, 2**31 + 1, 1.5, "512", None])
def test_no_request_waits_for_a_wrong_number_of_tokens(value: object) -> None:
    assert read("demote", {}, {"lmcache.wait_tokens": value}) == ({"lmcache.once": True}, 1)
