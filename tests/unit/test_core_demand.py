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
