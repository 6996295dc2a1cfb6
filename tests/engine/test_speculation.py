"""Speculative decoding in a real vLLM: what the server restores serves the target and the drafter.

Every case states first that tokens came from the server. Then tokens and logprobs are equal, bit for bit, to
those of vLLM's own prefix cache, resumed at the same token with the same drafter, and so are the drafts of
every step and the number of accepted ones. The drafts are what a drafter's own pages make: a wrong one
changes no token, because the target verifies each draft.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
from harness import drafters
from harness.drafters import target_path
from harness.engine import MODEL_DEFAULTS, Engine, Result, differ_by
from harness.lanes import all_but
from harness.prompts import prompt
from harness.runners import SECOND
from harness.served import served, step_output
from harness.server import LMCacheServer, server_of_a_file
from harness.speculation import NGRAM, again, ask, ask_while_the_server_dies, forget, own
from vllm import EngineArgs, SamplingParams
from vllm import __version__ as VERSION
from vllm.v1.request import Request

from lmcache_client.connector import translate
from lmcache_client.connector.offers import Offers
from lmcache_client.connector.request import Tracked
from lmcache_client.connector.translate import model_tag, weights
from lmcache_client.contract.codec import packed
from lmcache_client.contract.geometry import FULL, GroupSpec

HAS_MEDUSA = not VERSION.startswith("0.33.")
SUFFIX = {"method": "suffix", "suffix_decoding_max_cached_requests": 0}
"""It looks in each request's own tokens only: else its drafts would depend on earlier answers."""
BLOCK = 128
CHUNK = 256
DRAFTS = 3
ANSWER = 24
LONG_ANSWER = 150
ROUNDING = 0.01
"""How far logprobs may be apart because prompts are computed at once, or are of different lengths."""
SECOND_RUNNER = ", second runner"
"""Without asynchronous scheduling, because there its drafts never leave the worker."""
"""So long that it crosses the end of a chunk."""


class Kind(NamedTuple):
    """A target, its drafter, and the tokens behind a chunk of which the drafter's last slots depend."""

    target: str
    drafter: dict[str, Any]
    lookahead: int = 0
    guesses: bool = True
    seed: int = 1
    on_second: bool = False

    @property
    def ends_early(self) -> bool:
        """Whether vLLM's own cache ends a block before the last one that it matches."""
        return self.lookahead > 0 and not (self.drafter["method"] == "dflash" and VERSION.startswith("0.33."))

    def engine(self, server: LMCacheServer, **arguments: Any) -> Engine:
        target = self.target if Path(self.target).is_absolute() else str(target_path(self.target))
        drafter = {**self.drafter, "num_speculative_tokens": DRAFTS}
        if self.target in ("gemma3", "gptoss"):
            # So that vLLM keeps the windows of an answer, too.
            arguments["prefix_cache_retention_interval"] = None
        arguments |= MODEL_DEFAULTS.get(self.target, {})
        arguments |= {"speculative_config": drafter, "max_model_len": 2048}
        if self.on_second:
            arguments |= {**SECOND, "async_scheduling": False}
        # On a busy machine, an answer can take long.
        arguments.setdefault("extra_config", {"lmcache.mp.lookup_timeout_s": 100})
        return Engine(target, server=server, **arguments)


def kind_of(name: str) -> Kind:
    if name.endswith(SECOND_RUNNER):
        return kind_of(name.removesuffix(SECOND_RUNNER))._replace(on_second=True)
    return {
        "llama, EAGLE": lambda: Kind("llama", {"method": "eagle", "model": str(drafters.eagle_path())}, 1),
        # Of other prompts it guesses nothing right.
        "llama, EAGLE-3": lambda: Kind(
            "llama", {"method": "eagle3", "model": str(drafters.eagle3_path())}, 1, seed=10
        ),
        # Of random weights: no guess is right.
        "llama, DFlash": lambda: Kind(
            "llama", {"method": "dflash", "model": str(drafters.dflash_path())}, 1, guesses=False
        ),
        "llama, Medusa": lambda: Kind("llama", {"method": "medusa", "model": str(drafters.medusa_path())}),
        # With heads of keys and values other than the target's, as real draft models have.
        "llama, draft model": lambda: Kind(
            "llama", {"method": "draft_model", "model": str(drafters.draft_model_path("llama", heads=1))}
        ),
        "llama, n-gram": lambda: Kind("llama", NGRAM),
        "MiMo, MTP": lambda: Kind(str(drafters.mimo_path()), {"method": "mtp"}, 1),
        "MiMo, three MTP modules": lambda: Kind(str(drafters.mimo_path(3)), {"method": "mtp"}, 3),
        "llama, suffix": lambda: Kind("llama", SUFFIX),
        "gemma3, n-gram": lambda: Kind("gemma3", NGRAM),
        "gptoss, n-gram": lambda: Kind("gptoss", NGRAM),
    }[name]()


