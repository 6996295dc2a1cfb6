"""How old chunks may get: which chunks the cache forgets."""

from test_core_cache import FRAME_BYTES, PLAIN, chain, store

from lmcache_server.core.cache import Cache


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
    assert (cache.evicted_chunks, cache.free_frames) == (0, 9)
    # One that is stored again is as young as that.
    store(cache, keys[:1])
    assert cache.forget_old(PLAIN.namespace, 35.0, 9) == 1
    assert left(cache, keys) == "1000"
