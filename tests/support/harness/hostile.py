"""A real ROUTER that answers as a server does, except where a test makes it lie.

It stores nothing: what it says about bytes is made up. Its lies are replies of another type than the question
wants, replies that break the rules of the wire, and silence.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, get_args

import msgpack
import zmq

from lmcache_client.contract import control, messages
from lmcache_client.contract.codec import packed
from lmcache_client.contract.control import Follow, Followed, Inspect, Inspected, StatusReport
from lmcache_client.contract.geometry import Geometry, GroupSpec, Region
from lmcache_client.contract.keys import ModelTag
from lmcache_client.contract.messages import (
    PROTOCOL_VERSION,
    Cleared,
    Done,
    Found,
    Joined,
    Message,
    Refused,
    Registered,
    Stored,
    Welcome,
)

CHUNK_SIZE = 16
BOOT_ID = bytes(range(16))
KEY = bytes(32)

Lie = Callable[[int, Message], list[list[bytes]]]
"""From a request's number and its message, the replies, each a list of ZeroMQ's frames."""

_SPEC = GroupSpec("full", 16, 0, "", (Region(0, 0, 64, 64),))
_TAG = ModelTag("m", (), 1, 1)
_MEMORY = messages.Memory(1, ((0, 4096),), 0)
EXAMPLES: tuple[Message, ...] = (
    messages.Hello(1, bytes(16), "x"), Welcome(BOOT_ID, 1, "x", 1),
    messages.Register("e", 0, _TAG, Geometry((_SPEC,), 4), _MEMORY), messages.Challenge(bytes(32)),
    messages.Prove(), Registered(16, ""), messages.Join("e"), Joined(True, 16),
    messages.NotCached("e", "m", "v", "r"), messages.Lookup("r", (KEY,), 0, 16, 17),
    Found(16, 1, 60, (b"\xff",), (("evicted", 16),)), messages.Release((1,), (KEY,)),
    messages.Load("r", 1, KEY, 16, 0, (packed((1,)),)),
    messages.Store((messages.StoreObject(KEY, KEY, 0, 0, packed((1,)), b"tenant"),)), Stored(1, 0, 0),
    messages.Clear(), Cleared(1), control.Status(), StatusReport(("{}",)), messages.Ping(),
    messages.Goodbye(), Done(), Refused("x", "no"), messages.Pin("name", "r" * 16),
    messages.Pinned(1, 1, 16, 16), messages.Unpin("name"), messages.Unpinned(1), Inspect("e", (KEY,), 16),
    Inspected(16, (b"\xff",), (("evicted", 16),)), messages.Accept((("r", 0),)),
    Follow((KEY,)), Followed(16, (KEY,), False), control.Retain((KEY,), 60),
)  # fmt: skip
"""One message of each type."""
assert [type(each) for each in EXAMPLES] == list(get_args(Message))


def honest(
    message: Message, chunk_size: int = CHUNK_SIZE, num_groups: int = 1, report: str = "{}"
) -> Message:
    """What a server would say to an engine with so many groups."""
    if isinstance(message, messages.Lookup):
        return Found(message.limit_tokens, 1, 60, (b"",) * num_groups)
    if isinstance(message, messages.Store):
        return Stored(len(message.objects), 0, 0)
    answers: dict[Any, Message] = {
        messages.Hello: Welcome(BOOT_ID, os.getpid(), "x", 1),
        messages.Register: messages.Challenge(bytes(32)),
        messages.Prove: Registered(chunk_size, ""),
        messages.Join: Joined(True, chunk_size),
        messages.Clear: Cleared(0),
        messages.Pin: messages.Pinned(0, 0, 0, 0),
        messages.Unpin: messages.Unpinned(0),
        Follow: Followed(0, (), False),
        Inspect: Inspected(0, (b"",) * num_groups, ()),
        control.Status: StatusReport((report,)),
    }
    return answers.get(type(message), Done())


def says(reply: Message) -> Lie:
    return lambda number, _message: [[messages.encode_reply(BOOT_ID, number, reply)]]


def _right(number: int, message: Message) -> bytes:
    return messages.encode_reply(BOOT_ID, number, honest(message))


def _raw(*envelope: Any) -> list[list[bytes]]:
    return [[msgpack.packb(list(envelope))]]


def _nested_field(number: int) -> bytes:
    envelope = (msgpack.packb(each) for each in (PROTOCOL_VERSION, number, BOOT_ID))
    return b"\x94" + b"".join(envelope) + b"\x92\x07" + b"\x91" * 900 + b"\x90"


BENT: dict[str, Lie] = {
    "silence": lambda number, message: [],
    "nothing": lambda number, message: [[b""]],
    "garbage": lambda number, message: [[b"\xc1\xc1\xc1"]],
    "cut": lambda number, message: [[_right(number, message)[:-1]]],
    "longer": lambda number, message: [[_right(number, message) + b"\x00"]],
    "two parts": lambda number, message: [[_right(number, message), b"more"]],
    "twice": lambda number, message: [[_right(number, message)]] * 2,
    "for another request": lambda number, message: [[_right(number + 1000, message)]],
    "huge": lambda number, message: [[bytes(5 << 20)]],
    "a huge text": lambda number, message: _raw(PROTOCOL_VERSION, number, BOOT_ID, [22, "x", "x" * 70_000]),
    "nested": lambda number, message: [[b"\x91" * 50_000 + b"\x90"]],
    "a nested field": lambda number, message: [[_nested_field(number)]],
    "a map": lambda number, message: _raw(PROTOCOL_VERSION, number, BOOT_ID, {"a": 1}),
    "an unknown type": lambda number, message: _raw(PROTOCOL_VERSION, number, BOOT_ID, [99]),
    "fields of other types": lambda number, message: _raw(PROTOCOL_VERSION, number, BOOT_ID, [10, "x", -1]),
    "another version": lambda number, message: _raw(PROTOCOL_VERSION + 1, number, BOOT_ID, [21]),
    "a short boot id": lambda number, message: _raw(PROTOCOL_VERSION, number, b"x", [21]),
    "another boot id": lambda number, message: [
        [messages.encode_reply(bytes(16), number, honest(message))]
    ],
}  # fmt: skip
"""Replies that break a rule, by what is wrong with them."""
REFUSALS: dict[str, Lie] = {
    code: says(Refused(code, "no\x1b[2J\nno"))
    for code in ("", "unknown", messages.EXPIRED, messages.INTERNAL, messages.OVERLOADED,
                 messages.BAD_REQUEST, messages.CONFIGURATION, messages.NOT_REGISTERED,
                 messages.ENGINE_ID_TAKEN)
}  # fmt: skip
NUMBERS = (0, 1, 15, 16, 17, 1 << 31, (1 << 63) - 1)
WRONG: dict[str, Lie] = {
    **{
        f"found {n} of lease {m}": says(Found(n, m, n, (b"", b""))) for n in NUMBERS for m in (0, NUMBERS[-1])
    },
    **{
        f"held {len(held)}": says(Found(16, 1, 1, held)) for held in ((), (b"",) * 3, (b"\xff" * 70_000,) * 2)
    },
    "missed too much": says(Found(0, 0, 1, (b"",), (("x" * 32, NUMBERS[-1]),) * 16)),
    **{f"joined {n}": says(Joined(True, n)) for n in NUMBERS},
    "inspected too far": says(Inspected(NUMBERS[-1], (b"\xff" * 70_000,), (("\x1b[2J", NUMBERS[-1]),))),
    "inspected nothing": says(Inspected(0, (), ())),
    "not joined": says(Joined(False, 16)),
    **{f"stored {n}": says(Stored(n, n, n)) for n in NUMBERS},
    "registered": says(Registered(NUMBERS[-1], "x\x1b[2J\n" * 5000)),
    "a process that is not there": says(Welcome(BOOT_ID, NUMBERS[-1], "x", NUMBERS[-1])),
}
"""Replies of some type with values that make no sense."""
LIES: dict[str, Lie] = {
    **{type(each).__name__: says(each) for each in EXAMPLES}, **BENT, **WRONG,
    **{f"refused as {code!r}": lie for code, lie in REFUSALS.items()},
}  # fmt: skip


class HostileServer:
    """Listens at the Unix socket of `port` in `directory`. A context manager.

    It gives the `lies` for messages of these types, and what `script` returns unless that is None; change
    both at any time. `honestly` has the other arguments of `honest`. `asked` counts what it was asked.
    """

    def __init__(self, directory: Path, port: int = 5555, **honestly: Any) -> None:
        self.address = f"ipc://{directory}/{port}.sock"
        self.lies: dict[type[Any], Lie] = {}
        self.script: Callable[[int, Message], list[list[bytes]] | None] = lambda _number, _message: None
        self.asked: dict[type[Any], int] = {}
        self._honestly = honestly
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Self:
        bound = threading.Event()
        self._bound = bound
        self._thread.start()
        assert bound.wait(10.0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _serve(self) -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.setsockopt(zmq.LINGER, 0)
            router.bind(self.address)
            self._bound.set()
            while not self._stop.is_set():
                if router.poll(10):
                    identity, frame = router.recv_multipart()
                    for reply in self._replies(frame):
                        router.send_multipart([identity, *reply])

    def _replies(self, frame: bytes) -> list[list[bytes]]:
        number, message = messages.decode_request(frame)
        kind = type(message)
        self.asked[kind] = self.asked.get(kind, 0) + 1
        if (scripted := self.script(number, message)) is not None:
            return scripted
        if (lie := self.lies.get(kind)) is not None:
            return lie(number, message)
        return says(honest(message, **self._honestly))(number, message)
