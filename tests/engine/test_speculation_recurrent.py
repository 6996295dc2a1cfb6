"""Speculative decoding on models with recurrent layers: what the server restores is what vLLM's own prefix
cache would have.

vLLM's CPU build lacks two kernels for this; the harness supplies them (harness/recurrent_kernels.py). Every
case states first that tokens came from the server. Then tokens, logprobs, the drafts of every step and the
number of accepted ones equal those of vLLM's own cache, resumed at the same token with the same drafter.
"""

import contextlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from harness.drafters import recurrent_path
from harness.engine import MODEL_DEFAULTS, Engine, Result, differ_by
from harness.prompts import prompt
from harness.runners import SECOND
from harness.served import held_blocks, step_output
from harness.server import LMCacheServer
from harness.speculation import NGRAM, Answer, again, ask, ask_while_the_server_dies, forget, own
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from lmcache_client.connector import support
from lmcache_client.connector.offers import Offers
from lmcache_client.connector.request import Tracked
from lmcache_client.connector.support import UnsupportedError, check_supported
from lmcache_client.contract.geometry import FULL, RECURRENT, GroupSpec

DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {**NGRAM, "num_speculative_tokens": 3},
    "mtp": {"method": "mtp", "num_speculative_tokens": 2},
}
CASES = [
    pytest.param("qwen3next", "ngram", marks=pytest.mark.long),
    pytest.param("qwen35", "ngram", marks=pytest.mark.long),
    ("qwen35", "mtp"),
    pytest.param("falconh1", "ngram", marks=pytest.mark.long),
]
ANSWER = 60
LONG_ANSWER = 100
SURE, ROUNDING = 8, 0.005
"""The server may have a state that is nearer than vLLM's own, and other drafts are accepted then. So how the
tokens of an answer share steps differs, and how they are rounded. The first ones were equal to the bit; wrong
pages put each of them 0.026 or more apart."""
EVERY_STATE: dict[str, Any] = {
    # vLLM then offers the state at every end of a block, also in answers, and the connector wants them all.
    "prefix_cache_retention_interval": None,
    "extra_config": {"lmcache.mp.store_everything": True},
}


def speculating(model: str, kind: str, server: LMCacheServer | None = None, **llm: Any) -> Engine:
    settings = {**MODEL_DEFAULTS.get(model, {}), **llm}
    return Engine(str(recurrent_path(model)), server=server, speculative_config=DRAFTERS[kind], **settings)


def assert_nothing_is_held(engine: Engine, server: LMCacheServer) -> None:
    assert held_blocks(engine) == 0
    assert server.status()["l1"]["leases"] == 0


@pytest.mark.long  # it changes with the harness alone
@pytest.mark.parametrize("model", ["qwen3next", "falconh1"])
def test_what_the_harness_supplies_to_vllm_alone_is_right(model: str) -> None:
    """An answer in which drafts are accepted across the end of a block, where the kernels move states, equals
    the same answer inside one larger block, where they have nothing to do."""
    answers = []
    for block_size in (256, 1024):
        with speculating(model, "ngram", block_size=block_size) as engine:
            assert set(engine.info()["block_sizes"]) == {block_size}
            answers.append(ask(engine, prompt(200, 1), 100))
    small, large = answers
    assert small.accepted > 0
    assert small.said == large.said


@pytest.mark.timeout(1800)  # of two engines with fifty questions, on a machine that does much else
@pytest.mark.parametrize(("model", "kind"), CASES)
def test_target_and_drafter_resume_as_from_vllms_own_cache(model: str, kind: str) -> None:
    with LMCacheServer(l1_size_gb=0.5, checksums=False) as server:
        with speculating(model, kind, server) as engine:
            chunk = engine.info()["unified_block_size"]
            # With a head that drafts, vLLM keeps the state one block earlier.
            end = 4 * chunk if kind == "ngram" else 3 * chunk
            assert engine.compare_stored(prompt(4 * chunk + 40, 3), end) > 10_000
            # The answer begins again what the model has said in the prompt, so that many drafts are right.
            said = engine.run(prompt(4 * chunk + 90, 1), 99).tokens
            tokens = [*prompt(4 * chunk + 90, 1), *said, said[0]]
            cold = resumed(engine, server, tokens, end)
            partly_local(engine, server, tokens, end, cold)
            longer, grown = conversation(engine, server, tokens, end)
            # They share a beginning: the first leaves it, the second its state, the third resumes there.
            shared = [[*prompt(2 * chunk + 10, 1), *prompt(chunk + 190 + i, 10 + i)] for i in range(4)]
            right = fork(engine, server, shared, 2 * chunk, model)
            ask(engine, tokens, ANSWER)
            assert_nothing_is_held(engine, server)
        # Another engine has few blocks, and its vLLM also offers states that drafts have made.
        with speculating(model, kind, server, num_gpu_blocks_override=40, **EVERY_STATE) as engine:
            assert again(engine, tokens, ANSWER, end).said == cold.said
            # With drafts, answers of Falcon-H1 depend on what else runs: see docs/drafters.md.
            if model != "falconh1":
                crowded(engine, server, shared, right)
            states_within_prompts(engine, server, tokens, longer, grown)
            assert_nothing_is_held(engine, server)
            failed = ask_while_the_server_dies(engine, server, tokens, ANSWER)
            assert failed.said == cold.said


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("model", "runner"), [("qwen3next", {}), ("qwen35", {**SECOND, "async_scheduling": False})]
)
def test_a_head_that_computes_slowly_here_gets_fewer_questions(model: str, runner: dict[str, Any]) -> None:
    with LMCacheServer(l1_size_gb=0.5, checksums=False) as server:
        with speculating(model, "mtp", server, **runner) as engine:
            chunk = engine.info()["unified_block_size"]
            assert engine.compare_stored(prompt(4 * chunk + 40, 3), 3 * chunk) > 10_000
            said = engine.run(prompt(4 * chunk + 90, 1), 99).tokens
            tokens = [*prompt(4 * chunk + 90, 1), *said, said[0]]
            cold = resumed(engine, server, tokens, 3 * chunk)
            forget(engine, server)
            ask(engine, tokens, ANSWER)
            assert_nothing_is_held(engine, server)
        with speculating(model, "mtp", server, **runner) as engine:
            assert again(engine, tokens, ANSWER, 3 * chunk).said == cold.said


