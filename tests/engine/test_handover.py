"""Prefill and decode in different engines, each with a server of its own: they share nothing but a tier."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from harness import stores
from harness.engine import Engine, Result
from harness.prompts import prompt
from harness.server import LMCacheServer
from harness.waiting import wait_until

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
HINT = "lmcache.wait_tokens"
TIMEOUT_S = 5.0


class Apart:
    """Two servers and the tier between them."""

    store: stores.Store

    def __init__(self, stack: ExitStack, url: str) -> None:
        self.prefill, self.decode = (stack.enter_context(LMCacheServer(tier=url)) for _ in range(2))

    def questions(self) -> float:
        return self.decode.metrics()["lmcache_lookup_seconds_count"]


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    with ExitStack() as stack:
        store = stack.enter_context(stores.valkey(tmp_path_factory.mktemp("valkey")))
        apart = Apart(stack, f"valkey://127.0.0.1:{store.port}?write=commit")
        apart.store = store
        yield apart


def prefilled(engine: Engine, cached: list[int], **options: Any) -> Result:
    """What a prefill engine answers, as a router has it compute a prompt."""
    return engine.run(cached, 1, transfer=PREFILL, **options)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    """The same over a shared directory."""
    with ExitStack() as stack:
        directory = tmp_path_factory.mktemp("shared")
        yield Apart(stack, f"dir://{directory}?size_gb=1&shared=1&write=commit")


@pytest.mark.parametrize(
    ("model", "tier"), [("llama", "apart"), ("qwen3next", "apart"), ("gemma3", "shared")]
)
def test_a_decode_engine_goes_on_where_a_prefill_engine_ended(
    request: pytest.FixtureRequest, model: str, tier: str
) -> None:
    apart: Apart = request.getfixturevalue(tier)
    settings = {"block_size": 32} if model == "qwen3next" else {}
    with (
        Engine(model, server=apart.prefill, kv_role="kv_producer", **settings) as prefill,
        Engine(
            model,
            server=apart.decode,
            kv_role="kv_consumer",
            extra_config={"lmcache.mp.wait_timeout_s": 60},
            **settings,
        ) as decode,
    ):
        for seed in range(3):
            chunk = max(each["chunk_size"] for each in apart.decode.status()["namespaces"] if each["engines"])
            cached = prompt(3 * chunk + 10, seed)
            first = prefilled(prefill, cached, settle=False)
            assert first.transfer == {HINT: 3 * chunk}
            before = apart.decode.tokens("hit"), apart.decode.metrics()["lmcache_tokens_requested_total"]
            served = decode.run(cached, transfer=first.transfer)
            assert (served.local_tokens, served.external_tokens) == (0, 3 * chunk)
            after = apart.decode.tokens("hit"), apart.decode.metrics()["lmcache_tokens_requested_total"]
            assert after == (before[0] + 3 * chunk, before[1] + len(cached)), "it is counted once"
            # One engine alone goes on from its own cache at the same token, and rounds the same way.
            alone = prefill.run(cached)
            assert (alone.local_tokens, alone.external_tokens) == (3 * chunk, 0)
            assert served.output == alone.output
        # The output comes from the pages that were read: with them overwritten it changes.
        decode.corrupt_kv()
        assert decode.run(cached).output != alone.output
        # What the engine has itself, or gets without waiting, it does not wait for.
        assert prefilled(prefill, prompt(chunk // 2, 9)).transfer == {HINT: 0}
        assert prefill.run(cached, 1).transfer is None
        once = {"lmcache.once": True, **PREFILL}
        assert prefill.run(prompt(3 * chunk + 10, 10), 1, transfer=once).transfer == {HINT: 0}


def stopped(pid: int) -> ExitStack:
    """A process that does nothing until this is closed."""
    stack = ExitStack()
    os.kill(pid, signal.SIGSTOP)
    stack.callback(os.kill, pid, signal.SIGCONT)
    return stack


def test_a_decode_engine_waits_for_what_is_on_its_way(apart: Apart) -> None:
    with (
        Engine("llama", server=apart.prefill) as prefill,
        Engine("llama", server=apart.decode, extra_config={"lmcache.mp.wait_timeout_s": 100}) as decode,
    ):
        chunk = apart.decode.status()["namespaces"][0]["chunk_size"]
        late, later = prompt(2 * chunk + 10, 20), prompt(2 * chunk + 10, 21)
        # The prefill engine has ended, and its server does not get to write.
        prefill.run(prompt(20, 22), 1)
        with stopped(apart.prefill.pid):
            hint = {HINT: 2 * chunk}
            asked = apart.questions()
            names = decode.submit([late], transfer=hint)
            wait_until(lambda: (decode.step(20), apart.questions() > asked + 3)[-1], 60)
            assert decode.step() == 1, "it waits"
        first = prefilled(prefill, late, settle=False)
        assert first.transfer == hint
        (served,) = decode.collect(names)
        assert served.external_tokens == 2 * chunk
        alone = prefill.run(late)
        assert alone.local_tokens == 2 * chunk
        assert served.output == alone.output
        # The tier hangs, and answers again.
        with stopped(apart.store.process.pid):
            first = prefilled(prefill, later, settle=False)
            names = decode.submit([later], transfer=first.transfer)
            decode.step(20)
            assert decode.step() == 1, "it waits"
        (served,) = decode.collect(names)
        assert served.external_tokens == 2 * chunk
        assert served.output == prefill.run(later).output

        # Its own server dies: nobody waits any more.
        names = decode.submit([prompt(2 * chunk + 10, 23)], transfer=hint)
        decode.step(20)
        assert decode.step() == 1, "it waits"
        apart.decode.kill()
        began_s = time.monotonic()
        (computed,) = decode.collect(names)
        assert time.monotonic() - began_s < 50
        assert computed.external_tokens == 0
        assert computed.output == prefill.run(prompt(2 * chunk + 10, 23)).output
        apart.decode.start()


def test_a_decode_engine_computes_what_does_not_come(apart: Apart) -> None:
    with Engine(
        "llama", server=apart.decode, extra_config={"lmcache.mp.wait_timeout_s": TIMEOUT_S}
    ) as decode:
        chunk = apart.decode.status()["namespaces"][0]["chunk_size"]
        prompts = [prompt(2 * chunk + 10, 30 + number) for number in range(4)]
        seconds = []
        for number, hint in enumerate((2 * chunk, 2**31, 2 * chunk)):
            if number == 2:
                apart.store.kill()
            began_s = time.monotonic()
            result = decode.run(prompts[number], transfer={HINT: hint})
            seconds.append(time.monotonic() - began_s)
            assert (result.external_tokens, result.local_tokens) == (0, 0)
            assert decode.reset_prefix_cache()
            assert decode.run(prompts[number]).output == result.output
        assert seconds[0] >= TIMEOUT_S, "it waited"
        # After a wait in vain, nobody waits so long again.
        assert max(seconds[1:]) < TIMEOUT_S
        apart.store.restart()
        # Hints that are wrong, and a request for which NixlConnector brings the pages.
        asked = apart.questions()
        hints: list[dict[str, Any]] = [{HINT: value} for value in (-1, True, 2**31 + 1, 1.5, "512", None)]
        for hint in [*hints, {HINT: 2**31, "do_remote_prefill": True}]:
            assert decode.reset_prefix_cache()
            decode.run(prompts[3], 1, transfer=hint)
        assert apart.questions() == asked + 7, "each asked once"
        assert decode.log.read_text().count("of a request: the hints are") == 1
