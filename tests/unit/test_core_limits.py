"""How old chunks may get: the limits that a text sets, and which chunks the cache then forgets."""

import math

import pytest
from test_core_cache import FRAME_BYTES, PLAIN, chain, store

from lmcache_server.core import limits
from lmcache_server.core.cache import Cache

NAMESPACE = bytes.fromhex("0b5d5f2cbd9c") + bytes(26)
DAY_S = 86400.0


@pytest.mark.parametrize(
    ("text", "model", "limit_s"),
    [
        ("", "some/model", math.inf),
        ("7d", "some/model", 7 * DAY_S),
        ("3600", None, 3600),
        ("0.5h", "some/model", 1800),
        ("90m,some/model=24h", "some/model", DAY_S),
        ("90m,some/model=24h", "other", 5400),
        ("some/model=45s", "other", math.inf),
        ("7d, 0B5D5F2C = 1h", "other", 3600),
        ("7d,0b5d5f2d=1h", "other", 7 * DAY_S),
        ("7d,0b5d5f2=1h", "other", 7 * DAY_S),
        ("0b5d5f2=1h", "0b5d5f2", 3600),
        ("7d,some/model=24h,0b5d5f2cbd9c=30d", "some/model", DAY_S),
        ("a=b=1h", "a=b", 3600),
        ("7d,some/model=24h", None, DAY_S),
        ("7d,some/model=30d", None, 7 * DAY_S),
    ],
)
def test_the_limit_of_a_namespace(text: str, model: str | None, limit_s: float) -> None:
    """If nobody knows its model any more, the smallest of all."""
    assert limits.ages_s(text).of(NAMESPACE, model) == limit_s


@pytest.mark.parametrize(
    "text",
    [
        "0",
        "0d",
        "-1",
        "7 days",
        "inf",
        "nan",
        "1e9",
        "7d,",
        ",",
        "a=",
        "7d,1d",
        "a=1h,a=2h",
        "\u0661d",
        "9" * 40,
    ],
)
def test_what_is_no_age(text: str) -> None:
    with pytest.raises(ValueError):
        limits.ages_s(text)


def filled() -> tuple[Cache, list[bytes]]:
    """A chain whose chunks were stored at 0, 10, 20 and 30 s, all used last at 40 s."""
    cache, keys = Cache(FRAME_BYTES, 10), chain(4)
    for number, key in enumerate(keys):
        cache.expire(number * 10.0)
        store(cache, [key])
    cache.expire(40.0)
    cache.touch(PLAIN.namespace, keys)
    return cache, keys


def left(cache: Cache, keys: list[bytes]) -> str:
    known = cache._index.chunks(PLAIN.namespace)
    cache.check_integrity()
    return "".join(str(int(key in known)) for key in keys)


def test_use_makes_no_chunk_younger_and_the_oldest_goes_first() -> None:
    cache, keys = filled()
    assert cache.forget_old(PLAIN.namespace, 0.0, 9) == 0
    assert cache.forget_old(PLAIN.namespace, 25.0, 1) == 1
    assert left(cache, keys) == "0111"
    assert cache.forget_old(b"another", 99.0, 9) == 0
    assert cache.forget_old(PLAIN.namespace, 25.0, 9) == 2
    assert left(cache, keys) == "0001"
    assert (cache.expired_chunks, cache.evicted_chunks, cache.free_frames) == (3, 0, 9)
    # One that is stored again is as young as that.
    store(cache, keys[:1])
    assert cache.forget_old(PLAIN.namespace, 35.0, 9) == 1
    assert left(cache, keys) == "1000"