KINDS = (
    *("llama, EAGLE", "llama, EAGLE-3", "llama, DFlash", "llama, Medusa", "llama, draft model"),
    *("llama, suffix", "MiMo, MTP", "MiMo, three MTP modules", "gemma3, n-gram", "gptoss, n-gram"),
)

# It has neither Medusa heads nor suffix decoding, and uses the first MTP module of MiMo alone.
ON_SECOND = (
    "llama, EAGLE",
    "llama, EAGLE-3",
    "llama, DFlash",
    "llama, draft model",
    "MiMo, MTP",
    "gemma3, n-gram",
)
KINDS += tuple(f"{name}{SECOND_RUNNER}" for name in ON_SECOND)


def preempted(engine: Engine, stranger: Sequence[int], tokens: Sequence[int]) -> list[Result]:
    """The answers to a prompt that is computed and one that is restored; vLLM preempts one of them."""
    for _ in range(5):  # if the load takes long, the other answer is complete before
        assert engine.reset_prefix_cache()
        before = engine.metrics()["vllm:num_preemptions"]
        both = engine.generate([stranger, tokens], ANSWER)
        if engine.metrics()["vllm:num_preemptions"] > before and both[1].external_tokens > 0:
            return both
    raise AssertionError("vLLM preempted nothing")


server = server_of_a_file(l1_size_gb=0.3, checksums=False)


# The server sees nothing in the others that it does not see in these: the KV cache of a drafter, several
# modules, or no KV cache of a drafter at all, beside full attention or windows.
SHORT = ("llama, EAGLE", "MiMo, three MTP modules", "gemma3, n-gram")


