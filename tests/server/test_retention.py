"""What a request asks to retain stays in L1, as long as others can be evicted, and it is not too much."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from harness.rawclient import TIMEOUT_S, RawEngine, chain
from harness.server import LMCacheServer
from harness.waiting import wait_until
from harness.warm import CHUNK_FRAMES, CHUNKS, Prompt, new_engine

from lmcache_client.contract.control import Retain
from lmcache_client.contract.geometry import FULL, GroupSpec
from lmcache_client.contract.messages import Done
from lmcache_server.config import Config
from lmcache_server.core.cache import Cache, Layout, Reservation
from lmcache_server.core.pool import FRAME_BYTES
from lmcache_server.options.retention.prefetch import MAX_KEYS as PREFETCHED_KEYS
from lmcache_server.options.retention.prefetch import OUTCOMES
from lmcache_server.options.retention.server import MAX_KEYS, Chain, Server
from lmcache_server.service.option import Base
from lmcache_server.telemetry.metrics import Metrics

PROMPTS = 16
"""So many fit into L1, of which four may be retained."""
GB_BYTES = 1 << 30


@contextlib.contextmanager
def engine_of(**flags: Any) -> Iterator[RawEngine]:
    frames = PROMPTS * CHUNKS * CHUNK_FRAMES
    with LMCacheServer(l1_size_gb=(frames + 0.5) * FRAME_BYTES / GB_BYTES, **flags) as server:
        server.wait_until_populated()
        engine = new_engine(server)
        engine.server = server
        yield engine


@pytest.fixture
def engine() -> Iterator[RawEngine]:
    with engine_of() as engine:
        yield engine
        engine.server.wait_at_rest(sessions=2)


class Numbered(Prompt):
    """A prompt with keys of its own, and the pages of one of three."""

    def __init__(self, engine: RawEngine, number: int) -> None:
        super().__init__(engine, number % 3)
        self.keys = chain([number] * (CHUNKS * engine.chunk_size), engine.chunk_size)


def retain(prompt: Prompt, seconds: int = 3600, chunks: int = CHUNKS) -> None:
    assert prompt.engine.scheduler.call(Retain(prompt.keys[:chunks], seconds), TIMEOUT_S) == Done()


def flood(engine: RawEngine, first: int = 1000) -> None:
    """Three times what L1 holds, of prompts that nobody asks for."""
    for number in range(first, first + 3 * PROMPTS):
        Numbered(engine, number).store()


def counted(engine: RawEngine, outcome: str, what: str = "retained_chains") -> float:
    return engine.server.metrics()[f'lmcache_{what}_total{{outcome="{outcome}"}}']


def test_retained_prompts_outlive_a_flood_and_others_do_not(engine: RawEngine) -> None:
    first, second, other = (Numbered(engine, number) for number in range(3))
    for prompt in (first, second, other):
        prompt.store()
    retain(first)
    retain(second, chunks=2)
    flood(engine)
    assert [each.held_chunks() for each in (first, second, other)] == [CHUNKS, 2, 0]
    first.load()
    assert engine.server.metrics()["lmcache_retained_chunks"] == CHUNKS + 2
    assert (counted(engine, "asked"), counted(engine, "given_up")) == (2, 0)
    engine.server.clear()
    assert first.held_chunks() == 0, "a clear forgets it"
    flood(engine)


def test_hits_and_fetches_of_others_do_not_make_it_the_next_to_go() -> None:
    """Only a store by an engine used to make it recently used again."""
    layout = Layout(b"n" * 32, 16, (GroupSpec(FULL, 16, 0, "", ()),), ((0,),))
    keys, cache, nothing = chain(range(16 * 9), 16), Cache(FRAME_BYTES, 8), cast(Any, None)

    def store(key: bytes) -> None:
        room = cache.reserve(layout, key, 0, 0, 1, FRAME_BYTES)
        assert isinstance(room, Reservation)
        cache.commit(room)

    for key in keys[:8]:
        store(key)
    option = Server(Base(Config(), cache, nothing, nothing, Metrics(), nothing, nothing, []))
    option._retain(Chain(layout.namespace, keys[:1], 60.0, 0))
    cache.touch(layout.namespace, keys[1:8])
    option.tick(1.0)
    store(keys[8])
    assert cache.chunk(layout.namespace, keys[0]) is not None
    assert cache.chunk(layout.namespace, keys[7]) is None
    cache.touch(layout.namespace, [*keys[1:7], keys[8]])
    option.tick(61.0)
    store(keys[7])
    assert cache.chunk(layout.namespace, keys[0]) is None, "its time is over"


def test_what_is_stored_after_its_request_ended_is_retained(engine: RawEngine) -> None:
    late = Numbered(engine, 0)
    retain(late)
    flood(engine, 2000)
    late.store()
    flood(engine)
    assert late.held_chunks() == CHUNKS
    late.load()


def test_after_its_time_a_prompt_is_like_any_other(engine: RawEngine) -> None:
    short, long = Numbered(engine, 0), Numbered(engine, 1)
    for prompt, seconds in ((short, 1), (long, 3600)):
        prompt.store()
        retain(prompt, seconds)
    engine.server.wait_for_metric("lmcache_retained_chunks", CHUNKS)
    flood(engine)
    assert [each.held_chunks() for each in (short, long)] == [0, CHUNKS]


def test_at_most_a_quarter_of_l1_is_retained_and_what_came_first_is_given_up(engine: RawEngine) -> None:
    prompts = [Numbered(engine, number) for number in range(8)]
    for prompt in prompts:
        prompt.store()
        retain(prompt)
    flood(engine)
    assert [each.held_chunks() for each in prompts] == [0] * 4 + [CHUNKS] * 4
    assert counted(engine, "given_up") == 4
    # A stored prompt has room whatever is retained.
    flood(engine, 2000)


def test_a_larger_priority_is_retained_longer(engine: RawEngine) -> None:
    prompts = [Numbered(engine, number) for number in range(8)]
    for number, prompt in enumerate(prompts):
        prompt.store()
        retain(prompt)
        if number < 3:  # which is heard, though it does not shorten the time
            assert engine.scheduler.call(Retain(prompt.keys, 1, priority=1), TIMEOUT_S) == Done()
    flood(engine)
    assert [each.held_chunks() for each in prompts] == [CHUNKS] * 3 + [0] * 4 + [CHUNKS]
    keys = chain([9] * (MAX_KEYS * engine.chunk_size), engine.chunk_size)
    assert engine.scheduler.call(Retain(keys, 3600), TIMEOUT_S) == Done()
    flood(engine, 2000)
    assert [each.held_chunks() for each in prompts] == [CHUNKS] * 3 + [0] * 5, "it is too much beside them"


def test_a_conversation_that_goes_on_is_retained_once(engine: RawEngine) -> None:
    """Each of its requests asks for all that came before."""
    prompts = [Numbered(engine, number) for number in range(4)]
    for prompt in prompts:
        prompt.store()
        for chunks in range(1, CHUNKS + 1):
            retain(prompt, 3600 + chunks, chunks)
        retain(prompt, 1)  # which does not shorten the time
    flood(engine)
    assert [each.held_chunks() for each in prompts] == [CHUNKS] * 4
    assert (counted(engine, "asked"), counted(engine, "given_up")) == (4 * CHUNKS, 0)


def test_what_clients_ask_for_takes_bounded_memory(engine: RawEngine) -> None:
    """Also if it is the same chain again and again, each time a shorter part of it and for a shorter time."""
    keys = chain([0] * (MAX_KEYS * engine.chunk_size), engine.chunk_size)
    for number in range(16):
        asked = Retain(keys[: MAX_KEYS // 4 - number], 3600 - number)
        assert engine.scheduler.call(asked, TIMEOUT_S) == Done()
    assert (counted(engine, "asked"), counted(engine, "given_up")) == (16, 12)
    retain(Numbered(engine, 1))
    assert engine.scheduler.call(Retain((*keys, *keys[:5]), 3600), TIMEOUT_S) == Done()
    assert counted(engine, "given_up") == 13, "it is cut where it alone takes all the room"
    first, second = (
        tuple((start + number).to_bytes(32, "big") for number in range(PREFETCHED_KEYS // 2))
        for start in (0, PREFETCHED_KEYS)
    )
    for asked in (first, second[:-1], second, keys[:1]):
        assert counted(engine, "failed", "prefetches") == 0, "a conversation that goes on counts once"
        assert engine.scheduler.call(Retain(asked, 0, prefetch_s=3600), TIMEOUT_S) == Done()
    assert counted(engine, "failed", "prefetches") == 1


def test_a_prompt_is_brought_from_a_tier_before_it_comes_back(tmp_path: Path) -> None:
    def outcomes() -> list[float]:
        return [counted(engine, outcome, "prefetches") for outcome in OUTCOMES]

    def ask(prefetch_s: int = 1) -> None:
        asked = Retain(prompt.keys, 0, prefetch_s=prefetch_s)
        assert engine.scheduler.call(asked, TIMEOUT_S) == Done()

    with engine_of(tier=f"dir://{tmp_path}/tier?size_gb=1&write=commit") as engine:
        prompt = Numbered(engine, 0)
        prompt.store()
        engine.server.wait_until_written()
        flood(engine)
        assert prompt.held_chunks() == 0
        ask(3600)
        ask()
        wait_until(lambda: sum(outcomes()), what="a prefetch has ended")
        assert outcomes() == [1, 0, 0]
        assert counted(engine, "asked") == 0, "it is retained no longer than others"
        fetches = counted(engine, "ended", "tier_fetches")
        prompt.load()
        assert counted(engine, "ended", "tier_fetches") == fetches, "L1 had all that the lookup asked for"
        ask()
        wait_until(lambda: sum(outcomes()) == 2, what="a prefetch has ended")
        assert outcomes() == [1, 1, 0], "L1 has all of it"
        flood(engine, 2000)
        ask()
        engine.close()
        wait_until(lambda: sum(outcomes()) == 3, what="a prefetch has ended")
        assert outcomes() == [1, 1, 1], "its engine has ended"
