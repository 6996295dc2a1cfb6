"""Speculative decoding in a real vLLM: what the server restores serves the target and the drafter.

Every case states first that tokens came from the server. Then tokens and logprobs are equal, bit for bit, and
so are the drafts of every step. The drafts are what a drafter's own pages make: a wrong one changes no token,
because the target verifies each draft.
"""

import os
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
from harness.engine import Engine, Result
from harness.models import eagle_path, model_path
from harness.prompts import prompt
from harness.server import LMCacheServer
from vllm import EngineArgs, SamplingParams
from vllm.v1.request import Request

from lmcache_client.connector.offers import Offers
from lmcache_client.connector.request import Tracked
from lmcache_client.connector.translate import model_tag
from lmcache_client.contract.geometry import FULL, GroupSpec

CHUNK = 256
LENGTH = 4 * CHUNK + 20
DRAFTS = 3
ANSWER = 24
NGRAM = {"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 1}


def speculation(kind: str) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "ngram": NGRAM,
        # The model is its own draft model, so all drafts are right as long as the drafter's pages are.
        "draft model": {"method": "draft_model", "model": str(model_path("llama"))},
        "eagle": {"method": "eagle", "model": str(eagle_path("llama"))},
    }[kind]
    return {**settings, "num_speculative_tokens": DRAFTS}


class Answer(NamedTuple):
    result: Result
    drafts: list[list[int]]
    accepted: float

    @property
    def all(self) -> tuple[object, ...]:
        return self.result.output, self.drafts, self.accepted


def ask(engine: Engine, tokens: Sequence[int]) -> Answer:
    name = "vllm:spec_decode_num_accepted_tokens"
    before = engine.metrics().get(name, 0.0)
    engine.drafts()
    result = engine.run(tokens, ANSWER)
    return Answer(result, engine.drafts(), engine.metrics().get(name, 0.0) - before)


@pytest.fixture(scope="module")
def server() -> Iterator[LMCacheServer]:
    with LMCacheServer(l1_size_gb=0.3, verify=False) as running:
        yield running


@pytest.mark.parametrize(
    ("model", "kind"), [("llama", "eagle"), ("llama", "draft model"), ("gemma3", "ngram")]
)
def test_target_and_drafter_are_restored_exactly(server: LMCacheServer, model: str, kind: str) -> None:
    server.clear()
    # A prompt that repeats itself, so that there is something to look up for an n-gram drafter.
    tokens = [*prompt(LENGTH - 64, 1), *prompt(16, 2) * 4]
    with Engine(model, server=server, speculative_config=speculation(kind)) as engine:
        assert engine.compare_stored(prompt(2 * CHUNK + 40, 3), 2 * CHUNK) > 10_000
        cold = ask(engine, tokens)
        assert cold.result.external_tokens == cold.result.local_tokens == 0
        assert any(cold.drafts)
        assert cold.accepted > 0 or kind == "eagle", "of a random head"

        assert engine.reset_prefix_cache()
        restored = ask(engine, tokens)
        assert restored.result.external_tokens == 4 * CHUNK
        assert restored.result.local_tokens == 0
        assert restored.all == cold.all

        # vLLM's own prefix cache alone.
        server.clear()
        local = ask(engine, tokens)
        assert local.result.local_tokens > 0
        assert local.result.external_tokens == 0
        assert local.all == cold.all

        # What was restored is what target and drafter read.
        engine.corrupt_kv()
        corrupted = ask(engine, tokens)
        assert corrupted.result.local_tokens > 0
        assert corrupted.result.output != cold.result.output
        assert corrupted.drafts != cold.drafts

        # A prompt that shares only the beginning, and parts from the stored one where a chunk ends.
        other = [*tokens[: 2 * CHUNK], *prompt(100, 4)]
        assert other[2 * CHUNK] != tokens[2 * CHUNK]
        server.clear()
        assert engine.reset_prefix_cache()
        ask(engine, tokens)
        assert engine.reset_prefix_cache()
        if model == "gemma3":  # the first prompt to part there leaves its window to the second
            ask(engine, other)
            assert engine.reset_prefix_cache()
        parted = ask(engine, other)
        # The last slot of an EAGLE head's page depends on the token behind the page.
        assert parted.result.external_tokens == CHUNK * (1 if kind == "eagle" else 2)
        server.clear()
        assert engine.reset_prefix_cache()
        alone = ask(engine, other)
        assert alone.result.external_tokens == alone.result.local_tokens == 0
        assert parted.all == alone.all
        assert engine.reset_prefix_cache()
        ask(engine, tokens)
    with Engine(model, server=server, speculative_config=speculation(kind)) as engine:
        fresh = ask(engine, tokens)
        assert fresh.result.external_tokens == 4 * CHUNK
        assert fresh.all == cold.all


def keys(tokens: Sequence[int], lookahead: int) -> list[bytes]:
    tracked = Tracked(Request("r", list(tokens), SamplingParams(max_tokens=1), None), lookahead=lookahead)
    tracked.reset(1, 16)
    return list(tracked.keys_of(tracked.chunks(len(tokens))))


def test_a_key_covers_the_tokens_on_which_the_drafters_last_slots_depend() -> None:
    tokens = list(range(100, 149))  # three chunks of 16 and one token
    for lookahead, chunks in ((0, 3), (1, 3), (2, 2)):
        assert len(keys(tokens, lookahead)) == chunks
        for changed in range(16, 49):
            other = [*tokens[:changed], 7, *tokens[changed + 1 :]]
            same = [a == b for a, b in zip(keys(tokens, lookahead), keys(other, lookahead), strict=True)]
            assert same == [(chunk + 1) * 16 + lookahead <= changed for chunk in range(chunks)]


def test_a_chunk_is_stored_once_the_tokens_that_its_key_covers_are_known() -> None:
    request = Request("r", list(range(32)), SamplingParams(max_tokens=4), None)
    tracked = Tracked(request, lookahead=1)
    tracked.reset(1, 16)
    offers = Offers((GroupSpec(FULL, 16, 0, "", ()),), (), None)

    def step(computed: int, scheduled: int) -> int:
        output: Any = SimpleNamespace(
            num_scheduled_tokens={"r": scheduled},
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(req_ids=["r"], num_computed_tokens=[computed]),
            kv_connector_block_state=SimpleNamespace(
                get_block_ids={"r": ([1, 2, 3],)}.get, boundary_state_offloads={}
            ),
        )
        return len(offers.of_step(output, {"r": tracked}.get))

    assert step(0, 32) == 1, "the token behind the second chunk is not sampled yet"
    request.append_output_token_ids([5])
    assert step(32, 4) == 1
    assert tracked.keys == keys([*range(32), 5], 1)


@mock.patch.dict(os.environ)
def test_engines_whose_drafters_differ_share_no_pages() -> None:
    def tag(kind: str | None, **changes: Any) -> dict[str, str]:
        drafter = {**speculation(kind), **changes} if kind else None
        arguments = EngineArgs(
            str(model_path("llama")), skip_tokenizer_init=True, max_model_len=4096, speculative_config=drafter
        )
        return dict(model_tag(arguments.create_engine_config()).details)

    plain, eagle, draft = tag(None), tag("eagle"), tag("draft model")
    # A drafter without pages changes nothing.
    assert tag("ngram") == plain
    assert "drafter" not in plain
    assert eagle == tag("eagle", num_speculative_tokens=2)
    others = (eagle, draft, tag("eagle", model=str(model_path("llama"))))
    assert len({each["drafter"] for each in others}) == 3
    assert (eagle["lookahead"], draft["lookahead"]) == ("1", "0")
