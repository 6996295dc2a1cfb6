"""Pins of requests: what is watched for, pinned and refused. The real router, in this process."""

import json

import pytest
from desk import USER, Desk, evict_everything, key, serving
from fuzz.messages import CHUNK_SIZE, geometry

from lmcache_client.contract import codec, control, messages
from lmcache_client.contract.codec import packed
from lmcache_client.contract.keys import ROOT_KEY, ModelTag
from lmcache_client.contract.messages import (
    Clear,
    Cleared,
    Done,
    Message,
    Pin,
    Pinned,
    Store,
    StoreObject,
    Unpin,
    Unpinned,
)
from lmcache_server.core.pool import FRAME_BYTES
from lmcache_server.options.pins.server import MAX_WATCHED, Server

__all__ = ["serving"]
TOKEN = "0123456789abcdef" * 2


def ended(desk: Desk, keys: tuple[bytes, ...], request: str = TOKEN, who: int = 0) -> None:
    """A request ends in vLLM, which makes its id longer."""
    assert desk.ask(who, messages.Release((), keys, f"cmpl-{request}-0-1234abcd")) == Done()


def pins(desk: Desk) -> dict[str, int]:
    """The bytes of each name, as the status tells them."""
    report = desk.ask(USER, control.Status())
    assert isinstance(report, control.StatusReport)
    return {each["name"]: each["bytes"] for each in json.loads("".join(report.pieces))["pins"]}


def pin(desk: Desk, name: str, request: str = TOKEN) -> Message | None:
    return desk.ask(USER, Pin(name, request))


def test_a_request_is_pinned_by_a_part_of_its_id_and_outlives_its_engine(serving: Desk) -> None:
    assert pin(serving, "") == Pinned(0, 0, 0, 0)
    keys = serving.stored(1, 2, 3)
    assert pin(serving, "mine") == Pinned(0, 0, 0, 0), "the request has not ended"
    ended(serving, (*keys, key(4)))
    assert pin(serving, "") == Pinned(4, 3, 3 * CHUNK_SIZE, CHUNK_SIZE)
    assert pins(serving) == {}, "asking pins nothing"
    assert pin(serving, "mine") == Pinned(4, 3, 3 * CHUNK_SIZE, CHUNK_SIZE)
    assert pins(serving) == {"mine": 3 * FRAME_BYTES}
    assert serving.target.metrics.value("lmcache_pinned_chunks") == 3
    assert serving.target.metrics.value("lmcache_pinned_chunk_bytes") == 3 * FRAME_BYTES
    serving.leave(0)
    serving.leave(USER)
    serving.join(2)
    serving.hello(USER)
    evict_everything(serving, who=2)
    assert serving.target.cache.evicted_chunks
    assert pin(serving, "") == Pinned(4, 3, 3 * CHUNK_SIZE, CHUNK_SIZE)
    assert serving.ask(USER, Unpin("mine")) == Unpinned(3)
    assert pins(serving) == {}


def test_a_request_that_ended_before_it_was_watched_for_is_not_known(serving: Desk) -> None:
    keys = serving.stored(1)
    ended(serving, keys)
    assert pin(serving, "mine") == Pinned(0, 0, 0, 0)
    ended(serving, keys, request="another request, not asked for")
    assert pin(serving, "mine") == Pinned(0, 0, 0, 0)


def test_each_engine_pins_its_own_chunks(serving: Desk) -> None:
    pin(serving, "")
    keys = serving.stored(1, 2)
    serving.stored(1, who=1)
    ended(serving, keys, who=1)
    assert pin(serving, "mine") == Pinned(2, 1, CHUNK_SIZE, CHUNK_SIZE)
    evict_everything(serving)
    assert serving.target.cache.num_chunks > 1
    assert pins(serving) == {"mine": FRAME_BYTES}


def refusal(reply: Message | None, code: str) -> str:
    assert isinstance(reply, messages.Refused)
    assert reply.code == code
    return reply.message


