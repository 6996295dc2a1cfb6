"""What routers hear of the cache through vLLM's own publisher, decoded with vLLM's own schema."""

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq
from harness.engine import Engine
from harness.processes import free_port
from harness.prompts import prompt
from harness.server import LMCacheServer
from harness.waiting import wait_until
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)

CHUNK, BLOCK = 256, 32
PROMPTS = 40
"""More than L1 holds, and far more than the engine does."""


class Router:
    """Subscribes to an engine and applies what it says, as routers do, by medium."""

    def __init__(self, port: int) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self._socket.subscribe(b"")
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self.stored: dict[str, dict[Any, BlockStored]] = {}
        """By medium and block, the event that said so."""
        self.heard = 0

    def listen(self, wait_ms: int = 100) -> None:
        """Applies everything that has arrived."""
        while self._socket.poll(wait_ms):
            _topic, _number, payload = self._socket.recv_multipart()
            self.heard += 1
            batch = self._decoder.decode(payload)
            assert msgspec.msgpack.encode(batch) == payload, "not the bytes of vLLM's schema"
            for event in batch.events:
                self._apply(event)

    def _apply(self, event: Any) -> None:
        if isinstance(event, AllBlocksCleared):
            self.stored.clear()
            return
        blocks = self.stored.setdefault(event.medium, {})
        for block in event.block_hashes:
            if isinstance(event, BlockRemoved):
                del blocks[block]
            else:
                assert event.medium != MEDIUM_CPU or block not in blocks, "nothing is told twice"
                blocks[block] = event

    def blocks(self, medium: str = MEDIUM_CPU) -> dict[Any, tuple[Any, ...]]:
        """What each block is: its parent, its tokens and what else is in its hash."""
        found = {}
        for block, event in self.stored.get(medium, {}).items():
            at = event.block_hashes.index(block)
            before = event.block_hashes[at - 1] if at else event.parent_block_hash
            tokens = tuple(event.token_ids[at * BLOCK : (at + 1) * BLOCK])
            extra = event.extra_keys[at] if event.extra_keys else None
            kind = (event.group_idx, event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window)
            found[block] = (before, tokens, extra, event.block_size, event.lora_name, *kind)
        return found

    def prefix(self, tokens: list[int]) -> int:
        """How many leading tokens of a prompt the server holds, as far as this router knows."""
        known = {(before, own): block for block, (before, own, *_) in self.blocks().items()}
        parent, length = None, 0
        while (block := known.get((parent, tuple(tokens[length : length + BLOCK])))) is not None:
            parent, length = block, length + BLOCK
        return length

    def close(self) -> None:
        self._socket.close(linger=0)


@contextmanager
def routed(server: LMCacheServer, start: Callable[..., Engine], port: int) -> Iterator[tuple[Engine, Router]]:
    """An engine whose own cache holds some 1,000 tokens, and a router that hears all it publishes."""
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}"}
    small = {"num_gpu_blocks_override": 34, "max_model_len": 1000, "block_size": BLOCK}
    engine, router = start("llama", server=server, kv_events_config=config, **small), Router(port)
    try:
        # A subscriber hears nothing until its connection is up.
        wait_until(lambda: (say(engine), router.listen(), router.heard)[-1] > 0, what="events arrive")
        yield engine, router
    finally:
        router.close()


def say(engine: Engine) -> None:
    """The engine takes some steps: it asks what the server has forgotten, and publishes that. The prompts
    have no whole chunk, so nothing else changes."""
    for _ in range(2):
        engine.run(prompt(40, next(NUMBERS)), 2)


NUMBERS = itertools.count(1000)


@pytest.mark.timeout(600)
def test_a_router_knows_what_the_server_would_restore(
    start_server: Callable[..., LMCacheServer], start_engine: Callable[..., Engine]
) -> None:
    server = start_server(l1_size_gb=0.01, chunk_size=CHUNK)
    with routed(server, start_engine, free_port()) as (engine, router):
        first = prompt(3 * CHUNK + 10, 1)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            engine.run(first, settle=False)
            router.listen()
            assert router.blocks("GPU")
            assert not router.blocks(), "announced before the server has acknowledged the store"
        finally:
            os.kill(server.pid, signal.SIGCONT)
        wait_until(lambda: (engine.settle(), router.listen(), router.blocks())[-1], what="it is announced")
        assert router.prefix(first) == 3 * CHUNK
        own = router.blocks("GPU")
        assert all(own[block] == what for block, what in router.blocks().items()), "not as vLLM says it"

        # Removed, when the server has evicted it; every lookup finds what the router expects.
        prompts = [prompt((1 + seed % 3) * CHUNK + 10, 10 + seed) for seed in range(PROMPTS)]
        computed = [engine.run(each, 2).output for each in [first, *prompts]]
        say(engine)
        router.listen()
        assert router.prefix(first) == 0, "the first prompt is evicted"
        expected = []
        for each, output in list(zip([first, *prompts], computed, strict=True))[::-2]:
            say(engine)
            router.listen()
            expected.append(router.prefix(each))
            result = engine.run(each, 2)
            found = result.local_tokens + result.external_tokens
            assert max(result.local_tokens, expected[-1]) == found, "the router expects something else"
            assert result.output == output
        assert 0 in expected
        assert {CHUNK, 2 * CHUNK, 3 * CHUNK} <= set(expected)

        # Nothing is left after a clear, and after a restart.
        for forget in (server.clear, server.restart):
            engine.run(first)
            router.listen()
            assert router.blocks()
            forget()
            wait_until(
                lambda: (say(engine), router.listen(), not router.blocks())[-1], 30.0, "the router has heard"
            )
        renewed = lambda: (engine.run(prompt(300, next(NUMBERS))), router.listen(), router.blocks())[-1]  # noqa: E731
        wait_until(renewed, what="the new server is used")
