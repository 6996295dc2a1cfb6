"""vLLM's NixlConnector and this one in the same engines, as children of a MultiConnector.

NIXL brings a prompt's pages from the prefill engine to the decode engine. Each engine's server keeps them.

Real NIXL, over TCP, between two engines of this machine. The prompt's end is not at the end of a chunk.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from harness import tools
from harness.engine import Engine, Result
from harness.paths import NIXL
from harness.processes import free_port
from harness.prompts import prompt
from harness.served import held_blocks, served
from harness.server import LMCacheServer
from harness.waiting import wait_until

PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
}
"""What a router says to the prefill engine."""
CHUNK = 256
STORED = 2 * CHUNK
TOKENS = STORED + 76
ANSWER = 8


@pytest.fixture
def servers() -> Iterator[tuple[LMCacheServer, LMCacheServer]]:
    if not (NIXL / "nixl").is_dir():
        tools.missing(f"needs the package of NIXL in {NIXL}: make .venv/stamps/nixl")
    with LMCacheServer(l1_size_gb=0.1) as prefill, LMCacheServer(l1_size_gb=0.1) as decode:
        yield prefill, decode


def both(model: str, server: LMCacheServer, nixl_first: bool = True) -> Engine:
    own = {"kv_connector_extra_config": {"lmcache.mp.port": server.port}}
    children = [
        {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"},
        {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", **own},
    ]
    multi = {
        "kv_connector": "MultiConnector",
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {"connectors": children if nixl_first else children[::-1]},
    }
    environment = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "UCX_TLS": "tcp,self",
        "UCX_NET_DEVICES": "lo",
        "PYTHONPATH": str(NIXL),
    }
    return Engine(model, server=server, connector=multi, env=environment, cold=False)


def prefilled(engine: Engine, tokens: list[int]) -> dict[str, Any]:
    """What the prefill engine tells the decode engine. It keeps its blocks until they are read."""
    (first,) = engine.generate([tokens], 1, transfer=PREFILL, settle=False)
    assert first.transfer is not None
    assert first.transfer["do_remote_prefill"] is True
    assert first.transfer["lmcache.wait_tokens"] == STORED
    return first.transfer


def decoded(engine: Engine, tokens: list[int], transfer: dict[str, Any]) -> Result:
    return engine.generate([tokens], ANSWER, transfer=transfer, settle=False)[0]


def settle(*engines: Engine) -> None:
    for engine in engines:
        engine.settle()
        wait_until(lambda: held_blocks(engine) == 0)  # noqa: B023


def test_nixl_brings_the_pages_and_the_server_keeps_them(
    servers: tuple[LMCacheServer, LMCacheServer],
) -> None:
    tokens, others = prompt(TOKENS, 1), prompt(TOKENS, 2)
    with both("gemma3", servers[0]) as prefill:
        with both("gemma3", servers[1]) as decode:
            brought = decoded(decode, tokens, prefilled(prefill, tokens))
            assert (brought.external_tokens, brought.local_tokens) == (TOKENS, 0)
            load = 'lmcache_transfer_bytes_total{direction="load"}'
            assert servers[1].metrics().get(load, 0) == 0, "NIXL brought them, not the server"
            settle(prefill, decode)
            alone = prefill.run(tokens, ANSWER)
            assert (alone.local_tokens, alone.external_tokens) == (STORED, 0)
            assert brought.tokens == alone.tokens

            # The decode engine's own server has the prompt now.
            assert served(decode, tokens, STORED, ANSWER).output == alone.output
            decode.corrupt_kv()
            assert decode.run(tokens, ANSWER).output != alone.output
        # The engine has ended, and another one goes on. If the server is asked first, what it has need not be
        # brought. The prefill engine then frees the blocks that nobody has read.
        with both("gemma3", servers[1], nixl_first=False) as later:
            kept = decoded(later, tokens, prefilled(prefill, tokens))
            assert (kept.external_tokens, kept.local_tokens) == (STORED, 0)
            settle(prefill, later)
            assert kept.output == alone.output
            brought = decoded(later, others, prefilled(prefill, others))
            assert brought.external_tokens == TOKENS, "the server does not have it"
            settle(prefill, later)
            assert brought.tokens == prefill.run(others, ANSWER).tokens
