"""What the client makes of keys, answers and leases, of one server and of several, without any."""

from typing import Any

import pytest

from lmcache_client.contract.codec import packed
from lmcache_client.contract.control import Follow
from lmcache_client.contract.geometry import GroupSpec
from lmcache_client.contract.keys import ROOT_KEY, chunk_key, chunk_keys
from lmcache_client.contract.messages import Done, Found, Joined, Lookup, Message, Release
from lmcache_client.engine import chunk_object, expect, join, load_message
from lmcache_client.server_channel import ChannelError, Pending, unsent
from lmcache_client.servers import Channels, Part, Servers, Together
from lmcache_client.transport import System


class Connection:
    """What a question to several servers needs of a channel. It is answered at once."""

    system = System()
    ready, boot_id, address = True, b"boot", "somewhere"
    generation = 1

    def __init__(self, lease: int = 0, l1_bytes: int = 0, capacity_tokens: int = 0) -> None:
        self.found: Message = Found(256, lease, 60, (b"\1",))
        self.joined = Joined(True, 256, False, l1_bytes, capacity_tokens)
        self.released: list[int] = []

    def call(self, _join: Message, _timeout_s: float) -> Joined:
        return self.joined

    def submit(self, message: Message, _timeout_s: float, _on_late: Any = None) -> Pending:
        pending = Pending(0.0)
        if isinstance(message, Release):
            self.released += message.lease_ids
        elif self.ready:
            pending._finish(self.found)
        else:
            return unsent("there is no connection")
        return pending

    def abandon(self, pending: Pending) -> None:
        assert pending.done, "it has answered"

    def poll(self, pending: Pending | None = None, wait_s: float = 0.0) -> None:
        assert pending is None, "nobody may wait for a question that is answered"


@pytest.mark.parametrize("waits_s", [0.0, 5.0])
def test_a_server_that_is_lost_before_it_is_asked_again_ends_the_question(waits_s: float) -> None:
    connection, given_up = Connection(), []
    lost = Connection()
    lost.ready = False

    class Question(Together):
        def merge(self, replies: list[Message]) -> None:
            assert len(replies) == 2
            self.parts[0] = Part.of(lost, Follow(()), 1.0)  # type: ignore[arg-type]

        def fail_all(self) -> None:
            given_up.append(True)

    together = Question([connection, connection], Follow(()), 1.0, Found)  # type: ignore[list-item]
    Channels([connection, connection]).poll(together, waits_s)  # type: ignore[list-item]
    assert together.done
    assert isinstance(together.error, ChannelError)
    assert given_up == [True]


def test_a_lease_of_an_earlier_registration_is_not_given_back() -> None:
    """The server that has restarted may have given its number to somebody else's lease."""
    channels = [Connection(7), Connection(8)]
    several = Servers(channels, "engine")  # type: ignore[arg-type]
    for generation in (1, 2):
        lookup = several.lookup(Lookup("", (b"k" * 32,), 0, 256, 257, 0), 1.0)
        assert lookup.advance()
        assert isinstance(lookup.reply, Found)
        assert several.leases(lookup.reply.lease_id) == (7, 8)
        channels[0].generation = generation
        several.release((lookup.reply.lease_id,))
    assert (channels[0].released, channels[1].released) == ([7], [8, 8])


def test_the_answer_of_one_server_does_not_speak_for_another_that_talks_nonsense() -> None:
    strange = Connection(8)
    strange.found = Done()
    honest = Connection(7)
    several = Servers([honest, strange], "engine")  # type: ignore[list-item]
    lookup = several.lookup(Lookup("", (b"k" * 32,), 0, 256, 257, 0), 1.0)
    assert lookup.advance()
    assert lookup.reply == Done()
    assert honest.released == [7], "what it has promised is given up"