def test_more_than_half_of_l1_is_refused_in_one_sentence(serving: Desk) -> None:
    pin(serving, "")
    ended(serving, serving.stored(*range(serving.target.l1.num_frames // 2 + 1)))
    assert "at most half of it can be" in refusal(pin(serving, "mine"), messages.OVERLOADED)
    assert pins(serving) == {}


def test_who_may_pin_and_unpin_and_what(serving: Desk) -> None:
    for message in (Pin("mine", TOKEN), Unpin("")):
        refusal(serving.ask(9, message), messages.NOT_REGISTERED)
    for name in ("yours", "\x1b[2J\n", "\u202e"):
        unknown = refusal(serving.ask(USER, Unpin(name)), messages.BAD_REQUEST)
        assert unknown == f"nothing is pinned as {name!r}: 'lmcache status' lists the names that are"
    assert serving.ask(USER, Unpin("")) == Unpinned(0)


def test_requests_that_are_watched_for_are_bounded_and_the_oldest_is_forgotten(serving: Desk) -> None:
    tokens = [f"{number:032x}" for number in range(MAX_WATCHED + 1)]
    for token in tokens:
        pin(serving, "", token)
    keys = serving.stored(1)
    for token in tokens:
        ended(serving, keys, token)
    assert pin(serving, "", tokens[-1]) == Pinned(1, 1, CHUNK_SIZE, CHUNK_SIZE)
    assert pin(serving, "", tokens[0]) == Pinned(0, 0, 0, 0)


def test_clear_forgets_pins_and_an_engines_own_clear_those_of_its_namespace(serving: Desk) -> None:
    for who, name in ((0, "first"), (1, "second")):
        token = f"{who:032x}"
        pin(serving, "", token)
        ended(serving, serving.stored(1, who=who), token, who)
        pin(serving, name, token)
    assert pins(serving).keys() == {"first", "second"}
    assert serving.ask(0, Clear()) == Cleared(1)
    assert pins(serving).keys() == {"second"}
    assert serving.ask(USER, Clear(everything=True)) == Cleared(1)
    assert pins(serving) == {}
    assert serving.target.cache.free_frames == serving.target.l1.num_frames


def test_pins_are_saved_for_the_next_server_and_what_is_not_readable_pins_nothing(
    serving: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    pin(serving, "")
    ended(serving, serving.stored(1, 2))
    pin(serving, "mine")
    (option,) = (each for each in serving.target.router.options if isinstance(each, Server))
    saved = option.saved()
    assert serving.ask(USER, Unpin("")) == Unpinned(2)
    option.restored(saved)
    assert pins(serving) == {"mine": 2 * FRAME_BYTES}
    assert serving.ask(USER, Unpin("")) == Unpinned(2)
    no_text = b"\x81\xa1\xff\x90"
    damaged = b"rubbish", no_text, saved[:-1], codec.pack({"": [(b"n", b"k")]}), codec.pack({"a": 7})
    for wrong in (b"", b"\x80", *damaged):
        option.restored(wrong)
        assert pins(serving) == {}
    told = [each for each in caplog.messages if "not everything that was pinned before the restart" in each]
    assert len(told) == len(damaged)
    serving.target.cache.check_integrity()


def join_with_groups(desk: Desk, who: int) -> None:
    """An engine that also has a window and a state: each chunk has three objects."""
    tag = ModelTag("hybrid", (("weights", "hybrid"),), 1, 1)
    assert isinstance(desk.hello(who), messages.Welcome)
    asked = messages.Register(f"engine {who}", 0, tag, geometry(1), desk.memory_of(who))
    assert isinstance(desk.ask(who, asked), messages.Challenge)
    assert isinstance(desk.answer(who, messages.Prove()), messages.Registered)
    assert isinstance(desk.ask(who, messages.Join(f"engine {who}")), messages.Joined)


def store_of(desk: Desk, who: int, number: int, group: int) -> None:
    count = len(geometry(1).groups[group].stored_blocks(0, CHUNK_SIZE))
    stored = StoreObject(key(number), ROOT_KEY, 0, group, packed(range(1, 1 + count)))
    desk.ask(who, Store((stored,)))
    desk.end_copies()


def test_if_pinned_chunks_grow_beyond_half_of_l1_the_newest_names_end_and_the_log_says_so(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    join_with_groups(desk, 0)
    desk.hello(USER)
    half = desk.target.l1.num_frames // 2
    for name, numbers in (("old", range(half // 2)), ("new", range(half // 2, half))):
        token = f"{name:x>32}"
        assert pin(desk, "", token) == Pinned(0, 0, 0, 0)
        for number in numbers:
            store_of(desk, 0, number, 0)
        ended(desk, tuple(map(key, numbers)), token)
        assert isinstance(pin(desk, name, token), Pinned)
    assert pins(desk).keys() == {"old", "new"}
    (option,) = (each for each in desk.target.router.options if isinstance(each, Server))
    desk.target.router.tick()
    assert pins(desk).keys() == {"old", "new"}, "half may be pinned"
    store_of(desk, 0, 0, 1)
    desk.target.router.tick()
    assert pins(desk) == {"old": (half // 2 + 1) * FRAME_BYTES}
    assert "the newest name, 'new', is not pinned any more" in caplog.text
    option.pins.check_integrity()
    desk.target.cache.check_integrity()
