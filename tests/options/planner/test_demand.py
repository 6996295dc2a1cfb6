"""What other sizes of L1 would have hit, against caches of those sizes; and what counts as a lookup."""

import random
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from lmcache_client.contract.geometry import FULL, RECURRENT, SLIDING_WINDOW, GroupSpec, Region
from lmcache_client.contract.messages import Lookup, Release
from lmcache_server.config import Config
from lmcache_server.core.cache import Cache, Hit
from lmcache_server.core.layout import Layout
from lmcache_server.core.pool import FRAME_BYTES
from lmcache_server.core.reservation import Reservation
from lmcache_server.options.planner import demand
from lmcache_server.options.planner.demand import MOST, MULTIPLES, SIZES, Counts, Demand, Sizes
from lmcache_server.options.planner.server import Server
from lmcache_server.service.option import Base
from lmcache_server.telemetry.metrics import Metrics

CHUNK = 16
PLAIN, SPARSE = Sizes(CHUNK, 3), Sizes(CHUNK, 3, sparse=True)
NAMESPACE = b"n" * 32
NO_HIT = Hit(0, 0, ())


def key(*path: int) -> bytes:
    return repr(path).encode().ljust(32)


def prompts(seed: int, number: int = 400) -> list[tuple[int, ...]]:
    """Conversations that grow, and prompts that share beginnings."""
    draw, made = random.Random(seed), list[tuple[int, ...]]()
    for _ in range(number):
        known = draw.choice(made[-30:])[: draw.randrange(1, 12)] if made and draw.random() < 0.7 else ()
        made.append((*known, *(draw.randrange(1000) for _ in range(draw.randrange(1, 5)))))
    return made


def chains(seed: int) -> list[list[bytes]]:
    return [[key(*path[: i + 1]) for i in range(len(path))] for path in prompts(seed)]


def look_up(counted: Demand, keys: Sequence[bytes], sizes: Sizes = PLAIN, now_s: float = 0.0) -> None:
    counted.looked_up(NAMESPACE, sizes, keys, 0, len(keys) * sizes.chunk_size, now_s)


def so_far(counted: Demand, window: str = "start", now_s: float = 0.0) -> Counts:
    """Of all namespaces."""
    return sum(counted.window(window, now_s).values(), np.zeros(1 + len(SIZES), np.int64))


