"""Pins at a real server, over its socket: they outlive storms, engines and, with a file, the server."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.rawclient import TIMEOUT_S, RawEngine
from harness.server import LMCacheServer
from harness.warm import CHUNK_FRAMES, CHUNKS, Prompt, new_engine, path, reconnect

from lmcache_client.contract.messages import Message, Pin, Pinned
from lmcache_server.core.pool import FRAME_BYTES

__all__ = ["path"]
ROOM = 3 * CHUNKS * CHUNK_FRAMES
"""L1 in frames: room for three prompts."""


@pytest.fixture
def running(path: Path) -> Iterator[LMCacheServer]:
    with LMCacheServer(l1_size_gb=ROOM * FRAME_BYTES / (1 << 30), l1_path=path) as server:
        yield server


def ask(engine: RawEngine, message: Message) -> Message:
    return engine.scheduler.call(message, TIMEOUT_S)


def pin(prompt: Prompt, name: str) -> Pinned:
    """As `lmcache pin` does: name the request, let it end, and pin what is there."""
    engine, request = prompt.engine, f"{name:x>20}"
    assert ask(engine, Pin("", request)) == Pinned(0, 0, 0, 0)
    prompt.store()
    engine._scheduler.release((), tuple(prompt.keys), f"cmpl-{request}-0")
    pinned = ask(engine, Pin(name, request))
    assert isinstance(pinned, Pinned)
    return pinned


def storm(engine: RawEngine, rounds: int = 3) -> None:
    """Other prompts, each of which fills a third of L1."""
    for number in range(1, 1 + 3 * rounds):
        other = Prompt(engine, 1 + number % 2)
        other.keys = tuple(bytes([number, index]) * 16 for index in range(CHUNKS))
        other.store()


def names(server: LMCacheServer) -> dict[str, int]:
    return {pin["name"]: pin["chunks"] for pin in server.status()["pins"]}


def test_a_pinned_prompt_is_served_after_storms_its_engines_end_and_a_restart(running: LMCacheServer) -> None:
    prompt = Prompt(new_engine(running))
    size = prompt.engine.chunk_size
    assert pin(prompt, "mine") == Pinned(CHUNKS, CHUNKS, CHUNKS * size, size)
    storm(prompt.engine)
    assert running.status()["l1"]["free_bytes"] == 0
    prompt.load()
    prompt.engine.close()
    running.wait_at_rest()
    prompt.engine = new_engine(running)
    for _ in range(2):
        storm(prompt.engine)
        prompt.load()
        assert running.terminate() == 0
        running.start()
        assert names(running) == {"mine": CHUNKS}
        reconnect(prompt.engine, running)
    storm(prompt.engine)
    prompt.load()
    metrics = running.metrics()
    assert metrics["lmcache_pinned_chunks"] == CHUNKS
    assert metrics["lmcache_pinned_chunk_bytes"] == CHUNKS * CHUNK_FRAMES * FRAME_BYTES
    assert "pinned as 'mine': 4 chunks, 768.0 KiB" in running.cli("status").stdout

    done = running.cli("unpin", "mine")
    assert (done.returncode, done.stdout) == (0, "unpinned 4 chunks\n"), done.stderr
    assert json.loads(running.cli("status", "--json").stdout)["pins"] == []
    storm(prompt.engine)
    assert prompt.held_chunks() == 0
