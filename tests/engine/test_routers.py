"""Routers of other projects, in front of real engines.

Two engines have a server each, as on two hosts. Their own caches hold little more than one prompt.
"""

import itertools
import json
import random
import string
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from harness import stores
from harness.api_server import ApiServer
from harness.processes import free_port
from harness.routers import PrefillDecodeRouter, Router, VllmRouter, ask, needs
from harness.server import LMCacheServer
from harness.waiting import wait_until

CHUNK, BLOCK = 256, 32
PROMPT_TOKENS = 1000
STORED_TOKENS = PROMPT_TOKENS // CHUNK * CHUNK
NUMBERS = itertools.count()


def text(letters: int = PROMPT_TOKENS) -> str:
    """A prompt that nobody has seen, of one token a letter."""
    return "".join(random.Random(next(NUMBERS)).choices(string.ascii_lowercase, k=letters))


@pytest.mark.timeout(600)
def test_a_router_sends_a_prompt_to_the_engine_whose_server_has_it(
    stack: ExitStack, start_server: Callable[..., LMCacheServer]
) -> None:
    needs("vllm_router")
    engines, ports = [], [free_port(), free_port()]
    for port in ports:
        config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}"}
        flags = ["--kv-events-config", json.dumps(config), "--block-size", str(BLOCK)]
        # Two prompts evict all others.
        flags += ["--num-gpu-blocks-override", "48", "--max-model-len", "1200", "--served-model-name", "tiny"]
        # vllm-router has engines turn texts into tokens.
        flags += ["--enable-scale-out"]
        server = start_server(l1_size_gb=0.06, chunk_size=CHUNK)
        engines.append(ApiServer("llama", server, *flags, text=True))
    start_together(stack, engines)

    router = stack.enter_context(VllmRouter(engines, ports, BLOCK))
    credits, served = evicted_prompts(router, engines)
    assert credits == [STORED_TOKENS] * 4, "the router does not know what the servers have"
    assert served == [2 * STORED_TOKENS, 2 * STORED_TOKENS], "the router sends a prompt elsewhere"


def start_together(stack: ExitStack, engines: Sequence[ApiServer]) -> None:
    """An engine mostly waits for its own start."""
    for engine in engines:
        engine.start()
        stack.push(engine.__exit__)
    for engine in engines:
        engine.wait_until_ready()


def evicted_prompts(router: Router, engines: Sequence[ApiServer]) -> tuple[list[int], list[int]]:
    """Gives each engine two prompts and lets it evict them, then sends them to the router: what it credited
    for each, and how many tokens each server served."""
    stored = 'lmcache_objects_total{outcome="stored"}'

    def heard(url: str) -> None:

        def knows_the_last() -> bool:
            before, last = len(router.credits()), text(2 * BLOCK + 1)
            ask(url, last)
            router.ask(last)
            return any(router.credits()[before:])

        for _ in range(2):
            wait_until(knows_the_last, what="the router hears the engine")

    for engine in engines:
        heard(engine.url)
    prompts = [text() for _ in range(4)]
    computed = [ask(engines[index % 2].url, each) for index, each in enumerate(prompts)]
    for engine in engines:
        for _ in range(2):
            ask(engine.url, text())
        engine.server.wait_for_metric(stored, 4 * STORED_TOKENS // CHUNK)
        heard(engine.url)
    given, served = len(router.credits()), [engine.server.tokens() for engine in engines]
    assert [router.ask(each) for each in prompts] == computed
    more = [engine.server.tokens() - before for engine, before in zip(engines, served, strict=True)]
    return router.credits()[given:], more


@pytest.mark.timeout(600)
def test_a_router_hands_prompts_from_prefill_to_decode(
    stack: ExitStack, start_server: Callable[..., LMCacheServer], tmp_path: Path
) -> None:
    needs("vllm_router")
    store = stack.enter_context(stores.valkey(tmp_path))
    engines = []
    for _ in range(2):
        server = start_server(tier=f"valkey://127.0.0.1:{store.port}?write=commit", chunk_size=CHUNK)
        flags = ["--block-size", str(BLOCK), "--served-model-name", "tiny"]
        waits = {"lmcache.mp.wait_timeout_s": 60}
        engines.append(ApiServer("llama", server, *flags, text=True, **waits))
    start_together(stack, engines)
    prefill, decode = engines
    router = stack.enter_context(PrefillDecodeRouter(prefill, decode))

    def is_handed_over() -> bool:
        """On a busy machine the store may be too slow for one prompt."""
        cached, before = text(), decode.server.tokens("hit")
        assert router.ask(cached, 8) == ask(prefill.url, cached, 8)
        return decode.server.tokens("hit") == before + STORED_TOKENS

    for _ in range(2):
        wait_until(is_handed_over, what="the decode engine has what the prefill engine computed")
