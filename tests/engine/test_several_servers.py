"""One engine over several servers: each rank's worker uses its own, and the scheduler asks all of them."""

import os
import signal
from collections.abc import Callable

import pytest
from harness.engine import Engine
from harness.prompts import prompt
from harness.server import LMCacheServer
from harness.waiting import wait_until

TWO_RANKS = {"multiprocessing": True, "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}
PATIENT = {"lmcache.mp.lookup_timeout_s": 100}
"""Two ranks and two servers on two cores: an answer can take long."""
HOST = "127.0.0.1"


def engine_over(model: str, servers: list[LMCacheServer], patience: dict[str, int], **llm: object) -> Engine:
    places = {str(rank): f"{HOST}:{server.port}" for rank, server in enumerate(servers)}
    extra = {"lmcache.mp.servers": places, **patience}
    return Engine(model, server=servers[0], extra_config=extra, **TWO_RANKS, **llm)  # type: ignore[arg-type]


def clear(server: LMCacheServer) -> None:
    assert server.cli("clear", "--host", HOST).returncode == 0


def hits(servers: list[LMCacheServer]) -> list[int]:
    return [server.tokens() for server in servers]


@pytest.fixture
def servers(start_server: Callable[..., LMCacheServer]) -> list[LMCacheServer]:
    return [start_server(host=HOST), start_server(host=HOST)]


@pytest.mark.parametrize("split", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_each_server_has_its_ranks_shards(servers: list[LMCacheServer], split: str) -> None:
    cached = prompt(1300, 1)
    with engine_over("gemma3", servers, PATIENT, **{split: 2}) as engine:
        cold = engine.run(cached)
        assert cold.external_tokens == 0
        for rank, server in enumerate(servers):
            workers = [each["rank"] for each in server.status()["sessions"] if each["role"] == "worker"]
            assert workers == [rank]
            assert server.status()["l1"]["chunks"] == 5
        assert engine.reset_prefix_cache()
        restored = engine.run(cached)
        assert restored.external_tokens == 1280
        assert restored.output == cold.output
        assert hits(servers) == [1280, 1280]

        # Both servers' bytes are what the output comes from.
        for rank in range(2):
            assert engine.reset_prefix_cache()
            assert engine.run(cached).output == cold.output
            engine.corrupt_kv(rank=rank)
            assert engine.run(cached).output != cold.output

        # A part held by the engine itself.
        assert engine.reset_prefix_cache()
        engine.run(cached[:257])
        mixed = engine.run(cached)
        assert mixed.local_tokens >= 256
        assert mixed.external_tokens > 0
        assert mixed.output == cold.output
    for server in servers:
        server.wait_at_rest(timeout_s=20)


def test_servers_that_disagree_are_of_use_as_far_as_both_go(servers: list[LMCacheServer]) -> None:
    short, long = prompt(700, 1), [*prompt(700, 1), *prompt(700, 2)]
    with engine_over("qwen3next", servers, PATIENT, tensor_parallel_size=2) as engine:
        chunk = servers[0].status()["namespaces"][0]["chunk_size"]
        computed = engine.run(long)
        most = len(long) // chunk * chunk
        assert engine.reset_prefix_cache()
        restored = engine.run(long)
        assert restored.external_tokens == most
        assert restored.output == computed.output

        clear(servers[1])
        assert engine.reset_prefix_cache()
        assert engine.run(long[:40]).external_tokens == 0
        assert engine.run(short).external_tokens == 0, "one server has nothing"
        assert engine.reset_prefix_cache()
        between = engine.run(long)
        assert between.external_tokens == len(short) // chunk * chunk
        assert between.output[0] == computed.output[0]
        assert engine.reset_prefix_cache()
        assert engine.run(long).external_tokens == most
        for server in servers:
            server.wait_until(lambda l1: l1["leases"] == 0)
    # What one rank stored is of no use to an engine with all ranks on one server.
    with Engine(
        "qwen3next",
        server=servers[0],
        extra_config={"lmcache.mp.host": HOST},
        tensor_parallel_size=2,
        **TWO_RANKS,
    ) as engine:
        assert engine.run(long).external_tokens == 0


def test_a_server_that_hangs_or_dies_makes_hits_zero_and_nothing_else(servers: list[LMCacheServer]) -> None:
    cached = prompt(700, 1)
    with engine_over("gemma3", servers, {}, tensor_parallel_size=2) as engine:
        cold = engine.run(cached)

        def served() -> bool:
            assert engine.reset_prefix_cache()
            again = engine.run(cached)
            assert again.output == cold.output
            return again.external_tokens == 512

        wait_until(served, 60, "both servers have it")
        for lost in servers:
            os.kill(lost.pid, signal.SIGSTOP)
            try:
                assert not served()
            finally:
                os.kill(lost.pid, signal.SIGCONT)
            wait_until(served, 60, "the server that hung serves")
            lost.kill()
            assert not served()
            lost.start()
            assert not served(), "it is empty"
            wait_until(served, 60, "the server that was restarted serves")
    for server in servers:
        server.wait_at_rest(timeout_s=20)
