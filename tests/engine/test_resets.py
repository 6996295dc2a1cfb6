"""vLLM resets its cache, as for a weight update: what was computed before serves nobody any more."""

from pathlib import Path

import pytest
from harness.api_server import ApiServer
from harness.clients import go_on, stop
from harness.engine import Engine
from harness.prompts import prompt
from harness.routers import post
from harness.server import LMCacheServer
from harness.waiting import wait_until

STORED = 'lmcache_objects_total{outcome="stored"}'


def assert_new(engine: Engine, number: int) -> None:
    """The pages of this prompt in the cache are of before a reset: it is computed, and stored, again."""
    computed = engine.run(prompt(700, number))
    assert computed.external_tokens == 0
    assert engine.reset_prefix_cache()
    served = engine.run(prompt(700, number))
    assert served.external_tokens == 512
    assert served.output == computed.output


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_pages_of_old_weights_are_not_served_to_new_ones(mode: str) -> None:
    with LMCacheServer(l1_size_gb=0.1) as server, Engine("llama", server=server) as engine:
        old = engine.run(prompt(700, 1))
        names = engine.submit([prompt(900, 2)], 40)
        engine.step(4)
        engine.pause(mode)
        engine.change_weights()
        if mode == "keep":
            assert len(engine.collect(names)[0].tokens) == 40
        assert_new(engine, 1)
        assert engine.run(prompt(700, 1)).output != old.output, "the weights are others"
        engine.settle()
        info = engine.info()
        assert info["free_blocks"] == info["num_blocks"] - 1


def test_a_request_that_goes_on_over_a_reset_stores_nothing_more() -> None:
    """vLLM resets nothing while requests run, unless it preempts them, but it asks its connector to."""
    with LMCacheServer(l1_size_gb=0.1) as server, Engine("llama", server=server) as engine:
        names = engine.submit([prompt(700, 1)], 100)
        engine.step(4)
        assert not engine.reset_prefix_cache(reset_connector=True)
        assert len(engine.collect(names)[0].tokens) == 100
        engine.settle()
        assert_new(engine, 1)


NAMED = {"lmcache.mp.weights_name": "policy"}


def update(engine: Engine, version: str) -> None:
    engine.pause()
    engine.change_weights()
    engine.set_weight_version(version)


def test_engines_share_the_pages_of_a_weight_version() -> None:
    tokens = prompt(700, 1)
    with LMCacheServer(l1_size_gb=0.1) as server:
        with Engine("llama", server=server, extra_config=NAMED) as engine:
            old = engine.run(tokens)
            update(engine, "step 1")
            new = engine.run(tokens)
            assert new.external_tokens == 0
            assert new.output != old.output, "the weights are others"
        with Engine("llama", server=server, extra_config=NAMED) as engine:
            assert engine.run(tokens).tokens == old.tokens, "of the weights that it has loaded"
            update(engine, "step 1")
            served = engine.run(tokens)
            assert served.external_tokens == 512
            assert served.output == new.output
            update(engine, "step 0")
            other = engine.run(tokens)
            assert other.external_tokens == 0
            assert other.output == old.output, "the weights are again those of before"
            update(engine, "step 1")
            again = engine.run(tokens)
            assert again.external_tokens == 512
            assert again.output == new.output


def test_a_trainer_names_the_weights_over_http() -> None:
    """The engine core, which knows the version, is another process than the one that is told."""
    tokens, answers, hits = prompt(700, 1), [], []
    with LMCacheServer(l1_size_gb=0.1) as server:
        for _ in range(2):
            with ApiServer("llama", server, text=True, **NAMED) as vllm:
                server.wait_for_engine()
                for path, body in {
                    "/pause": {}, "/update_weight_version": {"new_version": "step 1"}, "/resume": {},
                }.items():  # fmt: skip
                    post(f"{vllm.url}{path}", body)
                answers.append(vllm.complete(tokens))
                server.wait_until(lambda l1: l1["ready_bytes"] > 0)
                hits.append(server.status()["tokens"]["hit"])
    assert hits == [0, 512]
    assert answers[0] == answers[1]


def test_a_weight_version_that_comes_too_late_or_says_nothing_new_is_no_name() -> None:
    """Of pages that were computed since the reset, nobody knows the weights."""
    tokens = prompt(700, 1)
    with LMCacheServer(l1_size_gb=0.1) as server:
        with Engine("llama", server=server, extra_config=NAMED) as engine:
            update(engine, "step 1")
            computed = engine.run(tokens)
            assert engine.reset_prefix_cache()
            served = engine.run(tokens)
            assert served.external_tokens == 512
            assert served.output == computed.output
            engine.pause()
            assert engine.run(tokens).external_tokens == 0, "the version is no other, but perhaps the weights"
        with Engine("llama", server=server, extra_config=NAMED) as engine:
            engine.pause()
            engine.run(prompt(700, 2))
            engine.set_weight_version("step 1")
            assert engine.run(tokens).external_tokens == 0
        with Engine("llama", server=server) as engine:
            update(engine, "step 1")
            assert engine.run(tokens).external_tokens == 0, "its versions may be those of another training"


def test_a_reset_gives_the_memory_back() -> None:
    with LMCacheServer(l1_size_gb=0.1) as server, Engine("llama", server=server) as engine:
        engine.run(prompt(700, 1))
        server.wait_until(lambda l1: l1["ready_bytes"] > 0)
        engine.pause()
        server.wait_until(lambda l1: l1["ready_bytes"] == 0)


def test_a_reset_succeeds_while_the_server_is_stopped_and_holds_a_store() -> None:
    with LMCacheServer(l1_size_gb=0.1) as server, Engine("llama", server=server) as engine:
        engine.run(prompt(700, 1))
        before, all_blocks = server.metrics()[STORED], engine.info()["num_blocks"] - 1
        stop(server.pid)
        try:
            engine.run(prompt(700, 2), settle=False)
            held = all_blocks - engine.info()["free_blocks"]
            assert held > 0, "a store is under way"
            engine.pause()
            engine.change_weights()
            assert all_blocks - engine.info()["free_blocks"] == held, "its blocks are held as before"
        finally:
            go_on(server.pid)
        wait_until(lambda: server.metrics()[STORED] > before, 10.0, "the store has been carried out")
        for number in (1, 2):
            assert_new(engine, number)
        engine.settle()
        assert engine.info()["free_blocks"] == all_blocks


def test_a_reset_succeeds_without_a_server_and_holds_for_the_next(tmp_path: Path) -> None:
    """The next server has the pages of before in its file."""
    server = LMCacheServer(l1_size_gb=0.1, l1_path=tmp_path / "l1")
    with Engine("llama", server=server) as engine:
        engine.pause()
        with server:
            server.wait_for_engine()
            assert_new(engine, 1)
            assert server.terminate() == 0
            engine.pause()
            engine.change_weights()
            server.start()
            server.wait_for_engine()
            assert_new(engine, 1)
            server.kill()
            assert engine.reset_prefix_cache()
            engine.pause()
            engine.change_weights()
            server.start()
            server.wait_for_engine()
            assert_new(engine, 1)