def test_what_servers_hold_together_is_known_once_all_have_been_joined() -> None:
    """Each has its own ranks' part of a chunk: the one with room for the fewest tokens decides."""
    channels = [Connection(1, 4 << 30, 1000), Connection(2, 8 << 30, 3000)]
    servers = Servers(channels, "engine")  # type: ignore[arg-type]
    first, second = (servers.join(each) for each in channels)  # type: ignore[arg-type]
    assert (first.l1_bytes, first.capacity_tokens) == (0, 0), "a warning that it is small would be wrong"
    assert (second.l1_bytes, second.capacity_tokens) == (12 << 30, 1000)


def test_servers_that_join_at_once_with_other_chunk_sizes_are_not_both_accepted() -> None:
    """Neither is ready before the other has asked."""
    one, other = Connection(1), Connection(2)
    other.joined = Joined(True, 512, False)
    servers = Servers([one, other], "engine")  # type: ignore[list-item]
    one.ready = other.ready = False
    servers.join(one)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="256 at somewhere, 512 at somewhere"):
        servers.join(other)  # type: ignore[arg-type]
    one.boot_id = b"the next"  # of which nobody knows yet what it says
    servers.join(other)  # type: ignore[arg-type]


# -- one server -----------------------------------------------------------------------------------------

KEYS = tuple(chunk_keys(([chunk], None) for chunk in range(3)))


class Recorder:
    """Notes what is sent, in the place of a channel; each call is answered with `reply`."""

    system, generation = System(), 1

    def __init__(self, reply: Message | None = None) -> None:
        self.sent: list[Message] = []
        self.reply = reply

    def submit(self, message: Message, timeout_s: float, on_late: Any = None) -> Pending:
        self.sent.append(message)
        self.pending = Pending(timeout_s, on_late)
        return self.pending

    def abandon(self, pending: Pending) -> None:
        pending._fail("abandoned")

    def call(self, message: Message, _timeout_s: float) -> Message | None:
        self.sent.append(message)
        return self.reply


def test_each_key_of_a_chain_stands_for_all_chunks_before_it() -> None:
    parent = ROOT_KEY
    for chunk, key in enumerate(KEYS):
        parent = chunk_key(parent, [chunk], None)
        assert key == parent
    assert list(chunk_keys([([2], None)], parent=KEYS[1])) == [KEYS[2]]
    assert [chunk_object(KEYS, chunk, 0, (1,)).parent for chunk in range(3)] == [ROOT_KEY, *KEYS[:2]]


def test_a_load_names_the_blocks_beyond_what_is_computed() -> None:
    groups = [GroupSpec("full", 16, 0, "", ()), GroupSpec("recurrent", 32, 0, "", ())]
    tables = [[7, 8, 9, 10], {1: 5}]
    message = load_message("request", Found(64, 3, 30, ()), KEYS[1], 32, groups, tables)
    assert message.block_ids == (packed((9, 10)), packed((5,)))
    assert (message.lease_id, message.key) == (3, KEYS[1])
    assert (message.resume_tokens, message.computed_tokens) == (64, 32)


@pytest.mark.parametrize("waits", [True, False], ids=["answered and unused", "not answered yet"])
def test_a_lookup_that_nobody_waits_for_gives_its_lease_back(waits: bool) -> None:
    channel = Recorder()
    client = Servers([channel], "engine")  # type: ignore[list-item]
    lookup = client.lookup(Lookup("request", KEYS, 0, 48, 49), 1.0)
    asked = channel.pending
    if waits:
        asked._finish(Found(48, 9, 30, ()))
        assert lookup.advance()
    client.forget(lookup)
    if not waits:
        assert len(channel.sent) == 1
        asked._finish(Found(48, 9, 30, ()))
    assert channel.sent[1:] == [Release((9,), ())]


def test_an_engine_that_is_not_there_yet_and_an_answer_of_another_kind_are_errors() -> None:
    with pytest.raises(ChannelError, match="not all registered"):
        join(Recorder(Joined(False, 0)), "engine")  # type: ignore[arg-type]
    with pytest.raises(ChannelError, match="answered Done, not Found"):
        expect(Done(), Found)
