"""vLLM resets its cache, as for a weight update: what was computed before serves nobody any more."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness.api_server import ApiServer
from harness.engine import Engine
from harness.prompts import prompt
from harness.routers import post
from harness.runners import SECOND
from harness.served import held_blocks, served, stopped
from harness.server import LMCacheServer, server_of_a_test

TOKENS = prompt(700, 1)
STORED = 'lmcache_objects_total{outcome="stored"}'


server = server_of_a_test(l1_size_gb=0.06)


def assert_new(engine: Engine, number: int) -> None:
    """The pages of this prompt in the cache are of before a reset: it is computed, and stored, again."""
    computed = engine.run(prompt(700, number))
    assert computed.external_tokens == 0
    assert served(engine, prompt(700, number), 512).output == computed.output


@pytest.mark.parametrize(
    ("mode", "runner"), [("abort", {}), ("keep", SECOND), pytest.param("keep", {}, marks=pytest.mark.long)]
)
def test_pages_of_old_weights_are_not_served_to_new_ones(
    server: LMCacheServer, start_engine: Callable[..., Engine], mode: str, runner: dict[str, Any]
) -> None:
    engine = start_engine("llama", server=server, **runner)
    old = engine.run(TOKENS)
    names = engine.submit([prompt(900, 2)], 40)
    engine.step(4)
    server.wait_until(lambda l1: l1["ready_bytes"] > 0)
    engine.pause(mode)
    server.wait_until(lambda l1: l1["ready_bytes"] == 0)
    engine.call("change_weights")
    if mode == "keep":
        assert len(engine.collect(names)[0].tokens) == 40
    assert_new(engine, 1)
    assert engine.run(TOKENS).output != old.output, "the weights are others"
    engine.settle()
    assert held_blocks(engine) == 0


def test_a_request_that_goes_on_over_a_reset_stores_nothing_more(
    server: LMCacheServer, start_engine: Callable[..., Engine]
) -> None:
    """vLLM resets nothing while requests run, unless it preempts them, but it asks its connector to."""
    engine = start_engine("llama", server=server)
    names = engine.submit([TOKENS], 40)
    engine.step(4)
    assert not engine.reset_prefix_cache(reset_connector=True)
    assert len(engine.collect(names)[0].tokens) == 40
    engine.settle()
    assert_new(engine, 1)


NAMED = {"lmcache.mp.weights_name": "policy"}


def update(engine: Engine, version: str) -> None:
    engine.pause()
    engine.call("change_weights")
    engine.call("set_weight_version", version=version)


def test_engines_share_the_pages_of_a_weight_version(server: LMCacheServer) -> None:
    with Engine("llama", server=server, extra_config=NAMED) as engine:
        old = engine.run(TOKENS)
        update(engine, "step 1")
        new = engine.run(TOKENS)
        assert new.external_tokens == 0
        assert new.output != old.output, "the weights are others"
    with Engine("llama", server=server, extra_config=NAMED) as engine:
        assert engine.run(TOKENS).tokens == old.tokens, "of the weights that it has loaded"
        update(engine, "step 1")
        assert served(engine, TOKENS, 512).output == new.output
        update(engine, "step 0")
        assert served(engine, TOKENS, 0).output == old.output, "the weights are again those of before"
        update(engine, "step 1")
        assert served(engine, TOKENS, 512).output == new.output


def test_a_trainer_names_the_weights_over_http(server: LMCacheServer) -> None:
    """The engine core, which knows the version, is another process than the one that is told."""
    answers, hits = [], []
    updates = {"/pause": {}, "/update_weight_version": {"new_version": "step 1"}, "/resume": {}}
    for _ in range(2):
        with ApiServer("llama", server, text=True, **NAMED) as vllm:
            server.wait_for_engine()
            for path, body in updates.items():
                post(f"{vllm.url}{path}", body)
            answers.append(vllm.complete(TOKENS))
            server.wait_until(lambda l1: l1["ready_bytes"] > 0)
            hits.append(server.tokens())
    assert hits == [0, 512]
    assert answers[0] == answers[1]


def test_a_weight_version_that_comes_too_late_or_says_nothing_new_is_no_name(server: LMCacheServer) -> None:
    """Of pages that were computed since the reset, nobody knows the weights."""
    with Engine("llama", server=server, extra_config=NAMED) as engine:
        update(engine, "step 1")
        computed = engine.run(TOKENS)
        assert served(engine, TOKENS, 512).output == computed.output
        engine.pause()
        served(engine, TOKENS, 0)  # the version is no other, but perhaps the weights are
    with Engine("llama", server=server, extra_config=NAMED) as engine:
        engine.pause()
        engine.run(prompt(700, 2))
        engine.call("set_weight_version", version="step 1")
        served(engine, TOKENS, 0)
    with Engine("llama", server=server) as engine:
        update(engine, "step 1")
        served(engine, TOKENS, 0)  # its versions may be those of another training


def test_a_reset_succeeds_while_the_server_is_stopped_and_holds_a_store(
    server: LMCacheServer, start_engine: Callable[..., Engine]
) -> None:
    engine = start_engine("llama", server=server)
    engine.run(TOKENS)
    before = server.metrics()[STORED]
    with stopped(server.pid):
        engine.run(prompt(700, 2), settle=False)
        held = held_blocks(engine)
        assert held > 0, "a store is under way"
        engine.pause()
        engine.call("change_weights")
        assert held_blocks(engine) == held, "its blocks are held as before"
    server.wait_for_metric(STORED, before + 2)
    for number in (1, 2):
        assert_new(engine, number)
    engine.settle()
    assert held_blocks(engine) == 0


def test_a_reset_succeeds_without_a_server_and_holds_for_the_next(tmp_path: Path) -> None:
    """The next server has the pages of before in its file."""
    server = LMCacheServer(l1_size_gb=0.06, l1_path=tmp_path / "l1")
    with Engine("llama", server=server) as engine:
        engine.pause()
        with server:
            server.wait_for_engine()
            assert_new(engine, 1)
            for end in (server.terminate, server.kill):
                end()
                assert engine.reset_prefix_cache()
                engine.pause()
                engine.call("change_weights")
                server.start()
                server.wait_for_engine()
                assert_new(engine, 1)