def resumed(engine: Engine, server: LMCacheServer, tokens: list[int], end: int) -> Answer:
    server.clear()
    cold = again(engine, tokens, ANSWER, 0)
    assert cold.accepted > 0
    restored = again(engine, tokens, ANSWER, end)
    # vLLM's own prefix cache alone.
    server.clear()
    local = ask(engine, tokens, ANSWER)
    assert local.came_from == (0, end)
    assert restored.said == local.said == cold.said
    # What was restored is what target and drafter read.
    server.clear()
    assert engine.reset_prefix_cache()
    ask(engine, tokens, ANSWER)
    again(engine, tokens, 1, end)
    server.clear()
    engine.corrupt_kv()
    corrupted = ask(engine, tokens, ANSWER)
    assert corrupted.came_from == (0, end)
    assert corrupted.result.output != cold.result.output
    return cold


def partly_local(engine: Engine, server: LMCacheServer, tokens: list[int], end: int, cold: Answer) -> None:
    chunk = engine.info()["unified_block_size"]
    forget(engine, server)
    ask(engine, tokens, ANSWER)
    assert engine.reset_prefix_cache()
    ask(engine, tokens[: 3 * chunk], ANSWER)
    mixed = ask(engine, tokens, ANSWER)
    assert mixed.came_from == (end - 2 * chunk, 2 * chunk)
    assert mixed.said == cold.said


