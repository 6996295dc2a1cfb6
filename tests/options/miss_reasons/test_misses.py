"""A real server tells which model hits, and why another does not: in /metrics, its status and its log."""

import json

from harness.processes import free_port
from harness.rawclient import RawEngine, chain, group
from harness.server import LMCacheServer
from prometheus_client.parser import text_string_to_metric_families

TABLE = [range(1, 33)]
NONE = dict.fromkeys(("not_stored", "evicted", "tier_down", "tier_late", "no_state", "partial"), 0)


def series(server: LMCacheServer, metric: str, model: str) -> dict[str, float]:
    """The series of a metric for a model, by the value of its own label."""
    families = text_string_to_metric_families(server.get("/metrics"))
    samples = [sample for family in families for sample in family.samples if sample.name == metric]
    found = {}
    for sample in samples:
        labels = dict(sample.labels)
        if labels.pop("model") == model and labels.pop("namespace"):
            found["".join(labels.values())] = sample.value
    return found


def evicted_prompt(own: RawEngine, other: RawEngine) -> tuple[bytes, ...]:
    """The keys of a prompt that `own` has stored, and that eleven prompts of `other` have evicted."""
    first = chain(range(512), 16)
    own.store_prompt(first, TABLE)
    for seed in range(1, 12):
        other.store_prompt(chain(range(seed * 1000, seed * 1000 + 512), 16), TABLE)
    return first


def test_models_are_counted_by_themselves_and_each_miss_has_its_reason() -> None:
    with LMCacheServer(l1_size_gb=0.012, chunk_size=16, log_level="debug", log_format="json") as server:
        hits = RawEngine(server.address, [group()], model="hits", engine_id="one").start()
        misses = RawEngine(server.address, [group()], model="misses", engine_id="two").start()
        first = evicted_prompt(hits, misses)
        misses.lookup(first)
        misses.lookup(chain(range(1000, 1512), 16))
        hits.store_prompt(first, TABLE)
        hits.end(hits.lookup(first), first)

        asked = dict.fromkeys(("computed", "hit", "miss", "tail"), 0.0)
        assert series(server, "lmcache_tokens_total", "hits") == {**asked, "hit": 512, "tail": 1}
        assert series(server, "lmcache_tokens_total", "misses") == {**asked, "miss": 1024, "tail": 2}
        reasons = {**NONE, "not_stored": 512, "evicted": 512}
        assert series(server, "lmcache_missed_tokens_total", "misses") == reasons
        assert series(server, "lmcache_objects_total", "misses")["stored"] == 11 * 32
        assert series(server, "lmcache_transfer_bytes_total", "hits")["store"] > 0
        assert set(series(server, "lmcache_tokens_total", "other").values()) == {0}

        namespaces = {each["model"]: each for each in server.status()["namespaces"]}
        assert namespaces["misses"]["missed"] == reasons
        assert namespaces["misses"]["tokens"]["miss"] == 1024
        assert "512 never stored, 512 evicted" in server.cli("status").stdout
        server.wait_for_log('"missed": ', 3)
        lines = [json.loads(line) for line in server.log.read_text().splitlines()]
        told = [line["missed"] for line in lines if line.get("request_id") and "missed" in line]
        assert told == [{"not_stored": 512}, {"evicted": 512}, {}]


def test_what_a_failing_tier_may_have_is_missed_because_of_it() -> None:
    tier = f"valkey://127.0.0.1:{free_port()}"
    with LMCacheServer(l1_size_gb=0.012, chunk_size=16, tier=tier) as server:
        engine = RawEngine(server.address, [group()]).start()
        first = evicted_prompt(engine, engine)
        engine.lookup(first)
        engine.lookup(chain(range(99_000, 99_512), 16))
        missed = {**NONE, "tier_down": 1024}
        assert series(server, "lmcache_missed_tokens_total", "model") == missed
        assert "1,024 perhaps in a tier that is left alone" in server.cli("status").stdout
