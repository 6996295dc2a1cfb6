"""What other sizes of L1 would have hit, against caches of those sizes."""

import random
from collections import OrderedDict
from collections.abc import Sequence

import pytest

from lmcache_server.core import demand
from lmcache_server.core.demand import Demand, Sizes

CHUNK = 16
PLAIN = Sizes(CHUNK, 3)
NAMESPACE = b"n" * 32


def key(*path: int) -> bytes:
    return repr(path).encode().ljust(32)


def prompts(seed: int, number: int = 400) -> list[tuple[int, ...]]:
    """Conversations that grow, and prompts that share beginnings."""
    draw, made = random.Random(seed), list[tuple[int, ...]]()
    for _ in range(number):
        known = draw.choice(made[-30:])[: draw.randrange(1, 12)] if made and draw.random() < 0.7 else ()
        made.append((*known, *(draw.randrange(1000) for _ in range(draw.randrange(1, 5)))))
    return made


def lru_hits(requests: Sequence[Sequence[bytes]], chunks: int) -> int:
    """The leading chunks that a least-recently-used cache of so many chunks has, over all requests."""
    cache, hits = OrderedDict[bytes, None](), 0
    for keys in requests:
        present = [key in cache for key in keys] + [False]
        hits += present.index(False)
        for each in reversed(keys):
            cache[each] = None
            cache.move_to_end(each)
        while len(cache) > chunks:
            cache.popitem(last=False)
    return hits


def chains(seed: int) -> list[list[bytes]]:
    return [[key(*path[: i + 1]) for i in range(len(path))] for path in prompts(seed)]


def look_up(counted: Demand, keys: Sequence[bytes], sizes: Sizes = PLAIN, now_s: float = 0.0) -> None:
    counted.looked_up(NAMESPACE, sizes, keys, 0, len(keys) * sizes.chunk_size, now_s)


@pytest.mark.parametrize("seed", range(5))
def test_every_size_has_the_hits_of_a_cache_of_that_size(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand, "STEPS_PER_OCTAVE", 2000)
    counted, requests = Demand(), chains(seed)
    for keys in requests:
        look_up(counted, keys)
    curve = counted.window("start", 0.0).together
    assert curve.tokens == CHUNK * sum(map(len, requests))
    for chunks in (1, 5, 20, 60, 150, 400):
        expected = CHUNK * lru_hits(requests, chunks)
        assert curve.hits(PLAIN.chunk_frames * (chunks + 0.5)) == pytest.approx(expected, rel=0.01, abs=CHUNK)
    assert curve.all_hits == CHUNK * lru_hits(requests, 10**6)


def test_tokens_that_the_engine_holds_are_not_counted() -> None:
    counted, keys = Demand(), [key(i) for i in range(10)]
    look_up(counted, keys)
    counted.looked_up(NAMESPACE, PLAIN, keys, 4 * CHUNK, 10 * CHUNK, 0.0)
    curve = counted.window("start", 0.0).together
    assert (curve.tokens, curve.all_hits) == (16 * CHUNK, 6 * CHUNK)


def test_chunks_that_decoding_completed_are_found_by_the_next_turn() -> None:
    counted, keys = Demand(), [key(i) for i in range(6)]
    look_up(counted, keys[:2])
    counted.completed(NAMESPACE, PLAIN, keys[:5])
    look_up(counted, keys)
    curve = counted.window("start", 0.0).together
    assert curve.all_hits == 5 * CHUNK


def test_answers_leave_windows_but_no_states() -> None:
    keys = [key(i) for i in range(8)]
    for states, chunks in ((False, 5), (True, 2)):
        counted, sizes = Demand(), Sizes(CHUNK, 3, sparse=True, states=states)
        look_up(counted, keys[:2], sizes)
        counted.completed(NAMESPACE, sizes, keys[:5])
        look_up(counted, keys, sizes)
        assert counted.window("start", 0.0).together.all_hits == chunks * CHUNK


