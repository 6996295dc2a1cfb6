"""Several workers in one engine: a chunk counts only when every shard of every group is stored."""

import pytest
from harness.engine import Engine
from harness.prompts import prompt
from harness.server import LMCacheServer

TWO_RANKS = {"multiprocessing": True, "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}
PATIENT = {"lmcache.mp.lookup_timeout_s": 100}
"""Two ranks and the server on two cores: an answer can take long."""


@pytest.mark.parametrize("model", ["gemma3", "qwen3next"])
def test_tensor_parallel_engines_store_and_restore_their_shards(server: LMCacheServer, model: str) -> None:
    cached = prompt(700, 1)
    # Both answers take the same steps from there on: rounding depends on their lengths.
    split = {"tensor_parallel_size": 2, "max_num_batched_tokens": 256}
    with Engine(model, server=server, extra_config=PATIENT, **split, **TWO_RANKS) as engine:
        cold = engine.run(cached)
        (namespace,) = server.status()["namespaces"]
        assert namespace["world_size"] == 2
        assert {each["rank"] for each in server.status()["sessions"] if each["role"] == "worker"} == {0, 1}
        assert engine.reset_prefix_cache()
        restored = engine.run(cached)
        assert restored.cached_tokens == 512
        assert restored.output == cold.output
    # One rank is a model of its own: its pages hold all heads.
    with Engine(model, server=server) as engine:
        assert engine.run(cached).external_tokens == 0


def test_pipeline_stages_store_and_restore_what_they_hold(server: LMCacheServer) -> None:
    """A stage has layers of some groups only, and its own share of the others."""
    cached = prompt(700, 1)
    with Engine(
        "gemma3", server=server, pipeline_parallel_size=2, extra_config=PATIENT, **TWO_RANKS
    ) as engine:
        cold = engine.run(cached)
        (namespace,) = server.status()["namespaces"]
        assert namespace["world_size"] == 2
        assert engine.reset_prefix_cache()
        restored = engine.run(cached)
        assert restored.cached_tokens == 512
        assert restored.output == cold.output
        assert server.tokens() == 512
    with Engine("gemma3", server=server) as engine:
        assert engine.run(cached).external_tokens == 0


def test_mla_of_two_ranks_is_stored_once(server: LMCacheServer) -> None:
    """By its bytes alone: the CPU backend of vLLM cannot resume MLA, so the connector does not load it."""
    with Engine("dsv2", server=server, tensor_parallel_size=2, extra_config=PATIENT, **TWO_RANKS) as engine:
        engine.run(prompt(700, 1))
        assert len(set(engine.kv_digests())) == 1, "both ranks hold the same bytes"
        (namespace,) = server.status()["namespaces"]
        (group,) = namespace["groups"]
        assert namespace["world_size"] == 2
        assert group["replicated"]
        blocks = namespace["chunks"] * namespace["chunk_size"] // group["block_size"]
        assert namespace["chunks"] == 700 // namespace["chunk_size"]
        assert server.status()["l1"]["stored_bytes"] == blocks * group["block_bytes"]
    server.clear()
    # What each rank has of its own is different, and stored twice.
    with Engine("llama", server=server, tensor_parallel_size=2, extra_config=PATIENT, **TWO_RANKS) as engine:
        engine.run(prompt(700, 1))
        assert len(set(engine.kv_digests())) == 2
        (namespace,) = [each for each in server.status()["namespaces"] if each["engines"]]
        (group,) = namespace["groups"]
        assert not group["replicated"]
        blocks = namespace["chunks"] * namespace["chunk_size"] // group["block_size"]
        assert server.status()["l1"]["stored_bytes"] == 2 * blocks * group["block_bytes"]
