"""Situations in which other caches of this kind were seen to lose or corrupt what they hold."""

from typing import Any

from harness.engine import Engine
from harness.prompts import prompt
from harness.runners import on_both_runners
from harness.served import held_blocks, served
from harness.server import LMCacheServer, server_of_a_file

LOOKUPS = 'lmcache_requests_total{op="lookup",outcome="ok"}'


server = server_of_a_file(l1_size_gb=0.3)


def resumed(engine: Engine, server: LMCacheServer, first: list[int], lengths: tuple[int, ...]) -> list[int]:
    """Where prompts that share so much of the first one are resumed from the server. From its own prefix
    cache, the engine resumes at the same tokens, rounds the same way, and gives the same output."""
    prompts = [[*first[:length], *prompt(40, length)] for length in lengths]
    server.clear()
    engine.run(first)
    results = []
    for tokens in prompts:
        assert engine.reset_prefix_cache()
        results.append(engine.run(tokens))
    assert engine.reset_prefix_cache()
    server.clear()
    engine.run(first)
    for tokens, result in zip(prompts, results, strict=True):
        server.clear()
        local = engine.run(tokens)
        assert (local.external_tokens, local.local_tokens) == (0, result.external_tokens)
        assert local.output == result.output
    return [result.external_tokens for result in results]


def test_recurrent_prompts_that_share_prefixes_of_many_lengths(server: LMCacheServer) -> None:
    """States exist at ends of steps only, and steps are longer than a block: every other boundary must
    not be resumed at."""
    with Engine(
        "qwen3next",
        server=server,
        block_size=32,
        max_num_batched_tokens=512,
        prefix_cache_retention_interval=None,
        extra_config={"lmcache.mp.store_everything": True},
    ) as engine:
        points = resumed(engine, server, prompt(1300, 1), (200, 770, 1284))
        assert sum(point > 0 for point in points) == 2


def test_the_advised_settings_give_a_resume_point_at_every_chunk(server: LMCacheServer) -> None:
    """What the connector logs for recurrent models is true: with these three settings, every boundary."""
    with Engine(
        "qwen3next",
        server=server,
        block_size=32,
        max_num_batched_tokens=319,
        prefix_cache_retention_interval=160,
        extra_config={"lmcache.mp.store_everything": True},
    ) as engine:
        lengths = (200, 645, 1284)
        points = resumed(engine, server, prompt(1300, 6), lengths)
        assert points == [length // 160 * 160 for length in lengths]


def test_pages_that_vllm_damages_where_it_resumes_inside_a_block_reach_no_other_engine(
    server: LMCacheServer,
) -> None:
    """If vLLM's own answer is right one day, it has mended its copy, and may be served again."""
    first = prompt(723, 1)
    longer = [*first[:715], *prompt(400, 2)]
    more: dict[str, Any] = {"block_size": 32, "prefix_match_unit": 32}
    with Engine("qwen3next", server=server, **more) as engine:
        cold = engine.run(longer)
        assert engine.reset_prefix_cache()
        engine.run(first)
        resumed_inside = engine.run(longer)
        assert resumed_inside.local_tokens == 704
        assert resumed_inside.output != cold.output
        assert (
            "resumes inside a block, where it damages pages: leave out --prefix-match-unit"
            in engine.log.read_text()
        )
    with Engine("qwen3next", server=server, **more) as engine:
        result = engine.run(longer)
        assert (result.external_tokens, result.output) == (0, cold.output)


def test_null_blocks_inside_a_chunk_are_never_stored(server: LMCacheServer) -> None:
    """The server is cleared while the engine's own prefix cache is not: the next store sees blocks that
    the sliding window has left behind."""
    first = prompt(1500, 2)
    everything = {"lmcache.mp.store_everything": True}
    with Engine("gemma3", server=server, block_size=128, dtype="bfloat16", extra_config=everything) as engine:
        server.clear()
        engine.run(first)
        server.clear()
        longer = [*first, *prompt(300, 3)]
        computed = engine.run(longer)
        assert computed.local_tokens > 0
        assert computed.external_tokens == 0
        # What the window still held was stored, and serves; what it had left behind was not.
        assert engine.reset_prefix_cache()
        served = engine.run(longer)
        assert served.external_tokens > computed.local_tokens
        assert served.output == computed.output
        resumed = {}
        for length in (400, 700, 1285):
            assert engine.reset_prefix_cache()
            resumed[length] = engine.run([*first[:length], *prompt(6, length)])
        for length, result in resumed.items():
            server.clear()
            assert engine.reset_prefix_cache()
            assert result.output == engine.run([*first[:length], *prompt(6, length)]).output


def test_a_burst_beyond_l1_still_serves_the_latest() -> None:
    with (
        LMCacheServer(l1_size_gb=4 / 1024, chunk_size=32) as small,
        Engine("llama", server=small, block_size=32) as engine,
    ):
        cold = [engine.run(prompt(520, 100 + i)) for i in range(8)]
        small.wait_until(lambda _: small.metrics()["lmcache_evicted_chunks_total"] > 0)
        assert small.metrics()['lmcache_objects_total{outcome="no_room"}'] == 0
        assert served(engine, prompt(520, 107), 512).output == cold[-1].output


def test_lookups_that_are_never_consumed_leave_no_lease(server: LMCacheServer) -> None:
    with Engine("llama", server=server, num_gpu_blocks_override=40) as engine:
        cached = prompt(1100, 4)
        engine.run(cached)
        assert engine.reset_prefix_cache()
        asked = server.metrics()[LOOKUPS]
        for _ in range(5):
            names = engine.submit([[*cached, *prompt(2000, 7)], [*cached, *prompt(2000, 8)]])
            engine.step(1)
            engine.abort(names)
            engine.settle()
        server.wait_until(lambda l1: l1["leases"] == 0)
        assert held_blocks(engine) == 0
        assert server.metrics()[LOOKUPS] >= asked + 5, "they were looked up"
        served(engine, cached, 1024)


@on_both_runners
def test_preemption_under_load_finishes_and_leaks_no_block(
    server: LMCacheServer, runner: dict[str, Any]
) -> None:
    """Their answers grow into another block, of which there are not enough."""
    few = {"num_gpu_blocks_override": 60, "max_model_len": 2048}
    with Engine("gemma3", server=server, **few, **runner) as engine:
        prompts = [prompt(1010, 50 + i) for i in range(6)]
        for _ in range(2):
            results = engine.generate(prompts, 30)
            assert all(each.finish_reason == "length" and len(each.tokens) == 30 for each in results)
        assert engine.metrics()["vllm:num_preemptions"] > 0
        assert held_blocks(engine) == 0
        assert server.status()["l1"]["leases"] == 0