def hits(counted: Demand) -> list[int]:
    """By size, the chunks that were found; the last is without any limit."""
    return [tokens // CHUNK for tokens in so_far(counted)[1:].tolist()]


class Plain:
    """One ghost as it would be written without a thought of its speed."""

    def __init__(self, frames: float) -> None:
        self.frames, self.hits = frames, 0
        self.chunks = OrderedDict[bytes, bool]()
        """Whether windows and states are stored at its end; the least recently used first."""

    def look_up(self, keys: Sequence[bytes], sizes: Sizes) -> None:
        held = [key in self.chunks for key in keys] + [False]
        num_held = held.index(False)
        stops = [i + 1 for i in range(num_held) if self.chunks[keys[i]] or not sizes.sparse]
        self.hits += stops[-1] if stops else 0
        for each in reversed(keys):
            self.chunks[each] = self.chunks.pop(each, False)
        for end in (num_held, len(keys)):
            if end:
                self.chunks[keys[end - 1]] = True
        while len(self.chunks) * sizes.chunk_frames > self.frames:
            self.chunks.popitem(last=False)


@pytest.mark.parametrize("sizes", [PLAIN, SPARSE], ids=["full", "hybrid"])
@pytest.mark.parametrize("l1_frames", [4, 30, 100, 300, 1000])
def test_every_size_has_the_hits_of_a_ghost_of_that_size(sizes: Sizes, l1_frames: int) -> None:
    for seed in range(5):
        counted, requests = Demand(), chains(seed)
        counted.l1_frames = l1_frames
        plain = [Plain(multiple * l1_frames) for multiple in (*MULTIPLES, float("inf"))]
        for keys in requests:
            look_up(counted, keys, sizes)
            for ghost in plain:
                ghost.look_up(keys, sizes)
            expected = [ghost.hits for ghost in plain]
            assert hits(counted)[:-1] == expected[:-1]
            assert hits(counted)[-1] == expected[-1] or counted.exact_frames() is not None
        assert (counted.exact_frames() is None) == (l1_frames > 30)
        assert so_far(counted)[0] == CHUNK * sum(map(len, requests))


def new_planner(cache: Cache) -> Server:
    """A planner beside a cache, without the rest of a server."""
    nothing: Any = None
    return Server(Base(Config(), cache, nothing, nothing, Metrics(), nothing, nothing, []))


def group(kind: str, frames: int) -> GroupSpec:
    return GroupSpec(kind, CHUNK, 0, "", (Region(0, 0, frames * FRAME_BYTES, frames * FRAME_BYTES),))


def served(
    layout: Layout, requests: Sequence[Sequence[bytes]], frames: int
) -> tuple[float, dict[str, float]]:
    """The hit rate of a real cache of so many frames, and what the planner beside it says of other sizes."""
    cache = Cache(FRAME_BYTES, frames)
    planner = new_planner(cache)
    hit = asked = 0
    for number, keys in enumerate(requests):
        tokens = len(keys) * CHUNK
        lookup = Lookup(f"{number}", tuple(keys), 0, tokens, tokens + 1)
        planner.looked_up(1, layout, lookup, NO_HIT, 0, float(number))
        planner.tick(0.0)
        found = cache.lookup(layout, keys, 0, tokens, 1, float(number))
        asked, hit = asked + tokens, hit + found.resume_tokens
        chunks = [cache.chunk(layout.namespace, each) for each in keys]
        held = [chunk is not None and chunk.ready & 1 for chunk in chunks] + [0]
        ends = {held.index(0), len(keys)}
        for place, each in enumerate(keys):
            parent = keys[place - 1] if place else b""
            for index, spec in enumerate(layout.groups):
                if index == 0 or place + 1 in ends:
                    reserved = cache.reserve(layout, each, index, 0, 1, spec.block_bytes, parent)
                    if isinstance(reserved, Reservation):
                        cache.commit(reserved)
        cache.drop_owner(1)
    return hit / asked, planner.report(0.0)["demand"]["windows"]["start"]["hit_rates"]


@pytest.mark.parametrize("groups", [(group(FULL, 3),), (group(FULL, 3), group(RECURRENT, 2))], ids=len)
def test_what_is_said_of_a_size_is_what_a_real_cache_of_that_size_does(groups: tuple[GroupSpec, ...]) -> None:
    layout = Layout(NAMESPACE, CHUNK, groups, ((0,),) * len(groups))
    requests = [keys for seed in range(4) for keys in chains(seed)]
    whole = 1000
    _, said = served(layout, requests, whole)
    near = 0.005 if len(groups) == 1 else 0.02
    for multiple in MULTIPLES[:-1]:
        real, own = served(layout, requests, int(multiple * whole))
        assert said[str(multiple)] == pytest.approx(real, abs=near), multiple
        assert own["1"] == pytest.approx(real, abs=near), multiple
    assert said["0.25"] < said["1"] - 0.05, "the size matters"


def test_tokens_that_the_engine_holds_are_not_counted() -> None:
    counted, keys = Demand(), [key(i) for i in range(10)]
    look_up(counted, keys)
    counted.looked_up(NAMESPACE, PLAIN, keys, 4 * CHUNK, 10 * CHUNK, 0.0)
    assert (so_far(counted)[0], hits(counted)[-1]) == (16 * CHUNK, 6)


@pytest.mark.parametrize(
    ("sizes", "chunks"), [(PLAIN, 5), (SPARSE, 5), (Sizes(CHUNK, 3, sparse=True, states=True), 2)]
)
def test_what_decoding_completed_is_found_by_the_next_turn_unless_it_has_no_states(
    sizes: Sizes, chunks: int
) -> None:
    counted, keys = Demand(), [key(i) for i in range(8)]
    look_up(counted, keys[:2], sizes)
    counted.completed(NAMESPACE, sizes, keys[:5])
    look_up(counted, keys, sizes)
    assert hits(counted)[-1] == chunks


def test_it_forgets_what_was_used_longest_ago_and_says_so() -> None:
    counted = Demand(max_keys=20)
    for number in range(30):
        assert counted.exact_frames() is None or number > 9
        look_up(counted, [key(number, i) for i in range(2)])
    assert len(counted._uses) == 20
    assert counted.exact_frames() == 20 * PLAIN.chunk_frames
    for number in (0, 29):
        look_up(counted, [key(number, i) for i in range(2)])
    assert hits(counted)[-1] == 2


def test_what_is_remembered_is_a_multiple_of_l1_at_most() -> None:
    counted = Demand()
    counted.l1_frames = 2 * PLAIN.chunk_frames
    for number in range(100):
        look_up(counted, [key(number)])
    assert len(counted._uses) == 2 * MOST
    assert counted.exact_frames() == 2 * MOST * PLAIN.chunk_frames


def test_requests_that_share_all_their_chunks_are_forgotten_too() -> None:
    """Nothing grows while one old chunk lies behind them all."""
    counted = Demand(max_keys=5000)
    counted.l1_frames = 100
    for keys in ([key(1)], *[[key(2), key(3)]] * 20_000):
        look_up(counted, keys)
    assert len(counted._uses) == 3
    assert len(counted._requests) == 2
    assert hits(counted) == [(20_000 - 1) * 2] * len(SIZES)


@pytest.mark.parametrize("sizes", [PLAIN, SPARSE])
@pytest.mark.parametrize("seed", range(3))
def test_keys_that_are_no_chain_leave_nothing_behind(seed: int, sizes: Sizes) -> None:
    """A client may send any keys, in any order, and some twice."""
    draw, counted = random.Random(seed), Demand(max_keys=200)
    counted.l1_frames = 100
    for _ in range(3000):
        keys = [key(draw.randrange(150)) for _ in range(draw.randrange(1, 12))]
        namespace = draw.choice((b"a" * 32, b"b" * 32))
        counted.looked_up(namespace, sizes, keys, 0, draw.randrange(len(keys) + 1) * CHUNK, 0.0)
        counted.completed(namespace, sizes, keys)
        assert len(counted._uses) <= sum(len(chunks) for chunks, _ in counted._requests.values()) <= 200
    for number in range(200):
        look_up(counted, [key(1000 + number)])
    assert len(counted._uses) == len(counted._requests) == 200
    assert counted._stored.keys() <= counted._uses.keys()
    assert counted.exact_frames() == 200 * PLAIN.chunk_frames
    assert [ghost.frames for ghost in counted._ghosts] == [24, 48, 99, 198, 399, 600, 600]


def test_windows_of_time_forget() -> None:
    counted = Demand()
    for number, now_s in enumerate((0.0, 10.0, 1000.0, 5000.0)):
        look_up(counted, [key(number)], now_s=now_s)

    def tokens(window: str, now_s: float) -> int:
        return so_far(counted, window, now_s)[0]

    assert tokens("start", 5000.0) == tokens("day", 5000.0) == 4 * CHUNK
    assert tokens("hour", 5000.0) == CHUNK
    assert tokens("hour", 9000.0) == 0
    assert tokens("day", 86_400 * 2) == 0
    assert tokens("start", 86_400 * 2) == 4 * CHUNK


def test_many_namespaces_are_counted_together() -> None:
    counted = Demand()
    for number in range(demand.MAX_NAMESPACES + 10):
        for _ in range(2):
            counted.looked_up(number.to_bytes(32, "big"), PLAIN, [key(1)], 0, CHUNK, 0.0)
    for window in demand.WINDOWS:
        counts = counted.window(window, 0.0)
        assert len(counts) == demand.MAX_NAMESPACES + 1
        assert counts[demand.OTHERS][0] == 20 * CHUNK
        assert counts[demand.OTHERS][-1] == 10 * CHUNK


def test_a_very_long_lookup_is_counted_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """As is one of many short runs: each takes time, and the server answers nobody else meanwhile."""
    counted, keys = Demand(), [key(i) for i in range(2000)]
    for each in (keys[::2], keys[1::2], keys):
        look_up(counted, each)
    assert hits(counted)[-1] == demand.MAX_RUNS
    assert len(counted._uses) == 2000
    monkeypatch.setattr(demand, "MAX_CHUNKS", 4)
    counted = Demand()
    look_up(counted, keys[:10])
    counted.completed(NAMESPACE, PLAIN, keys[:10])
    assert len(counted._uses) == 4
    look_up(counted, keys[:10])
    assert (so_far(counted)[0], hits(counted)[-1]) == (8 * CHUNK, 4)


ONE = GroupSpec(FULL, CHUNK, 0, "", (Region(0, 0, FRAME_BYTES, FRAME_BYTES),))
KEYS = tuple(number.to_bytes(32, "little") for number in range(8))
TOKENS = CHUNK * len(KEYS)


def asks(planner: Server, request: str, *groups: GroupSpec) -> Layout:
    """A request that looks KEYS up."""
    layout = Layout(b"l" * 32, CHUNK, groups or (ONE,), ((0,),) * max(len(groups), 1))
    planner.looked_up(1, layout, Lookup(request, KEYS, 0, TOKENS, TOKENS + 1), NO_HIT, 0, 0.0)
    return layout


def start(planner: Server) -> tuple[int, float]:
    window = planner.report(0.0)["demand"]["windows"]["start"]
    return window["tokens"], window["hit_rates"]["unlimited"]


def test_an_l1_that_still_grows_remembers_as_much_as_it_will_need() -> None:
    cache = Cache(FRAME_BYTES, 0)
    planner = new_planner(cache)
    asks(planner, "first")
    cache.grow(16)
    for request in ("second", "third"):
        asks(planner, request)
    assert start(planner) == (3 * TOKENS, round(2 / 3, 4))
    assert planner.demand.exact_frames() is None, "nothing was forgotten"


def test_on_an_idle_server_the_hit_rate_of_the_last_hour_ends() -> None:
    planner = new_planner(Cache(FRAME_BYTES, 16))
    for request in ("first", "second"):
        asks(planner, request)
    assert planner.hit_ratio("unlimited") == 0.5
    planner.tick(2 * 3600.0)
    assert planner.hit_ratio("unlimited") == 0.0


def test_a_request_that_asks_in_every_step_counts_once_until_it_ends() -> None:
    planner = new_planner(Cache(FRAME_BYTES, 16))
    for _ in range(3):
        layout = asks(planner, "request")
    assert start(planner) == (TOKENS, 0.0)
    planner.released(1, layout, Release((), KEYS, "request"))
    asks(planner, "request")
    assert start(planner) == (2 * TOKENS, 0.5)


def test_large_windows_do_not_hide_the_hits_of_a_small_l1() -> None:
    """A quarter of L1 has 100 frames. Eight chunks take 48, of which the windows take 40."""
    window = GroupSpec(SLIDING_WINDOW, CHUNK, 1024, "", (Region(0, 0, 5 * FRAME_BYTES, 5 * FRAME_BYTES),))
    cache = Cache(FRAME_BYTES, 400)
    planner = new_planner(cache)
    layout = Layout(b"l" * 32, CHUNK, (ONE, window), ((0,), (0,)))
    for key in KEYS:
        for number, size in enumerate((FRAME_BYTES, 5 * FRAME_BYTES)):
            reserved = cache.reserve(layout, key, number, 0, 1, size)
            assert isinstance(reserved, Reservation)
            cache.commit(reserved)
    for request in ("first", "second"):
        planner.tick(0.0)
        asks(planner, request, ONE, window)
    rates = planner.report(0.0)["demand"]["windows"]["start"]["hit_rates"]
    assert rates["0.25"] == rates["unlimited"] == 0.5
