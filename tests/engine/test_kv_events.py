"""What routers hear of the cache through vLLM's own publisher: one that is written here and decodes it with
vLLM's own schema, and the indexer of Dynamo, where it is installed."""

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest
import zmq
from harness.engine import Engine
from harness.paths import ROUTERS
from harness.processes import free_port
from harness.prompts import prompt
from harness.routers import DynamoIndexer, needs
from harness.served import stopped
from harness.server import LMCacheServer
from harness.waiting import wait_until
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)

CHUNK, BLOCK = 64, 32
PROMPTS = [prompt((1 + seed % 3) * CHUNK + 10, 10 + seed) for seed in range(24)]
"""More than L1 holds, and far more than the engine does."""
NUMBERS = itertools.count(1000)
"""Of prompts that nobody has seen."""


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


@pytest.mark.timeout(600)
def test_routers_know_what_the_server_would_restore(
    stack: ExitStack, start_server: Callable[..., LMCacheServer], start_engine: Callable[..., Engine]
) -> None:
    server = start_server(l1_size_gb=4 / 1024, chunk_size=CHUNK)
    port, replay_port = free_port(), free_port()
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}"}
    config["replay_endpoint"] = f"tcp://*:{replay_port}"
    # Its own cache holds some 300 tokens.
    small = {"num_gpu_blocks_override": 11, "max_model_len": 300, "block_size": BLOCK}
    engine = start_engine("llama", server=server, kv_events_config=config, **small)
    router = Router(port)
    stack.callback(router.close)
    has_dynamo = (ROUTERS / "dynamo").is_dir()
    indexers = [stack.enter_context(DynamoIndexer(port, BLOCK))] if has_dynamo else []

    def say() -> None:
        """The engine takes some steps: it asks what the server has forgotten, and publishes that. Then the
        indexers know all that it has said, for events come in order. The prompts have no whole chunk, so
        nothing else changes."""

        def knows_the_last() -> bool:
            last = prompt(BLOCK, next(NUMBERS))
            engine.run(last, 2)
            return all(indexer.tokens(last)[0] > 0 for indexer in indexers)

        for _ in range(2):
            wait_until(knows_the_last, what="the indexers hear the engine")
        router.listen()

    # A subscriber hears nothing until its connection is up.
    wait_until(lambda: (say(), router.heard)[-1] > 0, what="events arrive")
    first = prompt(3 * CHUNK + 10, 1)
    with stopped(server.pid):
        engine.run(first, settle=False)
        router.listen()
        assert router.blocks("GPU")
        assert not router.blocks(), "announced before the server has acknowledged the store"
    wait_until(lambda: (engine.settle(), router.listen(), router.blocks())[-1], what="it is announced")
    assert router.prefix(first) == 3 * CHUNK
    own = router.blocks("GPU")
    assert all(own[block] == what for block, what in router.blocks().items()), "not as vLLM says it"

    # Removed, when the server has evicted it; every lookup finds what the routers expect.
    computed = [engine.run(each, 2).output for each in PROMPTS]
    say()
    assert router.prefix(first) == 0, "the first prompt is evicted"
    expected = []
    for each, output in list(zip(PROMPTS, computed, strict=True))[::-2]:
        say()
        expected.append(router.prefix(each))
        known = [indexer.tokens(each) for indexer in indexers]
        result = engine.run(each, 2)
        found = result.local_tokens + result.external_tokens
        assert max(result.local_tokens, expected[-1]) == found, "the router expects something else"
        assert all(of == (result.local_tokens, found) for of in known), "the indexer expects something else"
        assert result.output == output
    assert {0, CHUNK, 2 * CHUNK, 3 * CHUNK} <= set(expected)

    if has_dynamo:
        # One that comes late gets all of it from vLLM's replay.
        indexers.append(stack.enter_context(DynamoIndexer(port, BLOCK, replay_port)))
        say()
        early, late = ([indexer.tokens(each) for each in PROMPTS] for indexer in indexers)
        assert early == late

    # The engine forgets, and the server does not. Then nothing is left after a clear, and after a restart.
    for forget in (server.clear, server.restart):
        wait_until(lambda: (engine.run(first), router.listen(), router.prefix(first))[-1], what="it is used")
        for _ in range(2):
            engine.run(prompt(280, next(NUMBERS)), 2)
        say()
        assert all(indexer.tokens(first) == (0, 3 * CHUNK) for indexer in indexers)
        forget()
        wait_until(lambda: (say(), not router.blocks())[-1], what="the router has heard")
        wait_until(lambda: (say(), {each.tokens(first) for each in indexers} <= {(0, 0)})[-1])
    renewed = lambda: (engine.run(prompt(CHUNK + 10, next(NUMBERS))), router.listen(), router.blocks())[-1]  # noqa: E731
    wait_until(renewed, what="the new server is used")
    needs("dynamo")
