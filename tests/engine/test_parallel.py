"""Several workers in one engine, each with shards of its own; and replicas, which share what they store."""

from typing import Any

import pytest
from harness.api_server import ApiServer
from harness.engine import Engine
from harness.prompts import prompt
from harness.served import served
from harness.server import LMCacheServer, server_of_a_test
from harness.waiting import wait_until
from prometheus_client.parser import text_string_to_metric_families

from lmcache_client.connector.stats import PREFIX

CACHED = prompt(700, 1)
PATIENT = {"lmcache.mp.lookup_timeout_s": 100}
"""Two ranks and the server on two cores: an answer can take long."""


server = server_of_a_test(l1_size_gb=0.1)


def two_ranks(model: str, server: LMCacheServer, **llm: Any) -> Engine:
    bound = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    return Engine(model, server=server, extra_config=PATIENT, multiprocessing=True, env=bound, **llm)


def namespace_of_two(server: LMCacheServer) -> Any:
    (namespace,) = [each for each in server.status()["namespaces"] if each["engines"]]
    assert namespace["world_size"] == 2
    return namespace


@pytest.mark.parametrize(
    ("model", "split"),
    [
        pytest.param("gemma3", "tensor_parallel_size", marks=pytest.mark.long),
        ("qwen3next", "tensor_parallel_size"),
        # A stage has layers of some groups only, and its own share of the others.
        ("gemma3", "pipeline_parallel_size"),
    ],
)
def test_ranks_and_stages_store_and_restore_their_shards(
    server: LMCacheServer, model: str, split: str
) -> None:
    # Both answers take the same steps from there on: rounding depends on their lengths.
    with two_ranks(model, server, max_num_batched_tokens=256, **{split: 2}) as engine:
        cold = engine.run(CACHED)
        namespace_of_two(server)
        assert {each["rank"] for each in server.status()["sessions"] if each["role"] == "worker"} == {0, 1}
        assert served(engine, CACHED, 512).output == cold.output
        assert server.tokens() == 512
    # One rank is a model of its own: its pages hold all heads, and all layers.
    with Engine(model, server=server) as engine:
        assert engine.run(CACHED).external_tokens == 0


@pytest.mark.parametrize("model", ["dsv2", "llama"])
def test_only_mla_of_two_ranks_is_stored_once(server: LMCacheServer, model: str) -> None:
    """By its bytes alone: the CPU backend of vLLM cannot resume MLA, so the connector does not load it."""
    copies = 1 if model == "dsv2" else 2
    with two_ranks(model, server, tensor_parallel_size=2) as engine:
        engine.run(CACHED)
        assert len(set(engine.call("kv_digests"))) == copies, "whether both ranks hold the same bytes"
        namespace = namespace_of_two(server)
        (group,) = namespace["groups"]
        assert group["replicated"] == (copies == 1)
        assert namespace["chunks"] == 700 // namespace["chunk_size"]
        blocks = namespace["chunks"] * namespace["chunk_size"] // group["block_size"]
        assert server.status()["l1"]["stored_bytes"] == copies * blocks * group["block_bytes"]


def by_replica(api: ApiServer, name: str) -> list[float]:
    samples = [
        sample
        for family in text_string_to_metric_families(api.get("/metrics"))
        for sample in family.samples
        if sample.name == PREFIX + name
    ]
    return [each.value for each in sorted(samples, key=lambda each: each.labels["engine"])]


def test_one_replica_is_served_what_the_other_stored(server: LMCacheServer) -> None:
    with ApiServer("llama", server, "--data-parallel-size", "2", **PATIENT) as api:
        (namespace,) = server.status()["namespaces"]
        assert {name.rpartition("_")[2] for name in namespace["engines"]} == {"dp0", "dp1"}
        first = api.complete(CACHED, replica=0)
        what = "the first replica has stored both chunks, and the second nothing"
        wait_until(lambda: by_replica(api, "stored_objects_total") == [2, 0], what=what)
        assert api.complete(CACHED, replica=1) == first
        assert by_replica(api, "loaded_tokens_total") == [0, 512]
        assert by_replica(api, "loads_total") == [0, 1]
        assert by_replica(api, "load_seconds_count") == [0, 1]
