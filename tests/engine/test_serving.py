"""What a user of vLLM sees of the connector: names, restarts, sharing, refusals."""

from pathlib import Path
from typing import Any

import pytest
from harness.engine import Engine, EngineError
from harness.prompts import prompt
from harness.runners import on_both_runners
from harness.served import held_blocks, served
from harness.server import LMCacheServer, server_of_a_file
from harness.waiting import wait_until

from lmcache_client.contract.keys import tenant_id

MEMORY = 16 << 20


server = server_of_a_file(l1_size_gb=0.1)


def test_three_processes_find_the_connector_by_its_bare_name(server: LMCacheServer) -> None:
    """Frontend, engine core and worker in processes of their own; vLLM starts the other two afresh."""
    cached = prompt(700, 1)
    with Engine("gemma3", server=server, multiprocessing=True, spawns=True) as engine:
        cold = engine.run(cached)
        wait_until(engine.reset_prefix_cache, what="the prefix cache of an engine at rest can be reset")
        restored = engine.run(cached)
        assert restored.cached_tokens == 512
        assert restored.output == cold.output
    # Another engine of the same model, started afterwards, with the connector named by module.
    module = {"kv_connector_module_path": "lmcache_client.connector"}
    with Engine("gemma3", server=server, connector=module) as engine:
        assert served(engine, cached, 512).output == cold.output


def test_engines_of_two_models_use_one_server_at_once(server: LMCacheServer) -> None:
    cached = prompt(700, 2)
    with (
        Engine("llama", server=server, kv_cache_memory_bytes=MEMORY) as llama,
        Engine("qwen3next", server=server, kv_cache_memory_bytes=MEMORY) as qwen,
    ):
        cold = [engine.run(cached) for engine in (llama, qwen)]
        assert [each.external_tokens for each in cold] == [0, 0], "nothing is shared between models"
        connected = [each["model"] for each in server.status()["namespaces"] if each["engines"]]
        assert len(set(connected)) == 2
        for engine, before in zip((llama, qwen), cold, strict=True):
            assert engine.reset_prefix_cache()
            restored = engine.run(cached)
            assert restored.external_tokens > 0
            assert restored.output == before.output


def test_of_two_engines_with_one_id_the_earlier_is_served_and_the_later_is_told() -> None:
    """As a copied configuration gives it. They have different numbers of KV cache groups: an answer for the
    other would be nonsense."""
    shared = {"connector": {"engine_id": "prod"}, "kv_cache_memory_bytes": MEMORY}
    with LMCacheServer(l1_size_gb=0.1) as server:
        with Engine("gemma3", server=server, **shared) as earlier:
            cold = earlier.run(prompt(700, 1))
            with Engine("llama", server=server, **shared) as later:
                for _ in range(2):
                    assert served(later, prompt(700, 2), 0).tokens
                assert served(earlier, prompt(700, 1), 512).output == cold.output
        server.wait_for_log("another live engine has the engine_id 'prod': give each engine")


def test_salts_and_equal_prompts_share_only_with_themselves(server: LMCacheServer) -> None:
    cached = prompt(700, 4)
    with Engine("llama", server=server) as engine:
        computed = engine.run(cached, cache_salt="tenant a")
        served(engine, cached, 0, cache_salt="tenant b")
        served(engine, cached, 0)
        assert served(engine, cached, 512, cache_salt="tenant a").tokens == computed.tokens
        known = lambda: {each["tenant"] for each in server.status()["tenants"]}  # noqa: E731
        wait_until(lambda: known() == {tenant_id(f"tenant {name}").hex() for name in "ab"})
        assert engine.reset_prefix_cache(reset_connector=True)
        assert engine.run(cached, cache_salt="tenant a").external_tokens == 0, "vLLM asked to forget it"


def test_a_chunk_size_that_does_not_fit_is_refused_at_engine_start() -> None:
    with LMCacheServer(l1_size_gb=0.06, chunk_size=100) as server, pytest.raises(EngineError) as refused:
        Engine("llama", server=server).__enter__()
    assert (
        "chunk size 100 is not a multiple of this model's unified block size 128: start the server without "
        "--chunk-size, or with 128"
    ) in str(refused.value)


def test_an_engine_outlives_the_server_and_uses_it_when_it_is_there(tmp_path: Path) -> None:
    cached = prompt(700, 5)
    server = LMCacheServer(l1_size_gb=0.1, l1_path=tmp_path / "l1")
    with Engine("gemma3", server=server) as engine:
        cold = engine.run(cached)
        assert cold.external_tokens == 0
        assert engine.log.read_text().count("no server at") == 1
        assert "[log.py:" not in engine.log.read_text(), "lines are attributed to what logs them"
        with server:
            server.wait_for_engine()
            assert served(engine, cached, 0).output == cold.output
            assert served(engine, cached, 512).output == cold.output
            # It is stopped in order, and started again.
            chunks = server.status()["l1"]["chunks"]
            assert server.terminate() == 0
            server.start()
            assert server.status()["l1"]["chunks"] == chunks > 0
            server.wait_for_engine()
            assert served(engine, cached, 512).output == cold.output
            # After a crash it is empty.
            server.restart()
            server.wait_for_engine()
            assert served(engine, cached, 0).output == cold.output
            assert served(engine, cached, 512).output == cold.output
            server.kill()
            assert served(engine, cached, 0).output == cold.output


@on_both_runners
def test_a_promise_that_is_broken_is_recomputed(runner: dict[str, Any]) -> None:
    """The server dies between the lookup and the load; more than one group; vLLM's default policy."""
    cached = prompt(700, 6)
    with LMCacheServer(l1_size_gb=0.1) as dying, Engine("gemma3", server=dying, **runner) as engine:
        cold = engine.run(cached)
        served(engine, cached, 512)
        engine.call("kill_server_at_load", pid=dying.pid)
        result = served(engine, cached, 0)
        assert result.finish_reason == "length"
        assert result.output == cold.output
        assert held_blocks(engine) == 0


def test_vllms_own_flags_for_offloading_reach_the_connector_and_the_size_is_compared() -> None:
    """--kv-offloading-backend lmcache and a size."""
    cached = prompt(700, 1)
    flags = {"kv_offloading_backend": "lmcache", "kv_offloading_size": 2.0}
    with LMCacheServer(l1_size_gb=0.06) as server, Engine("llama", server=server, **flags) as engine:
        cold = served(engine, cached, 0)
        assert engine.reset_prefix_cache()
        assert served(engine, cached, 512).output == cold.output
        log = engine.log.read_text()
    assert "--kv-offloading-size asks for 2 GB, but the server has 0.06: start it with --l1-size-gb 2" in log
    assert "LMCacheMPConnector is that of lmcache-mp" in log
    assert " have room for about " in log
