"""What users have pinned: nothing evicts it, and it is at most half of L1. Whom a pin holds, and when, is in
test_cache_model.py."""

import random

import pytest
from test_core_cache import (
    FRAME_BYTES,
    PLAIN,
    SESSION,
    chain,
    group,
    layout,
    lookup,
    reserve,
    store,
    stored_chunks,
)

from lmcache_client.contract.geometry import SLIDING_WINDOW
from lmcache_server.core import named_pins
from lmcache_server.core.cache import Cache, NotReserved, Reservation
from lmcache_server.core.index import Chunk
from lmcache_server.core.named_pins import MAX_NAMES, PinError


def pinned() -> tuple[Cache, list[bytes]]:
    """A cache of ten frames with a pinned chain of four chunks."""
    cache, keys = Cache(FRAME_BYTES, 10), chain(4)
    store(cache, keys)
    cache.pin("0", b"ns", keys)
    cache.check_integrity()
    return cache, keys


def test_no_storm_evicts_a_pinned_chunk() -> None:
    """Not even if it was the first in line, nobody asks for it, and others have leases and reads."""
    cache, keys = pinned()
    draw = random.Random(5)
    for name in range(1, 60):
        others = chain(draw.randint(1, 6), name)
        for index, key in enumerate(others):
            got = reserve(cache, key, index)
            if isinstance(got, Reservation):
                (cache.commit if draw.random() < 0.8 else cache.abort)(got)
        hit = lookup(cache, others)
        if hit.lease_id and draw.random() < 0.9:
            cache.release(hit.lease_id, SESSION)
        cache.expire(name * 60.0)
    cache.drop_owner(SESSION)
    assert cache.evicted_chunks > 50
    assert stored_chunks(cache, keys) == "1111"
    cache.check_integrity()


def test_a_chunk_stays_until_all_its_names_are_unpinned_and_then_the_tail_goes_first() -> None:
    cache, keys = pinned()
    cache.pin("yours", b"ns", keys[:2])
    assert cache.unpin("0") == 2
    assert len(cache.named_pins) == cache.named_pins.frames == 2
    store(cache, chain(8, name=1))
    assert stored_chunks(cache, keys) == "1100"
    assert cache.unpin("yours") == 2
    assert cache.named_pins.frames == 0
    store(cache, chain(9, name=2))
    assert stored_chunks(cache, keys) == "1000"
    with pytest.raises(KeyError):
        cache.unpin("0")


def test_half_of_l1_can_be_pinned_and_no_frame_more() -> None:
    cache = Cache(FRAME_BYTES, 11)
    keys = chain(6)
    store(cache, keys)
    with pytest.raises(PinError, match=r"55 % of L1 would be pinned, .* --l1-size-gb"):
        cache.pin("mine", b"ns", keys)
    assert len(cache.named_pins) == 0
    cache.pin("mine", b"ns", keys[:5])
    with pytest.raises(PinError, match="at most half"):
        cache.pin("mine", b"ns", keys[5:])
    cache.pin("yours", b"ns", keys[:5])
    assert cache.named_pins.frames == 5, "a second name takes no memory"


def test_a_pinned_chunk_grows_only_up_to_half_of_l1() -> None:
    """Otherwise small objects could be pinned, and large ones added to their chunks."""
    where = layout(group(), group(SLIDING_WINDOW, 16, 40), holders=((0,), (0, 1)))
    cache, (key,) = Cache(FRAME_BYTES, 10), chain(1)
    cache.commit(reserve(cache, key, where=where))
    cache.pin("mine", b"ns", [key])
    assert reserve(cache, key, where=where, of=1, frames=5) is NotReserved.NO_ROOM
    failed = reserve(cache, key, where=where, of=1, frames=4)
    assert isinstance(failed, Reservation)
    assert reserve(cache, key, where=where, of=1, shard=1) is NotReserved.NO_ROOM, "4 are being written"
    cache.abort(failed)
    cache.commit(reserve(cache, key, where=where, of=1, shard=1, frames=4))
    assert cache.named_pins.frames == 5
    cache.check_integrity()
    store(cache, chain(5, name=1))
    assert cache.chunk(b"ns", key) is not None


def test_a_chunk_that_is_being_written_is_pinned_when_that_has_ended() -> None:
    where = layout(group(), group())
    cache, (key,) = Cache(FRAME_BYTES, 10), chain(1)
    cache.commit(reserve(cache, key, where=where))
    writing = reserve(cache, key, where=where, of=1, frames=4)
    cache.pin("mine", b"ns", [key])
    assert not cache.named_pins.names, "nor is there a name without chunks"
    cache.abort(writing)
    cache.pin("mine", b"ns", [key])
    # A pinned chunk that is forgotten while it grows frees all of it.
    writing = reserve(cache, key, where=where, of=1)
    cache.clear()
    cache.check_integrity()
    cache.commit(writing)
    assert (cache.free_frames, cache.named_pins.frames) == (10, 0)


def test_names_and_chunks_of_pins_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, keys = pinned()
    for number in range(1, MAX_NAMES):
        cache.pin(str(number), b"ns", keys)
    with pytest.raises(PinError, match="64 names are pinned already"):
        cache.pin("one more", b"ns", keys)
    cache.pin("0", b"ns", keys)
    assert len(cache.named_pins.names) == MAX_NAMES
    monkeypatch.setattr(named_pins, "MAX_PINNED", 4 * MAX_NAMES - 1)
    cache.unpin("1")
    with pytest.raises(PinError, match="255 chunks can be pinned in all"):
        cache.pin("1", b"ns", keys)
    cache.pin("1", b"ns", keys[1:])
    cache.check_integrity()


def test_what_is_held_of_a_chain_is_told_without_using_it() -> None:
    cache, keys = Cache(FRAME_BYTES, 4), chain(5)
    for stored, expected in (([], (0, 0)), (keys[:2], (2, 32)), (keys[3:4], (3, 32))):
        store(cache, stored)
        chunks, hit = cache.find(PLAIN, keys, 0, 5 * 16)
        assert (sum(chunk is not None and chunk.ready > 0 for chunk in chunks), hit.resume_tokens) == expected
    assert cache.num_leases == 0
    order: list[Chunk] = list(cache._order)
    assert [chunk.key for chunk in order] == [keys[0], keys[1], keys[3]]
