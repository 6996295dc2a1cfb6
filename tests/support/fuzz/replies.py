"""The thin client against a hostile server: the real channel, worker and scheduler, and replies of any kind.

Time passes only where the client waits, and what arrives are the input's bytes.
"""

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

from fuzz.choices import Choices, Target, bend, frame_of
from fuzz.messages import BUFFER_BYTES, chain, geometry, plain
from lmcache_client.contract import control, messages
from lmcache_client.contract.codec import ProtocolError, packed
from lmcache_client.contract.keys import ModelTag
from lmcache_client.contract.messages import Done, Found, Message, Refused, Store, StoreObject, Welcome
from lmcache_client.engine import Worker, expect
from lmcache_client.memory.host import HostExport
from lmcache_client.server_channel import Channel, ChannelError, Pending
from lmcache_client.servers import Servers
from lmcache_client.transport import System

Reply = TypeVar("Reply", Pending, None)
MAX_WAIT_S = 60.0
SERVER_PID = 4242
BOOT_ID = bytes(16)
ANSWERS: dict[type[Message], Message] = {
    messages.Hello: Welcome(BOOT_ID, SERVER_PID, "fuzz", 1),
    messages.Register: messages.Challenge(bytes(messages.NONCE_BYTES)),
    messages.Prove: messages.Registered(256, ""),
    messages.Join: messages.Joined(True, 256),
    messages.Lookup: Found(512, 3, 120, (b"\3",)),
    messages.Store: messages.Stored(1, 0, 0),
}
OTHERS: tuple[Message, ...] = (
    Refused(messages.NOT_REGISTERED, "no"), Refused(messages.OVERLOADED, "full"), Refused("?", "x"),
    Done(), messages.Cleared(1), control.StatusReport(("{}",)),
    Welcome(bytes([1]) * 16, SERVER_PID + 1, "other", 2),
)  # fmt: skip


class _Outside(System):
    """What the client takes for the system. What it sends is asked of the input."""

    def __init__(self, target: "RepliesTarget") -> None:
        self._target = target
        self.now_s = lambda: target.now_s  # type: ignore[method-assign]
        self.sleep = self._wait  # type: ignore[method-assign,assignment]

    def connect(self, address: str) -> Any:
        inbox, events = deque[bytes](), deque([True])

        def event() -> bool | None:
            choices = self._target.choices
            is_lost = not events and choices.left and choices.below(200) == 199
            return False if is_lost else events.popleft() if events else None

        return SimpleNamespace(
            send=lambda frame: inbox.extend(self._target.answers_to(frame)),
            receive=lambda: inbox.popleft() if inbox else None,
            event=event,
            wait=self._wait,
            peer_pid=lambda: SERVER_PID,
            refusal="",
            close=inbox.clear,
        )

    def _wait(self, wait_s: float) -> None:
        # The deadlines of the client are seconds, and its naps are milliseconds.
        self._target.now_s += max(wait_s, 0.05)

    def open_process(self, pid: int) -> Any:
        assert pid == SERVER_PID, "only the process that the kernel named is opened"
        return SimpleNamespace(ended=lambda: False, close=lambda: None)

    def nobody_listens(self, address: str) -> bool:
        return False


class RepliesTarget(Target):
    """One life of an engine a run: it registers, joins, stores and looks up; the input says what it hears."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds = [bytes([1, how, number] * 30) for how in range(8) for number in (0, 1, 3)]
        self.now_s = 0.0
        self.choices = Choices(b"")
        self._answered: set[int] = set()
        self._welcomes = 0

    def answers_to(self, frame: bytes) -> list[bytes]:
        """What the server says to a request: as many frames as the input likes, each bent or not."""
        request_id, request = messages.decode_request(frame)
        frames = []
        for _ in range(self.choices.below(4) or 1):
            how = self.choices.below(8)
            answer = ANSWERS.get(type(request), Done())
            if how == 1:
                answer = OTHERS[self.choices.below(len(OTHERS))]
            elif how == 2:
                answer = tuple(ANSWERS.values())[self.choices.below(len(ANSWERS))]
            elif how == 3:
                continue
            fields: Any = [messages.PROTOCOL_VERSION, request_id, BOOT_ID, plain(answer)]
            bend(fields, self.choices, how - 4)
            if reply := frame_of(fields, self.choices, flip=how == 4):
                frames.append(reply)
                self._note(reply)
        return frames

    def _note(self, reply: bytes) -> None:
        try:
            _, request_id, message = messages.decode_reply(reply)
            self._answered.add(request_id)
            self._welcomes += isinstance(message, Welcome)
        except messages.BadRequestError as error:
            self._answered.add(error.request_id)
        except ProtocolError:
            self.outcomes["unreadable"] += 1

    def run(self, data: bytes) -> None:
        self.inputs += 1
        self.choices = Choices(data)
        self._answered.clear()
        self._welcomes = 0
        said: list[str] = []
        export = HostExport(((1 << 46, BUFFER_BYTES),))  # where nobody copies from: there is no server
        channel = Channel(
            "tcp://nowhere:1", lambda _: self._register(), lambda *s: said.append(s[1]), _Outside(self)
        )
        self.worker = Worker(channel, "e", 0, ModelTag("m", (), 1, 1), geometry(0), export)
        self.scheduler = Servers([channel], "e")
        self._asked: dict[int, tuple[Pending, int]] = {}
        for step in range(12):
            started_s = self.now_s
            channel._keep_once()
            channel.poll(self._step(step), 0.01)
            assert self.now_s - started_s < MAX_WAIT_S, "nobody hangs"
        assert len(channel._pending) <= len(self._asked) + 2
        self.now_s += 100.0
        channel.poll()
        for request_id, (each, welcomes) in self._asked.items():
            assert each.done, "every request ends by its deadline"
            if each.settled and request_id not in self._answered:
                assert self._welcomes > welcomes, "nothing says that the server is done with it"
        self.outcomes["ready" if channel.ready else "refused" if channel.refusal else "down"] += 1
        assert all(len(text) < 1 << 18 for text in said)
        channel.close(0.1)

    def _register(self) -> None:
        if self.worker.register().chunk_size != self.scheduler.join(self.worker.channel).chunk_size:
            raise ChannelError("another chunk size")

    def _step(self, step: int) -> Pending:
        if step % 3 == 0:
            stored = StoreObject(chain(1)[0], bytes(32), 0, 0, packed(range(1, 17)))
            return self._noted(lambda: self.worker.channel.submit(Store((stored,)), 5.0))
        asked = self._noted(lambda: self.scheduler.lookup(messages.Lookup("r", chain(1), 0, 512, 513), 1.0))
        if step % 3 == 1:
            return asked
        try:
            found = expect(self.scheduler.channel.wait(asked), Found)
        except ChannelError:
            self.scheduler.forget(asked)
            return asked
        self.outcomes["found"] += 1
        self._noted(lambda: self.scheduler.release((found.lease_id,)))
        return self._asked[max(self._asked)][0]  # the release, if it was sent

    def _noted(self, ask: Callable[[], Reply]) -> Reply:
        channel = self.worker.channel
        request_id = channel._next_id
        asked = ask()
        if channel._next_id > request_id:  # it was sent
            self._asked[request_id] = channel._pending[request_id], self._welcomes
        return asked
