"""Prefill and decode in different engines, each with a server of its own: they share nothing but a tier."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from harness import stores
from harness.engine import Engine, Result
from harness.prompts import prompt
from harness.served import chunk_size, stopped
from harness.server import LMCacheServer
from harness.waiting import timed, wait_until

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
HINT = "lmcache.wait_tokens"
FOR_EVER_S = 3600.0
"""Longer than the harness waits for an engine."""


class Apart:
    """Two servers and the tier between them."""

    store: stores.Store

    def __init__(self, stack: ExitStack, url: str) -> None:
        servers = (stack.enter_context(LMCacheServer(tier=url, l1_size_gb=0.1)) for _ in range(2))
        self.prefill, self.decode = servers

    def questions(self) -> float:
        return self.decode.metrics()["lmcache_lookup_seconds_count"]

    def decoder(self, model: str, wait_timeout_s: float = FOR_EVER_S, **options: Any) -> Engine:
        extra = {"lmcache.mp.wait_timeout_s": wait_timeout_s}
        return Engine(model, server=self.decode, extra_config=extra, **options)


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    with ExitStack() as stack:
        store = stack.enter_context(stores.valkey(tmp_path_factory.mktemp("valkey")))
        apart = Apart(stack, f"valkey://127.0.0.1:{store.port}?write=commit")
        apart.store = store
        yield apart


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    """The same over a shared directory."""
    with ExitStack() as stack:
        directory = tmp_path_factory.mktemp("shared")
        yield Apart(stack, f"dir://{directory}?size_gb=1&shared=1&write=commit")


def prefilled(engine: Engine, cached: list[int]) -> Any:
    """What a prefill engine says of the prompt that a router has it compute: its answer's hint."""
    return engine.run(cached, 1, transfer=PREFILL, settle=False).transfer


@pytest.mark.parametrize(
    ("model", "tier"),
    [pytest.param("llama", "apart", marks=pytest.mark.long), ("qwen3next", "apart"), ("gemma3", "shared")],
)
def test_a_decode_engine_goes_on_where_a_prefill_engine_ended(
    request: pytest.FixtureRequest, model: str, tier: str
) -> None:
    apart: Apart = request.getfixturevalue(tier)
    settings = {"block_size": 32} if model == "qwen3next" else {}
    with (
        Engine(model, server=apart.prefill, kv_role="kv_producer", **settings) as prefill,
        apart.decoder(model, kv_role="kv_consumer", **settings) as decode,
    ):
        chunk = chunk_size(apart.decode)
        for seed in range(2):
            cached = prompt(3 * chunk + 10, seed)
            hint = prefilled(prefill, cached)
            assert hint == {HINT: 3 * chunk}
            asked = "lmcache_tokens_requested_total"
            before = apart.decode.tokens("hit"), apart.decode.metrics()[asked]
            restored = decode.run(cached, transfer=hint)
            assert (restored.local_tokens, restored.external_tokens) == (0, 3 * chunk)
            after = apart.decode.tokens("hit"), apart.decode.metrics()[asked]
            assert after == (before[0] + 3 * chunk, before[1] + len(cached)), "it is counted once"
            assert restored.output == alone(prefill, cached, 3 * chunk).output
        # The output comes from the pages that were read: with them overwritten it changes.
        decode.corrupt_kv()
        assert decode.run(cached).output != restored.output
        # What the engine has itself, or gets without waiting, it does not wait for.
        assert prefilled(prefill, prompt(chunk // 2, 9)) == {HINT: 0}
        assert prefill.run(cached, 1).transfer is None
        once = {"lmcache.once": True, **PREFILL}
        assert prefill.run(prompt(3 * chunk + 10, 10), 1, transfer=once).transfer == {HINT: 0}


def alone(engine: Engine, tokens: list[int], own_tokens: int) -> Result:
    """One engine alone goes on from its own cache at the same token, and rounds the same way."""
    answer = engine.run(tokens)
    assert (answer.local_tokens, answer.external_tokens) == (own_tokens, 0)
    return answer


def test_a_decode_engine_waits_for_what_is_on_its_way(apart: Apart) -> None:
    with Engine("llama", server=apart.prefill) as prefill, apart.decoder("llama") as decode:
        chunk = chunk_size(apart.decode)
        late, later = prompt(2 * chunk + 10, 20), prompt(2 * chunk + 10, 21)
        hint = {HINT: 2 * chunk}

        def waits(tokens: list[int]) -> list[str]:
            """The name of a request that has asked some times, and waits."""
            asked, names = apart.questions(), decode.submit([tokens], transfer=hint)
            wait_until(lambda: (decode.step(20), apart.questions() > asked + 1)[-1])
            assert decode.step() == 1, "it waits"
            return names

        # The prefill engine has ended, and its server does not get to write.
        prefill.run(prompt(20, 22), 1)
        with stopped(apart.prefill.pid):
            names = waits(late)
        assert prefilled(prefill, late) == hint
        (restored,) = decode.collect(names)
        assert restored.external_tokens == 2 * chunk
        assert restored.output == alone(prefill, late, 2 * chunk).output
        # The tier hangs, and answers again.
        with stopped(apart.store.process.pid):
            assert prefilled(prefill, later) == hint
            names = decode.submit([later], transfer=hint)
            decode.step(20)
            assert decode.step() == 1, "it waits"
        (restored,) = decode.collect(names)
        assert restored.external_tokens == 2 * chunk
        assert restored.output == alone(prefill, later, 2 * chunk).output

        # Its own server dies: nobody waits any more.
        lost = prompt(2 * chunk + 10, 23)
        names = waits(lost)
        apart.decode.kill()
        (computed,) = decode.collect(names)
        assert computed.external_tokens == 0
        assert computed.output == prefill.run(lost).output
        apart.decode.start()


def test_a_decode_engine_computes_what_does_not_come(apart: Apart) -> None:
    """How long it waits: test_early_lookups.py."""
    timeout_s = 1.0
    with apart.decoder("llama", timeout_s) as decode:
        chunk = chunk_size(apart.decode)
        for number, hint in enumerate((2 * chunk, 2**31, 2 * chunk)):
            if number == 2:
                apart.store.kill()
            tokens = prompt(2 * chunk + 10, 30 + number)
            result, took_s = timed(lambda: decode.run(tokens, transfer={HINT: hint}))  # noqa: B023
            assert number or took_s >= timeout_s, "it waited"
            assert (result.external_tokens, result.local_tokens) == (0, 0)
            assert decode.reset_prefix_cache()
            assert decode.run(tokens).output == result.output
        apart.store.restart()
        # Hints that are wrong, and a request for which NixlConnector brings the pages.
        asked = apart.questions()
        hints: list[dict[str, Any]] = [{HINT: value} for value in (-1, True, 2**31 + 1, 1.5, "512", None)]
        for wrong in [*hints, {HINT: 2**31, "do_remote_prefill": True}]:
            assert decode.reset_prefix_cache()
            decode.run(prompt(2 * chunk + 10, 33), 1, transfer=wrong)
        assert apart.questions() == asked + 7, "each asked once"
        assert decode.log.read_text().count("ignored the hint") == 1