def test_windows_and_states_are_found_at_ends_and_forks_only() -> None:
    sparse, counted = Sizes(CHUNK, 3, sparse=True), Demand()
    first = [key(i) for i in range(10)]
    parting = [[*first[:6], *(key(number, i) for i in range(4))] for number in range(3)]
    hits = []
    for keys in (first, first, *parting):
        look_up(counted, keys, sparse)
        curve = counted.window("start", 0.0).together
        hits.append(curve.all_hits // CHUNK)
    # The same prompt hits all of itself. The first that parts finds nothing, and leaves its place to others.
    assert hits == [0, 10, 10, 16, 22]


def test_a_fork_is_stored_only_where_l1_still_had_what_was_known() -> None:
    """A smaller L1 computes the beginning anew, and knows of no fork there."""
    sparse, counted = Sizes(CHUNK, 3, sparse=True), Demand()
    first = [key(i) for i in range(10)]
    parting = [[*first[:6], *(key(number, i) for i in range(4))] for number in range(3)]
    for keys in (first, [key(8, i) for i in range(100)], *parting[:2]):
        look_up(counted, keys, sparse)
    curve = counted.window("start", 0.0).together
    assert curve.hits(3 * 90) == 0
    assert curve.hits(3 * 120) == 6 * CHUNK
    # The end of a prompt is stored in every L1.
    look_up(counted, parting[1], sparse)
    assert counted.window("start", 0.0).together.hits(3 * 15) == 10 * CHUNK


def test_it_forgets_what_was_used_longest_ago_and_says_so() -> None:
    counted = Demand(max_keys=20)
    for number in range(30):
        assert counted.exact_frames() is None or number > 9
        look_up(counted, [key(number, i) for i in range(2)])
    assert len(counted) == 20
    assert counted.exact_frames() == 20 * PLAIN.chunk_frames
    for number in (0, 29):
        look_up(counted, [key(number, i) for i in range(2)])
    curve = counted.window("start", 0.0).together
    assert curve.all_hits == 2 * CHUNK
    counted.max_frames = 5 * PLAIN.chunk_frames
    look_up(counted, [key(99)])
    assert len(counted) == 5


def test_requests_that_share_all_their_chunks_are_forgotten_too() -> None:
    """Nothing grows while one old chunk lies behind them all."""
    counted = Demand(max_keys=5000)
    for keys in ([key(1)], *[[key(2), key(3)]] * 20_000):
        look_up(counted, keys)
    assert len(counted) == 3
    assert len(counted._stack._requests) == 2
    assert sum(map(len, counted._stack._levels)) <= 8
    curve = counted.window("start", 0.0).together
    assert curve.all_hits == (20_000 - 1) * 2 * CHUNK


@pytest.mark.parametrize("seed", range(3))
def test_keys_that_are_no_chain_leave_nothing_behind(seed: int) -> None:
    """A client may send any keys, in any order, and some twice."""
    draw, counted = random.Random(seed), Demand(max_keys=200)
    for _ in range(3000):
        keys = [key(draw.randrange(150)) for _ in range(draw.randrange(1, 12))]
        namespace = draw.choice((b"a" * 32, b"b" * 32))
        counted.looked_up(namespace, PLAIN, keys, 0, draw.randrange(len(keys) + 1) * CHUNK, 0.0)
        counted.completed(namespace, PLAIN, keys)
        assert len(counted) <= 200
    for number in range(200):
        look_up(counted, [key(1000 + number)])
    assert len(counted) == counted._stack.chunks == 200
    assert counted.exact_frames() == 200 * PLAIN.chunk_frames


def test_windows_of_time_forget() -> None:
    counted = Demand()
    for number, now_s in enumerate((0.0, 10.0, 1000.0, 5000.0)):
        look_up(counted, [key(number)], now_s=now_s)

    def tokens(window: str, now_s: float) -> int:
        shown = counted.window(window, now_s)
        assert shown.together.tokens == sum(curve.tokens for curve in shown.curves.values())
        return shown.together.tokens

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
    curves = counted.window("start", 0.0).curves
    assert len(curves) == demand.MAX_NAMESPACES + 1
    assert curves[demand.OTHERS].tokens == 20 * CHUNK
    assert curves[demand.OTHERS].all_hits == 10 * CHUNK


def test_a_very_long_lookup_is_counted_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand, "MAX_CHUNKS", 4)
    counted, keys = Demand(), [key(i) for i in range(10)]
    look_up(counted, keys)
    counted.completed(NAMESPACE, PLAIN, keys)
    assert len(counted) == 4
    look_up(counted, keys)
    curve = counted.window("start", 0.0).together
    assert (curve.tokens, curve.all_hits) == (8 * CHUNK, 4 * CHUNK)


def test_a_lookup_of_many_short_runs_is_counted_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run takes time, and the server answers nobody else meanwhile."""
    counted, keys = Demand(), [key(i) for i in range(2000)]
    look_up(counted, keys[::2])
    look_up(counted, keys[1::2])
    asked: list[int] = []
    newer = demand._Stack.newer
    monkeypatch.setattr(
        demand._Stack, "newer", lambda self, request: asked.append(request) or newer(self, request)
    )
    look_up(counted, keys)
    assert len(asked) == demand.MAX_RUNS
    assert len(counted) == 2000
