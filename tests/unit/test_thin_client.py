"""What the thin client makes of keys, answers and leases, without a server."""

from typing import Any

import pytest

from lmcache_client.channel import ChannelError, Pending
from lmcache_client.contract.geometry import GroupSpec
from lmcache_client.contract.keys import ROOT_KEY, chunk_key, chunk_keys
from lmcache_client.contract.messages import Done, Found, Joined, Lookup, Message, Release
from lmcache_client.engine import Scheduler, chunk_object, expect, load_message

KEYS = tuple(chunk_keys(([chunk], None) for chunk in range(3)))


class Recorder:
    """Notes what is sent, in the place of a channel; each call is answered with `reply`."""

    def __init__(self, reply: Message | None = None) -> None:
        self.sent: list[Message] = []
        self.reply = reply

    def submit(self, message: Message, timeout_s: float, on_late: Any = None) -> Pending:
        self.sent.append(message)
        return Pending(timeout_s, on_late)

    def abandon(self, pending: Pending) -> None:
        pending._fail("abandoned")

    def call(self, message: Message, _timeout_s: float) -> Message | None:
        self.sent.append(message)
        return self.reply


def scheduler(channel: Recorder) -> Scheduler:
    return Scheduler(channel, "engine")  # type: ignore[arg-type]


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
    assert message.block_ids == ((9, 10), (5,))
    assert (message.lease_id, message.key) == (3, KEYS[1])
    assert (message.resume_tokens, message.computed_tokens) == (64, 32)


@pytest.mark.parametrize("waits", [True, False], ids=["answered and unused", "not answered yet"])
def test_a_lookup_that_nobody_waits_for_gives_its_lease_back(waits: bool) -> None:
    channel = Recorder()
    client = scheduler(channel)
    lookup = client.lookup(Lookup("request", KEYS, 0, 48, 49), 1.0)
    if waits:
        lookup._finish(Found(48, 9, 30, ()))
    client.forget(lookup)
    if not waits:
        assert len(channel.sent) == 1
        lookup._finish(Found(48, 9, 30, ()))
    assert channel.sent[1:] == [Release((9,), ())]


def test_an_engine_that_is_not_there_yet_and_an_answer_of_another_kind_are_errors() -> None:
    with pytest.raises(ChannelError, match="not all registered"):
        scheduler(Recorder(Joined(False, 0))).join()
    with pytest.raises(ChannelError, match="answered Done, not Found"):
        expect(Done(), Found)
