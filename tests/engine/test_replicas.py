"""Data-parallel replicas behind one OpenAI server share what any of them stored."""

from harness.api_server import ApiServer
from harness.prompts import prompt
from harness.server import LMCacheServer
from harness.waiting import wait_until
from prometheus_client.parser import text_string_to_metric_families

from lmcache_client.connector.stats import PREFIX


def by_replica(api: ApiServer, name: str) -> list[float]:
    """A counter of the connector in vLLM's /metrics, per replica."""
    samples = [
        sample
        for family in text_string_to_metric_families(api.get("/metrics"))
        for sample in family.samples
        if sample.name == PREFIX + name
    ]
    return [each.value for each in sorted(samples, key=lambda each: each.labels["engine"])]


def test_one_replica_is_served_what_the_other_stored(server: LMCacheServer) -> None:
    cached = prompt(700, 1)
    patient = {"lmcache.mp.lookup_timeout_s": 100}
    with ApiServer("llama", server, "--data-parallel-size", "2", **patient) as api:
        (namespace,) = server.status()["namespaces"]
        assert {name.rpartition("_")[2] for name in namespace["engines"]} == {"dp0", "dp1"}
        first = api.complete(cached, replica=0)
        what = "the first replica has stored both chunks, and the second nothing"
        wait_until(lambda: by_replica(api, "stored_objects_total") == [2, 0], 20.0, what, interval_s=0.1)
        assert api.complete(cached, replica=1) == first
        assert by_replica(api, "loaded_tokens_total") == [0, 512]
        assert by_replica(api, "loads_total") == [0, 1]
        assert by_replica(api, "load_seconds_count") == [0, 1]
