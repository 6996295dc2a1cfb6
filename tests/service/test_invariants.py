"""The invariants that docs/design.md lists, by the numbers that they have there: the real router, in this
process, with copies that end when the test says so.

The second and the fourth are also in server/test_malformed.py. What can be seen of the last two in the
sources is in unit/test_architecture.py.
"""

from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
from desk import Desk, is_refused, load, store

from lmcache_client.contract import codec, messages
from lmcache_client.contract.codec import packed
from lmcache_client.contract.messages import Clear, Cleared, Goodbye, Hello, Stored
from lmcache_server.service.copies import _check_blocks, _check_count
from lmcache_server.service.refusals import Refusal
from lmcache_server.transfer.base import CopyError


def test_invariant_1_free_reserved_and_ready_frames_are_all_frames(desk: Desk) -> None:
    """Through everything that may happen to frames, looked at after each step."""
    for who in range(3):
        desk.join(who)
    total, *others = desk.frames()
    assert others == [0, 0]
    desk.ask(0, store(1))
    assert desk.frames() == (total - 1, 1, 0), "it is being written"
    desk.end_copies()
    assert desk.frames() == (total - 1, 0, 1), "it is ready"
    desk.ask(0, store(2))
    desk.end_copies(CopyError("a fault"))
    assert desk.frames() == (total - 1, 0, 1), "a copy that failed gives its frame back"
    found = desk.lookup(1, 1)
    assert desk.ask(1, load(found, 1)) is None
    assert desk.ask(2, Clear()) == Cleared(1)
    desk.frames()
    desk.leave(1)
    desk.end_copies()
    assert desk.frames() == (total, 0, 0), "what is cleared in mid-load is free when the load has ended"
    desk.ask(0, store(3))
    desk.ask(2, Clear())
    desk.end_copies()
    assert desk.frames() == (total, 0, 0), "what is cleared in mid-store is free when the store has ended"
    for number in range(4, 4 + 2 * total):
        desk.ask(0, store(number))
        desk.frames()
        desk.end_copies()
        desk.frames()
    assert desk.frames() == (0, 0, total), "L1 is full, and the oldest made room"
    desk.ask(0, store(3))
    assert desk.frames() == (0, 1, total - 1)
    desk.leave(0)
    assert desk.frames()[1] == 0, "whoever writes and goes reserves nothing"


def test_invariant_1_no_lease_is_left_when_nobody_is_connected(desk: Desk) -> None:
    for who in range(4):
        desk.join(who)
    desk.stored(1)
    founds = [desk.lookup(who, 1) for who in range(4)]
    assert desk.target.cache.num_leases == 4
    assert desk.ask(0, load(founds[0], 1)) is None
    desk.ask(0, Goodbye())
    desk.ask(1, Goodbye())
    desk.leave(2)
    assert desk.ask(3, load(founds[3], 1)) is None
    desk.leave(3)
    desk.end_copies()
    assert not desk.target.router.sessions.by_identity
    l1 = desk.target.report.status()["l1"]
    assert (l1["leases"], l1["readers"], l1["reserved_bytes"]) == (0, 0, 0)
    desk.frames()


def test_invariant_2_a_page_comes_only_from_a_ready_object_of_its_key_and_namespace(desk: Desk) -> None:
    desk.join(0)
    desk.join(1)
    desk.join(2, "another model")
    assert desk.ask(0, store(1)) is None
    assert not desk.has(1, 1), "what is being written is not ready"
    desk.end_copies()
    assert not desk.has(2, 1), "it is of another namespace"
    honest = load(desk.lookup(1, 1), 1)
    assert is_refused(desk.ask(2, honest), messages.EXPIRED)
    assert desk.jobs == 0, "nothing is copied"
    assert desk.ask(1, honest) is None
    assert desk.jobs == 1


def test_invariant_3_an_object_has_one_writer_and_the_other_is_told(desk: Desk) -> None:
    desk.join(0)
    desk.join(1)
    there = Stored(0, 1, 0)
    assert desk.ask(0, store(1)) is None
    assert desk.ask(1, store(1)) == there, "while it is being written"
    assert desk.jobs == 1, "one writes"
    desk.end_copies()
    assert desk.last == Stored(1, 0, 0)
    assert desk.ask(1, store(1)) == there, "when it is there"
    assert desk.ask(0, store(2)) is None
    desk.end_copies(CopyError("a fault"))
    assert desk.ask(1, store(2)) is None, "where the first failed the second may"
    assert desk.jobs == 1
    desk.end_copies()
    assert desk.last == Stored(1, 0, 0)


@pytest.mark.parametrize("count", [1, 8, 100])
def test_invariant_2_block_ids_lie_inside_the_registered_geometry(count: int) -> None:
    groups = [SimpleNamespace(regions=[None])]
    shard: Any = SimpleNamespace(geometry=SimpleNamespace(num_blocks=120, groups=groups))
    ids, right = [*range(120 - count, 120)], packed((1, 119))
    _check_blocks(shard, [(0, right), (0, packed(ids)), (0, right)])
    _check_count(packed(ids), count)
    for number in (0, 120, 1 << 31, (1 << 32) - 1):
        for wrong in ([number, *ids[1:]], [*ids[:-1], number]):
            with pytest.raises(Refusal, match="from 1 to 119"):
                _check_blocks(shard, [(0, right), (0, packed(wrong)), (0, right)])
    for other in (packed(ids[1:]), packed([*ids, 1]), packed(ids)[1:], packed(ids) + b"\0"):
        with pytest.raises(Refusal, match=f"expected {count} block ids"):
            _check_count(other, count)


@pytest.mark.parametrize(
    "fields",
    [
        (bytes(codec.MAX_MESSAGE_BYTES),),
        ("x" * (codec.MAX_TEXT + 1),),
        (msgpack.ExtType(1, b"x"),),
        ({"name": "value"},),
    ],
    ids=["long", "long text", "extension", "map"],
)
def test_invariant_4_messages_are_bounded_and_plain_data(desk: Desk, fields: tuple[object, ...]) -> None:
    for number, said in enumerate((fields, ("test", "too many fields"))):
        greeting = [Hello.__struct_config__.tag, 1 << 30, bytes(16), *said]
        desk.target.router.receive(b"1", msgpack.packb([messages.PROTOCOL_VERSION, number, greeting]))
    assert all(is_refused(reply, messages.BAD_REQUEST) for reply in desk.replies.values())
    is_long = isinstance(fields[0], bytes)
    assert [*desk.replies] == [1] if is_long else [0, 1], "what is too long is not even read"
    assert not desk.target.router.sessions.by_identity
