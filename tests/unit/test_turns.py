"""Whose request is next, counted in turns."""

import itertools
from collections import Counter

import pytest
import zmq
from harness.processes import rss_bytes

from lmcache_client.contract import messages
from lmcache_client.contract.codec import ProtocolError
from lmcache_client.contract.messages import Ping
from lmcache_server.net import turns
from lmcache_server.net.turns import MAX_BYTES, TURN_S, Turns


def taken(waiting: Turns, cost_s: dict[bytes, float], count: int) -> list[bytes]:
    """The clients whose frames are next, each of which costs its client's time."""
    clients = []
    for turn in itertools.islice(iter(waiting.take, None), count):
        clients.append(turn[0])
        waiting.charge(cost_s[turn[0]])
    return clients


def test_a_process_gets_no_more_time_through_more_connections() -> None:
    waiting = Turns()
    connections = [b"flood %d" % number for number in range(16)]
    for identity in connections * 20:
        assert waiting.add(1, identity, zmq.Frame(b"f"))
    for _ in range(100):
        assert waiting.add(2, b"other", zmq.Frame(b"o"))
    costs_s = dict.fromkeys(connections, TURN_S) | {b"other": TURN_S}
    counts = Counter(taken(waiting, costs_s, 100))
    assert abs(counts[b"other"] - 50) <= 1


def test_a_request_that_takes_long_is_paid_for_with_later_turns() -> None:
    waiting = Turns()
    for _ in range(100):
        assert waiting.add(1, b"slow", zmq.Frame(b"s"))
        assert waiting.add(2, b"quick", zmq.Frame(b"q"))
    order = taken(waiting, {b"slow": 10 * TURN_S, b"quick": TURN_S / 5}, 110)
    first, second = [place for place, client in enumerate(order) if client == b"slow"][:2]
    assert second - first - 1 >= 45, "ten turns of five quick requests"
    # A process that is alone waits for nobody, whatever it owes.
    alone = Turns()
    for _ in range(5):
        assert alone.add(1, b"slow", zmq.Frame(b"s"))
    assert taken(alone, {b"slow": 10 * TURN_S}, 9) == [b"slow"] * 5
    assert alone.take() is None
    assert not alone._processes, "nothing of it is kept"


def test_what_waits_is_bounded_for_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, frame = Turns(), zmq.Frame(bytes(1 << 20))
    assert [waiting.add(1, b"a", frame) for _ in range(33)] == [True] * 32 + [False]
    assert waiting.add(2, b"b", frame), "others have room"
    assert [waiting.take() is not None for _ in range(2)] == [True] * 2
    assert waiting.add(1, b"a", frame), "there is room again"
    monkeypatch.setattr(turns, "MAX_BYTES", 10 * turns.MIN_FRAME_BYTES)
    small = Turns()
    assert sum(small.add(1, b"a", zmq.Frame(b"")) for _ in range(20)) == 10, "small frames take memory, too"
    assert MAX_BYTES == 32 << 20


def test_the_id_of_a_request_is_read_from_its_first_bytes() -> None:
    for number in (0, 200, 1 << 16, 1 << 40, (1 << 63) - 1):
        frame = messages.encode_request(number, Ping())
        assert messages.request_id(memoryview(frame + bytes(100))) == number
    bad = (b"", b"\x93", b"\xc1", b"\x93\x07", b"\x93\x07\xa1x\x90", b"\x93\x07\xff\x90", b"\x01" * 40,
           b"\xdd\xff\xff\xff\xff\x07" + b"\xdd" * 50)  # fmt: skip
    for frame in bad:
        with pytest.raises(ProtocolError):
            messages.request_id(memoryview(frame))


def test_small_frames_that_wait_take_as_much_memory_as_is_counted() -> None:
    waiting, count = Turns(), 20_000
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
        dealer.connect(f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")

        def receive() -> None:
            dealer.send(b"x" * 100)
            identity, frame = router.recv_multipart(copy=False)
            assert waiting.add(1, identity.bytes, frame)

        for _ in range(1000):
            receive()
        before = rss_bytes()
        for _ in range(count):
            receive()
        assert rss_bytes() - before < 2 * count * turns.MIN_FRAME_BYTES
        while waiting.take() is not None:
            waiting.charge(0.0)
