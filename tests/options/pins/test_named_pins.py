"""Which chunks names keep from eviction, and how many they may."""

import pytest

from lmcache_client.contract.geometry import FULL, GroupSpec
from lmcache_server.core.cache import Cache, Layout, Reservation
from lmcache_server.options.pins import named_pins
from lmcache_server.options.pins.named_pins import MAX_NAMES, NamedPins, PinError

FRAME_BYTES = 100
TWO = Layout(b"ns", 16, (GroupSpec(FULL, 16, 0, "", ()),) * 2, ((0,),) * 2)
"""A chunk has an object in each of two groups."""


def chain(count: int, name: int = 0) -> list[bytes]:
    return [bytes([name, index]) * 16 for index in range(count)]


def reserve(cache: Cache, key: bytes, of: int = 0, frames: int = 1) -> Reservation:
    room = cache.reserve(TWO, key, of, 0, 1, frames * FRAME_BYTES)
    assert isinstance(room, Reservation)
    return room


def made(total_frames: int, keys: list[bytes]) -> tuple[Cache, NamedPins]:
    cache = Cache(FRAME_BYTES, total_frames)
    for key in keys:
        cache.commit(reserve(cache, key))
    return cache, NamedPins(cache)


def test_half_of_l1_can_be_pinned_and_no_frame_more() -> None:
    keys = chain(6)
    cache, pins = made(11, keys)
    with pytest.raises(PinError, match=r"55 % of L1 would be pinned, .* --l1-size-gb"):
        pins.pin("mine", b"ns", keys)
    assert not cache.protected
    pins.pin("mine", b"ns", keys[:5])
    with pytest.raises(PinError, match="at most half"):
        pins.pin("mine", b"ns", keys[5:])
    pins.pin("yours", b"ns", keys[:5])
    assert pins.frames == 5, "a second name takes no memory"
    for number in range(20):
        cache.commit(reserve(cache, bytes([200, number]) * 16))
    assert all(cache.ready(TWO, keys[:5])), "they are not evicted"
    assert not any(cache.ready(TWO, keys[5:]))
    assert (len(pins.unpin("mine")), len(pins.unpin("yours"))) == (0, 5)
    for number in range(20):
        cache.commit(reserve(cache, bytes([201, number]) * 16))
    assert not any(cache.ready(TWO, keys))
    with pytest.raises(KeyError):
        pins.unpin("mine")


def test_if_pinned_chunks_grow_beyond_half_of_l1_the_newest_names_end() -> None:
    """Otherwise small objects could be pinned, and large ones added to their chunks."""
    keys = chain(3)
    cache, pins = made(10, keys)
    for number, key in enumerate(keys):
        pins.pin(f"name {number}", b"ns", [key])
    cache.commit(reserve(cache, keys[0], of=1, frames=2))
    assert pins.frames == 5
    assert pins.unpin_excess() == []
    cache.commit(reserve(cache, keys[1], of=1, frames=2))
    assert pins.unpin_excess() == ["name 2", "name 1"]
    assert pins.names.keys() == {"name 0"}
    assert (pins.frames, len(pins)) == (3, 1)
    pins.check_integrity()
    cache.check_integrity()


def test_a_chunk_that_is_being_written_is_pinned_when_that_has_ended() -> None:
    (key,) = chain(1)
    cache, pins = made(10, [key])
    writing = reserve(cache, key, of=1, frames=4)
    pins.pin("mine", b"ns", [key])
    assert not pins.names, "nor is there a name without chunks"
    cache.abort(writing)
    pins.pin("mine", b"ns", [key])
    # A pinned chunk that is forgotten while it grows frees all of it.
    writing = reserve(cache, key, of=1)
    cache.clear()
    cache.check_integrity()
    assert not pins.names
    cache.commit(writing)
    assert (cache.free_frames, pins.frames) == (10, 0)


def test_names_and_chunks_of_pins_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = chain(4)
    cache, pins = made(10, keys)
    pins.pin("0", b"ns", keys)
    for number in range(1, MAX_NAMES):
        pins.pin(str(number), b"ns", keys)
    with pytest.raises(PinError, match="64 names are pinned already"):
        pins.pin("one more", b"ns", keys)
    pins.pin("0", b"ns", keys)
    assert len(pins.names) == MAX_NAMES
    monkeypatch.setattr(named_pins, "MAX_PINNED", 4 * MAX_NAMES - 1)
    pins.unpin("1")
    with pytest.raises(PinError, match="255 chunks can be pinned in all"):
        pins.pin("1", b"ns", keys)
    pins.pin("1", b"ns", keys[1:])
    pins.check_integrity()
    cache.check_integrity()
