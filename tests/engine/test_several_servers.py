"""One engine over several servers: each rank's worker uses its own, and the scheduler asks all of them."""

from collections.abc import Callable

import pytest
from harness.engine import Engine
from harness.prompts import prompt
from harness.served import served, stopped
from harness.server import LMCacheServer
from harness.waiting import wait_until

TWO_RANKS = {"multiprocessing": True, "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}
PATIENT = {"lmcache.mp.lookup_timeout_s": 100}
"""Two ranks and two servers on two cores: an answer can take long."""
HOST = "127.0.0.1"


def engine_over(model: str, servers: list[LMCacheServer], patience: dict[str, int], **llm: object) -> Engine:
    places = {str(rank): f"{HOST}:{server.port}" for rank, server in enumerate(servers)}
    extra = {"lmcache.mp.servers": places, **patience}
    return Engine(  # type: ignore[arg-type]
        model, server=servers[0], other_servers=servers[1:], extra_config=extra, **TWO_RANKS, **llm
    )


def clear(server: LMCacheServer) -> None:
    assert server.cli("clear", "--host", HOST).returncode == 0


def hits(servers: list[LMCacheServer]) -> list[int]:
    return [server.tokens() for server in servers]


@pytest.fixture
def servers(start_server: Callable[..., LMCacheServer]) -> list[LMCacheServer]:
    return [start_server(host=HOST, l1_size_gb=0.1) for _ in range(2)]


# Tensor-parallel ranks that have a server each are in the next test, too.
@pytest.mark.parametrize(
    "split", [pytest.param("tensor_parallel_size", marks=pytest.mark.long), "pipeline_parallel_size"]
)
def test_each_server_has_its_ranks_shards(servers: list[LMCacheServer], split: str) -> None:
    cached = prompt(700, 1)
    with engine_over("gemma3", servers, PATIENT, **{split: 2}) as engine:
        cold = engine.run(cached)
        assert cold.external_tokens == 0
        for rank, server in enumerate(servers):
            workers = [each["rank"] for each in server.status()["sessions"] if each["role"] == "worker"]
            assert workers == [rank]
            assert server.status()["l1"]["chunks"] == 2
        assert served(engine, cached, 512).output == cold.output
        assert hits(servers) == [512, 512]

        # Both servers' bytes are what the output comes from.
        for rank in range(2):
            assert served(engine, cached, 512).output == cold.output
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
        server.wait_at_rest()


def test_servers_that_disagree_are_of_use_as_far_as_both_go(servers: list[LMCacheServer]) -> None:
    short, long = prompt(300, 1), [*prompt(300, 1), *prompt(300, 2)]
    with engine_over("qwen3next", servers, PATIENT, tensor_parallel_size=2) as engine:
        chunk = servers[0].status()["namespaces"][0]["chunk_size"]
        computed = engine.run(long)
        most = len(long) // chunk * chunk
        assert served(engine, long, most).output == computed.output

        clear(servers[1])
        served(engine, long[:40], 0)
        assert engine.run(short).external_tokens == 0, "one server has nothing"
        between = served(engine, long, len(short) // chunk * chunk)
        assert between.output[0] == computed.output[0]
        served(engine, long, most)
        for server in servers:
            server.wait_until(lambda l1: l1["leases"] == 0)
    # What one rank stored is of no use to an engine with all ranks on one server.
    host = {"lmcache.mp.host": HOST}
    with Engine(
        "qwen3next", server=servers[0], extra_config=host, tensor_parallel_size=2, **TWO_RANKS
    ) as engine:
        assert engine.run(long).external_tokens == 0


def test_a_server_that_hangs_or_dies_makes_hits_zero_and_nothing_else(servers: list[LMCacheServer]) -> None:
    cached = prompt(300, 1)
    with engine_over("gemma3", servers, {}, tensor_parallel_size=2) as engine:
        cold = engine.run(cached)

        def is_served() -> bool:
            assert engine.reset_prefix_cache()
            again = engine.run(cached, settle=False)
            assert again.output == cold.output
            return again.external_tokens == 256

        wait_until(is_served, what="both servers have it")
        for lost in servers:
            with stopped(lost.pid):
                assert not is_served()
            wait_until(is_served, what="the server that hung serves")
            lost.kill()
            assert not is_served()
            lost.start()
            assert not is_served(), "it is empty"
            wait_until(is_served, what="the server that was restarted serves")
    for server in servers:
        server.wait_at_rest()