def conversation(
    engine: Engine, server: LMCacheServer, tokens: list[int], end: int
) -> tuple[list[int], Answer]:
    """It grows by an answer that crosses the end of a block."""
    forget(engine, server)
    told = ask(engine, tokens, LONG_ANSWER)
    longer = [*tokens, *told.result.tokens, *prompt(engine.info()["unified_block_size"] // 2, 2)]
    grown = again(engine, longer, ANSWER, end)
    assert grown.said == own(engine, server, longer, ANSWER, end, tokens, LONG_ANSWER).said
    return longer, grown


def fork(
    engine: Engine, server: LMCacheServer, shared: list[list[int]], at: int, model: str
) -> list[tuple[Result, Result]]:
    """Returns vLLM's own answers, one by one and at once."""
    forget(engine, server)
    for tokens in shared[:2]:
        ask(engine, tokens, ANSWER)
        assert engine.reset_prefix_cache()
    third = again(engine, shared[2], ANSWER, at)
    server.clear()
    assert third.said == again(engine, shared[2], ANSWER, 0).said
    # Several at once.
    forget(engine, server)
    results = [ask(engine, tokens, ANSWER).result for tokens in shared]
    # With drafts, some answers of Falcon-H1 at once differ from those one by one, without any connector, too.
    local = engine.generate(shared, LONG_ANSWER)
    assert all(each.local_tokens >= at for each in local)
    assert engine.reset_prefix_cache()
    together = engine.generate(shared, ANSWER)
    assert all(each.external_tokens >= at for each in together)
    for each, *right in zip(together, results, local, strict=True):
        assert each.tokens[0] in [one.tokens[0] for one in right]
        assert model == "falconh1" or min(differ_by(each, one, SURE) for one in right) < ROUNDING
    return list(zip(results, local, strict=True))


def crowded(
    engine: Engine, server: LMCacheServer, shared: list[list[int]], answers: Sequence[tuple[Result, Result]]
) -> None:
    """With stores and loads under way, in few blocks: vLLM preempts some, or lets them wait."""
    forget(engine, server)
    for _ in range(2):
        results = engine.generate(shared, LONG_ANSWER)
        # What a preempted request has said already, vLLM computes again as a prompt. Then it may go on with
        # another token, also without a connector. What it says first shows what it has read.
        for each, right in zip(results, answers, strict=True):
            assert each.tokens[0] in [one.tokens[0] for one in right]
        assert engine.reset_prefix_cache()
    assert sum(each.external_tokens for each in results) > 0


def states_within_prompts(
    engine: Engine, server: LMCacheServer, tokens: list[int], longer: list[int], grown: Answer
) -> None:
    """Whatever vLLM offers, the next turn resumes within the last prompt."""
    forget(engine, server)
    told = ask(engine, tokens, LONG_ANSWER)
    assert longer[len(tokens) :][:LONG_ANSWER] == list(told.result.tokens)
    assert engine.reset_prefix_cache()
    within = ask(engine, longer, ANSWER)
    assert within.result.local_tokens == 0
    assert 0 < within.result.external_tokens <= len(tokens)
    assert within.said == grown.said


@pytest.mark.parametrize("group_id", [0, 2])
def test_a_state_is_stored_only_if_no_draft_can_have_moved_it(group_id: int) -> None:
    """Of an engine with a drafter: within the prompt, and from a block that still has the prompt's hash."""
    init_none_hash(sha256)
    hasher = get_request_block_hasher(16, sha256)
    request = Request("r", list(range(40)), SamplingParams(max_tokens=40), None, block_hasher=hasher)
    request.append_output_token_ids(list(range(100, 120)))
    tracked = Tracked(request)
    tracked.reset(1, 16)
    known = {"r": tracked}
    pool = BlockPool(8, True, 16)
    (block,) = pool.get_new_blocks(1)
    offers = Offers((GroupSpec(RECURRENT, 16, 0, "", ()),), drafts=True, group_ids=(group_id,))
    offers.pool = pool

    def stored(tokens: int, group_id: int = group_id) -> int:
        output = step_output({}, states={"r": [(group_id, block.block_id, tokens)]})
        return len(offers.of_step(output, known, known.get, 1))

    def hashed(chunk: int) -> None:
        block.reset_hash()
        pool.cache_full_blocks(request, [pool.null_block] * chunk + [block], chunk, chunk + 1, 16, group_id)

    hashed(1)
    assert stored(32) == 1
    assert stored(32, group_id + 1) == 0, "it is a state of a group that is left out"
    assert stored(16) == 0, "it is the block of another state"
    hashed(2)
    assert stored(48) == 0, "the prompt ends before"
    block.reset_hash()
    assert stored(32) == 0, "it is somebody else's block"


ONE, RECURRENT_TOO = (
    (GroupSpec(FULL, 16, 0, "", ()),),
    (
        GroupSpec(RECURRENT, 16, 0, "", ()),
        GroupSpec(FULL, 16, 0, "", ()),
    ),
)
SEVERAL_GROUPS = "a draft model beside a model with several KV cache groups"


@pytest.mark.parametrize(
    ("groups", "model", "method", "lookahead", "reason", "reason_before_032"),
    [
        (RECURRENT_TOO, "", "mtp", 1, "", "before vLLM 0.32"),
        (RECURRENT_TOO, "", "mtp", 2, "several MTP modules", "several MTP modules"),
        (RECURRENT_TOO, "", "draft_model", 0, SEVERAL_GROUPS, SEVERAL_GROUPS),
        # vLLM may give it the blocks of the second group, which is of one request.
        (ONE, "step5", "draft_model", 0, SEVERAL_GROUPS, SEVERAL_GROUPS),
        # It keeps hashes outside of its groups.
        (ONE, "deepseek_v41", None, 0, *["set VLLM_USE_V2_MODEL_RUNNER=1"] * 2),
    ],
)
def test_what_is_not_proven_is_refused(
    groups: tuple[GroupSpec, ...],
    model: str,
    method: str | None,
    lookahead: int,
    reason: str,
    reason_before_032: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parallel = ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size")
    config: Any = SimpleNamespace(
        device_config=SimpleNamespace(device_type="cpu"),
        model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type=model)),
        cache_config=SimpleNamespace(mamba_cache_mode="align", prefix_match_unit=None),
        num_prefill_lookahead_tokens=lookahead,
        speculative_config=SimpleNamespace(method=method) if method else None,
        parallel_config=SimpleNamespace(**dict.fromkeys(parallel, 1), distributed_executor_backend=None),
        use_v2_model_runner=False,
    )
    with pytest.raises(UnsupportedError, match=reason) if reason else contextlib.nullcontext():
        check_supported(config, groups, [16, 16])
    monkeypatch.setattr(support, "VLLM_VERSION", "0.31.0")
    with pytest.raises(UnsupportedError, match=reason_before_032):
        check_supported(config, groups, [16, 16])