@pytest.mark.parametrize("name", all_but(KINDS, *(set(KINDS) - set(SHORT))))
def test_target_and_drafter_are_restored_exactly(server: LMCacheServer, name: str) -> None:
    if name == "llama, Medusa" and not HAS_MEDUSA:
        pytest.skip("vLLM 0.33 has no Medusa heads")
    kind = kind_of(name)
    server.clear()
    with kind.engine(server) as engine:
        is_one_group = len(engine.info()["group_kinds"]) == 1
        assert engine.compare_stored(prompt(2 * CHUNK + 40, 3), 2 * CHUNK) > 10_000
        # An answer, and the token that it answered: what follows is there to be looked up.
        # With an EAGLE-like drafter vLLM's own cache matches a block more than it uses.
        length = 4 * CHUNK + (250 if kind.ends_early else 120)
        for seed in range(kind.seed, kind.seed + 10):
            # Of which prompts a drafter guesses anything depends on rounding, and so on the processor.
            start = prompt(length - 65, seed)
            tokens = [*start, *engine.run(start, 64).tokens, start[-1]]
            forget(engine, server)
            cold = ask(engine, tokens, ANSWER)
            if cold.accepted > 0 or not kind.guesses:
                break
        assert cold.came_from == (0, 0)
        assert any(cold.drafts)
        assert cold.accepted > 0 or not kind.guesses
        others = [[*tokens[:length], *prompt(100, length)] for length in (2 * CHUNK, 2 * CHUNK + 60)]

        for other in others:  # the first prompt to part there leaves its window to the second
            engine.run([*other[:-100], *prompt(100, 9)], 1)
        aside = ask(engine, others[1], ANSWER)
        restored = again(engine, tokens, ANSWER, 4 * CHUNK)
        # What was restored is what target and drafter read.
        engine.corrupt_kv()
        corrupted = [ask(engine, each, ANSWER) for each in (tokens, others[1])]
        assert corrupted[0].result.local_tokens > 0
        assert differ_by(corrupted[0].result, cold.result) > 10 * ROUNDING, "wrong pages are far from it"
        assert [each.drafts for each in corrupted] != [cold.drafts, aside.drafts]

        # A part held by the engine itself, the rest from the server.
        assert engine.reset_prefix_cache()
        engine.run(tokens[: CHUNK + BLOCK + 1], 1)
        mixed = ask(engine, tokens, ANSWER)
        assert mixed.result.local_tokens > 0 < mixed.result.external_tokens
        assert mixed.result.local_tokens + mixed.result.external_tokens == 4 * CHUNK

        # A conversation that went on.
        assert engine.reset_prefix_cache()
        longer = [*tokens, *engine.run(tokens, LONG_ANSWER).tokens, *prompt(CHUNK - LONG_ANSWER, 2)]
        grown = again(engine, longer, ANSWER, 5 * CHUNK)

        # A prompt that shares only the beginning, and parts from the stored one where a chunk ends, or later.
        # A drafter's last slots can depend on tokens behind the page.
        resumed = [CHUNK if kind.lookahead else 2 * CHUNK, 2 * CHUNK]
        shared = [again(engine, other, ANSWER, at) for other, at in zip(others, resumed, strict=True)]

        several = [tokens, longer, *others]
        assert engine.reset_prefix_cache()
        together = engine.generate(several, ANSWER)
        # One whose answer comes late may find in vLLM's own cache what another has just loaded.
        points = (4 * CHUNK, 5 * CHUNK, *resumed)
        for each, at in zip(together, points, strict=True):
            assert each.external_tokens + each.local_tokens >= at
        assert sum(each.external_tokens > 0 for each in together) >= 3

        alone = own(engine, server, tokens, ANSWER, 4 * CHUNK, tokens)
        drafted = sum(map(len, cold.drafts))
        print(f"{name}: of {drafted} drafts, accepted cold, from vLLM's cache and restored:", end=" ")
        print(*(f"{each.accepted:g}" for each in (cold, alone, restored)))
        assert restored.all == mixed.all == alone.all
        # Pages of an answer are rounded as steps of its tokens are, which a prompt's are not.
        assert grown.all == own(engine, server, longer, ANSWER, 5 * CHUNK, tokens, LONG_ANSWER).all
        for other, answer, resume in zip(others, shared, resumed, strict=True):
            # A model with windows keeps one only at the end of the prompt that came first.
            first = tokens if is_one_group and not kind.lookahead else other[: resume + 1]
            if kind.ends_early:
                first = other[: resume + BLOCK + kind.lookahead]
            # vLLM's pages are of a shorter prompt than the server's, and some processors round it otherwise.
            expected = own(engine, server, other, ANSWER, resume, first)
            assert (answer.result.tokens, answer.drafts) == (expected.result.tokens, expected.drafts)
            assert differ_by(answer.result, expected.result) < ROUNDING
        right = [each.result for each in (alone, grown, *shared)]
        assert [each.tokens for each in together] == [each.tokens for each in right]
        assert max(map(differ_by, together, right)) < ROUNDING
        # Only the cold request's chunks, for a fresh engine.
        forget(engine, server)
        ask(engine, tokens, ANSWER)
    # Two prompts fit, and one of their answers; one block is vLLM's null block.
    blocks = 2 * (length // BLOCK + 1) + 2 if is_one_group else None
    with kind.engine(server, num_gpu_blocks_override=blocks) as engine:
        # Some processors round the first request of a process otherwise.
        engine.run(prompt(10, 4), 1)
        fresh = ask(engine, tokens, ANSWER)
        assert fresh.result.external_tokens == 4 * CHUNK
        assert fresh.all == alone.all

        if is_one_group:
            stranger = prompt(length, 5)
            strangers = engine.run(stranger, ANSWER)
            both = preempted(engine, stranger, tokens)
            # The stranger goes on elsewhere than at the end of a step, and so may round otherwise.
            assert both[0].tokens == strangers.tokens
            assert both[1].tokens == alone.result.tokens
            assert differ_by(both[1], alone.result) < ROUNDING

        failed = ask_while_the_server_dies(engine, server, tokens, ANSWER)
        assert failed.said == cold.said
    server.restart()


@pytest.mark.long
def test_the_pages_of_a_head_are_stored_with_those_of_mla() -> None:
    """By their bytes alone: the CPU backend of vLLM cannot resume MLA, so the connector does not load it."""
    target, drafter = str(drafters.deepseek_path()), {"method": "mtp", "num_speculative_tokens": 1}
    with (
        LMCacheServer(l1_size_gb=0.3) as server,
        Engine(target, server=server, block_size=32, speculative_config=drafter) as engine,
    ):
        assert engine.compare_stored(prompt(4 * CHUNK + 40, 3), 4 * CHUNK) > 10_000
        answer = ask(engine, prompt(700, 1), ANSWER)
        assert answer.accepted > 0
        (namespace,) = server.status()["namespaces"]
        assert [group["layers"] for group in namespace["groups"]] == [5], "four of the model, one of the head"
        assert namespace["lookahead_tokens"] == 1


@pytest.mark.long  # that it is refused: test_speculation_recurrent.py
def test_an_engine_whose_draft_model_overwrites_pages_is_not_cached() -> None:
    """vLLM gives it the blocks of the model's first group. Its answers are wrong without a connector, too."""
    target, draft = str(target_path("gptoss")), str(drafters.draft_model_path("gptoss"))
    speculation = {"method": "draft_model", "model": draft, "num_speculative_tokens": DRAFTS}
    answers = {}
    with LMCacheServer(l1_size_gb=0.3) as server:
        for method, drafter in (("none", None), ("ngram", {**NGRAM, "num_speculative_tokens": DRAFTS})):
            with Engine(target, speculative_config=drafter) as engine:
                answers[method] = engine.run(prompt(CHUNK, 1), ANSWER).tokens
        with Engine(target, server=server, speculative_config=speculation) as engine:
            answers["draft model"] = engine.run(prompt(CHUNK, 1), ANSWER).tokens
            reason = "a draft model beside a model with several KV cache groups"
            assert f"this engine is not cached, because it has {reason}" in engine.log.read_text()
            served(engine, prompt(CHUNK, 1), 0)
    assert answers["none"] == answers["ngram"]
    # As soon as this fails, vLLM has mended it, and the cache can serve such engines.
    assert answers["none"] != answers["draft model"]


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
    known = {"r": tracked}
    offers = Offers((GroupSpec(FULL, 16, 0, "", ()),))

    def step(computed: int, scheduled: int) -> int:
        tables = {"r": ([1, 2, 3],)}.get
        output = step_output({"r": scheduled}, cached=[("r", computed)], tables=tables)
        return len(offers.of_step(output, known, known.get, 1))

    assert step(0, 32) == 1, "the token behind the second chunk is not sampled yet"
    request.append_output_token_ids([5])
    assert step(32, 4) == 1
    assert tracked.keys == keys([*range(32), 5], 1)


def test_a_chunk_without_all_of_its_blocks_is_not_stored() -> None:
    """vLLM puts block 0 where a request has no block."""
    tracked = Tracked(Request("r", list(range(32)), SamplingParams(max_tokens=4), None))
    tracked.reset(1, 16)
    known = {"r": tracked}
    offers = Offers((GroupSpec(FULL, 16, 0, "", ()),))
    output = step_output({"r": 32}, cached=[("r", 0)], tables={"r": ([0, 2],)}.get)
    ((_, stored),) = offers.of_step(output, known, known.get, 1)
    assert stored.block_ids == packed((2,))


@mock.patch.dict(os.environ)
# This process may have made the weights; engines start later.
@mock.patch.object(translate, "process_started_ns", return_value=2**63)
def test_engines_whose_drafters_differ_share_no_pages(started: mock.Mock) -> None:
    def tag(kind: str | None, **changes: Any) -> dict[str, str]:
        own = kind_of(f"llama, {kind}").drafter if kind else {}
        drafter = {"num_speculative_tokens": DRAFTS, **own, **changes}
        arguments = EngineArgs(
            str(target_path("llama")),
            skip_tokenizer_init=True,
            max_model_len=2048,
            speculative_config=drafter if kind else None,
        )
        config = arguments.create_engine_config()
        return {**dict(model_tag(config).details), **dict(weights(config))}

    plain, eagle, draft = tag(None), tag("EAGLE"), tag("draft model")
    # A drafter without pages changes nothing.
    assert tag("n-gram") == plain
    assert not HAS_MEDUSA or tag("Medusa") == plain
    assert "drafter" not in plain
    assert eagle == tag("EAGLE", num_speculative_tokens=2)
    others = (eagle, draft, tag("EAGLE", model=str(drafters.draft_model_path("llama"))))
    assert len({each["drafter"] + each["drafter.weights"] for each in others}) == 3
    assert (eagle["lookahead"], draft["lookahead"]) == ("1", "0")
    assert started.called
