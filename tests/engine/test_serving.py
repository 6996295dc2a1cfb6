"""What a user of vLLM sees of the connector: names, restarts, sharing, refusals."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.engine import Engine, EngineError
from harness.prompts import prompt
from harness.server import LMCacheServer
from harness.waiting import wait_until

from lmcache_client.contract.keys import tenant_id


@pytest.fixture(scope="module")
def server() -> Iterator[LMCacheServer]:
    with LMCacheServer(l1_size_gb=0.3) as running:
        yield running


def test_three_processes_find_the_connector_by_its_bare_name(server: LMCacheServer) -> None:
    """Frontend, engine core and worker in processes of their own, as `vllm serve` runs them."""
    cached = prompt(700, 1)
    with Engine("gemma3", server=server, multiprocessing=True, cold=True) as engine:
        cold = engine.run(cached)
        what = "the prefix cache of an engine at rest can be reset"
        wait_until(engine.reset_prefix_cache, 1.0, what, interval_s=0.05)
        restored = engine.run(cached)
        assert restored.cached_tokens == 512
        assert restored.output == cold.output
    # Another engine of the same model, started afterwards, with the connector named by module.
    module = {"kv_connector_module_path": "lmcache_client.connector"}
    with Engine("gemma3", server=server, connector=module) as engine:
        again = engine.run(cached)
        assert again.external_tokens == 512
        assert again.output == cold.output


def test_engines_of_two_models_use_one_server_at_once(server: LMCacheServer) -> None:
    cached = prompt(700, 2)
    memory = 16 << 20
    with (
        Engine("llama", server=server, kv_cache_memory_bytes=memory) as llama,
        Engine("qwen3next", server=server, kv_cache_memory_bytes=memory) as qwen,
    ):
        cold = [engine.run(cached) for engine in (llama, qwen)]
        connected = [each["model"] for each in server.status()["namespaces"] if each["engines"]]
        assert len(set(connected)) == 2
        for engine, before in zip((llama, qwen), cold, strict=True):
            assert before.external_tokens == 0, "nothing is shared between models"
            assert engine.reset_prefix_cache()
            restored = engine.run(cached)
            assert restored.external_tokens > 0
            assert restored.output == before.output


FP8 = pytest.param(
    {"kv_cache_dtype": "fp8"},
    marks=pytest.mark.skipif(
        "avx512f" not in Path("/proc/cpuinfo").read_text(),
        reason="on a CPU, vLLM has a KV cache of fp8 with AVX-512 or AMX only",
    ),
)


@pytest.mark.parametrize(
    "other", [{"dtype": "float32"}, {"block_size": 64}, FP8], ids=["dtype", "block", "fp8"]
)
def test_another_layout_of_the_same_model_shares_nothing(
    server: LMCacheServer, other: dict[str, object]
) -> None:
    server.clear()
    cached = prompt(700, 3)
    # The second has a cache of its own.
    for settings in ({}, other):
        with Engine("llama", server=server, **settings) as engine:
            computed = engine.run(cached)
            assert computed.external_tokens == 0
            assert engine.reset_prefix_cache()
            restored = engine.run(cached)
            assert restored.external_tokens > 0
            assert restored.output == computed.output


def test_salts_and_equal_prompts_share_only_with_themselves(server: LMCacheServer) -> None:
    cached = prompt(700, 4)
    with Engine("llama", server=server) as engine:
        engine.run(cached, cache_salt="tenant a")
        assert engine.reset_prefix_cache()
        assert engine.run(cached, cache_salt="tenant b").external_tokens == 0
        assert engine.reset_prefix_cache()
        assert engine.run(cached).external_tokens == 0
        assert engine.reset_prefix_cache()
        assert engine.run(cached, cache_salt="tenant a").external_tokens == 512
        known = lambda: {each["tenant"] for each in server.status()["tenants"]}  # noqa: E731
        wait_until(lambda: known() == {tenant_id(f"tenant {name}").hex() for name in "ab"})
        assert engine.reset_prefix_cache(reset_connector=True)
        assert engine.run(cached, cache_salt="tenant a").external_tokens == 0, "vLLM asked to forget it"


def test_a_chunk_size_that_does_not_fit_is_refused_at_engine_start() -> None:
    with LMCacheServer(chunk_size=100) as server, pytest.raises(EngineError) as refused:
        Engine("llama", server=server).__enter__()
    assert (
        "chunk size 100 is not a multiple of this model's unified block size 128: start the server with "
        "--chunk-size 128, or with --chunk-size auto"
    ) in str(refused.value)


def test_an_engine_outlives_the_server_and_uses_it_when_it_is_there(server: LMCacheServer) -> None:
    cached = prompt(700, 5)
    late = LMCacheServer(l1_size_gb=0.1)
    with Engine("gemma3", server=late) as engine:
        cold = engine.run(cached)
        assert cold.external_tokens == 0
        assert engine.log.read_text().count("no server at") == 1
        assert "[log.py:" not in engine.log.read_text(), "lines are attributed to what logs them"
        with late:
            _wait_for_engine(late)
            assert engine.reset_prefix_cache()
            assert engine.run(cached).output == cold.output
            assert engine.reset_prefix_cache()
            served = engine.run(cached)
            assert served.external_tokens == 512
            assert served.output == cold.output
            late.restart()
            _wait_for_engine(late)
            assert engine.reset_prefix_cache()
            computed = engine.run(cached)
            assert computed.external_tokens == 0, "the new server is empty"
            assert engine.reset_prefix_cache()
            again = engine.run(cached)
            assert again.external_tokens == 512
            assert again.output == computed.output == cold.output
            late.kill()
            assert engine.reset_prefix_cache()
            alone = engine.run(cached)
            assert alone.external_tokens == 0
            assert alone.output == cold.output


def test_an_engine_is_served_by_a_server_that_was_stopped_in_order_and_started_again(tmp_path: Path) -> None:
    cached = prompt(700, 7)
    with (
        LMCacheServer(l1_size_gb=0.1, l1_path=tmp_path / "l1") as server,
        Engine("gemma3", server=server) as engine,
    ):
        cold = engine.run(cached)
        assert cold.external_tokens == 0
        chunks = server.status()["l1"]["chunks"]
        assert server.terminate() == 0
        server.start()
        assert server.status()["l1"]["chunks"] == chunks > 0
        _wait_for_engine(server)
        assert engine.reset_prefix_cache()
        restored = engine.run(cached)
        assert restored.external_tokens == 512
        assert restored.output == cold.output
        server.restart()
        _wait_for_engine(server)
        assert engine.reset_prefix_cache()
        computed = engine.run(cached)
        assert computed.external_tokens == 0, "after a crash it is empty"
        assert computed.output == cold.output


def _wait_for_engine(server: LMCacheServer) -> None:
    both = {"worker", "scheduler"}
    server.wait_for_status(lambda status: {each["role"] for each in status["sessions"]} == both)
    time.sleep(0.3)


def test_a_promise_that_is_broken_is_recomputed(server: LMCacheServer) -> None:
    """The server dies between the lookup and the load; more than one group; vLLM's default policy."""
    cached = prompt(700, 6)
    with LMCacheServer(l1_size_gb=0.1) as dying, Engine("gemma3", server=dying) as engine:
        cold = engine.run(cached)
        assert engine.reset_prefix_cache()
        assert engine.run(cached).external_tokens == 512
        assert engine.reset_prefix_cache()
        engine.call("kill_server_at_load", pid=dying.pid)
        result = engine.run(cached)
        assert result.finish_reason == "length"
        assert result.output == cold.output
        assert result.external_tokens == 0
        info = engine.info()
        assert info["free_blocks"] == info["num_blocks"] - 1
