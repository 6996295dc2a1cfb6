"""A tier gives what a larger L1 would: the beginning of a public trace through the real server."""

import sys

import pytest
from harness.paths import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import replay
import tier_trace

REQUESTS, L1_CHUNKS, TIER_CHUNKS = 300, 1_600, 50_000


def test_a_directory_behind_a_small_l1_hits_as_two_caches_do(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BENCH_TIER_DIR", str(tmp_path))
    requests = replay.load()[:REQUESTS]
    prompts = [request.ids for request in requests]
    expected = tier_trace.oracle(prompts, L1_CHUNKS, TIER_CHUNKS)
    alone = tier_trace.oracle(prompts, L1_CHUNKS, 0)
    assert sum(expected) > 1.2 * sum(alone), "the tier matters here"
    outcome = tier_trace.serve(requests, L1_CHUNKS, TIER_CHUNKS)
    assert [hit // replay.CHUNK for hit in outcome.hits] == expected
    assert outcome.objects["read"] > 0
