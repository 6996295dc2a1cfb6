"""The client's end of the wire: one DEALER socket, requests with deadlines, reconnection by itself.

A keeper thread notices a server that went away or came (back), greets it and runs the owner's `on_up`
(registration). The engine's own thread submits requests and polls for replies; both take turns on the
socket under a lock that is never held longer than one poll.

A request has two ends. It is *done* when its owner may stop waiting: a reply came, its deadline passed or
the connection broke. It is *settled* when the server can no longer act on it: a reply came, or the server
is gone, or it has greeted this client anew, which it does only after the copies of the session before have
ended. Memory that a request names must not be reused before it is settled.
"""

import contextlib
import math
import threading
from collections.abc import Callable
from pathlib import Path

from lmcache_client.contract import messages
from lmcache_client.contract.codec import MAX_MESSAGE_BYTES, ProtocolError
from lmcache_client.contract.endpoint import check_runtime_directory
from lmcache_client.contract.messages import Hello, Message, Ping, Refused, Welcome
from lmcache_client.contract.version import VERSION
from lmcache_client.transport import SYSTEM, Connection, ConnectionLostError, Process, System

KEEPER_INTERVAL_S = 0.2
GREET_TIMEOUT_S = 5.0
PING_AFTER_S = 1.0
PING_TIMEOUT_S = 2.0
RETRY_REFUSED_S = 5.0
PROBE_INTERVAL_S = 1.0
OVERDUE_S = 30.0
"""A server that is heard so long after a deadline will not answer that request any more: it drops replies
for a client that does not read them."""
MAX_PENDING = 1 << 14


class ChannelError(Exception):
    """The server cannot be asked now: no connection, or no answer in time."""


class RefusedError(ChannelError):
    """The server answered with a reason; `code` is one of the constants of the protocol."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.message)
        self.code = refused.code


class Pending:
    """A request in flight; `reply` or `error` once it is done. See the module for done and settled."""

    __slots__ = ("_on_late", "deadline_s", "error", "reply", "settled")

    def __init__(self, deadline_s: float, on_late: Callable[[Message], None] | None = None) -> None:
        self.deadline_s = deadline_s
        self._on_late = on_late
        self.reply: Message | None = None
        self.error: ChannelError | None = None
        self.settled = False

    @property
    def done(self) -> bool:
        return self.reply is not None or self.error is not None

    def abandon(self) -> None:
        """Nobody waits any more; a reply that still comes goes to `on_late`."""
        self._fail("abandoned")

    def _finish(self, reply: Message) -> None:
        self.settled = True
        if self.done:
            if self._on_late is not None:
                self._on_late(reply)
            return
        if isinstance(reply, Refused):
            self.error = RefusedError(reply)
        else:
            self.reply = reply

    def _fail(self, reason: str) -> None:
        if not self.done:
            self.error = ChannelError(reason)


class Channel:
    """A connection to the server at a ZeroMQ address.

    `on_up` runs in the keeper thread after each greeting and registers the owner; while it raises
    RefusedError the channel is not ready. `on_state` is told of each change in one sentence to log.
    """

    def __init__(
        self,
        address: str,
        on_up: Callable[["Channel"], object],
        on_state: Callable[[bool, str], None] = lambda _ready, _sentence: None,
        system: System = SYSTEM,
    ) -> None:
        self.system = system
        self._address = address
        self._on_up = on_up
        self._on_state = on_state
        self._client_id = system.random_bytes(messages.CLIENT_ID_BYTES)
        self._lock = system.lock()
        self._pending: dict[int, Pending] = {}
        self._unsettled: list[Pending] = []
        self._next_id = 1
        self._connected = False
        self._retry_s = 0.0
        self._closed = system.event()
        self._attempted = system.event()
        self._server: Process | None = None
        self._probe_s = 0.0
        self._refused_since_s = math.inf
        self._last_heard_s = 0.0
        self._ping: Pending | None = None
        self.boot_id = b""
        self.server_pid = 0
        self.ready = False
        self.generation = 0
        """Counts the registrations: what the server said before the current one is void."""
        self.responsive = False
        """False from a request that got no answer in time until the server is heard again."""
        self.refusal: RefusedError | None = None
        """Why the server refused this client, until it accepts it."""
        self._connection: Connection | None = system.connect(address)
        self._keeper: threading.Thread | None = None

    def start(self, connect_s: float, register_s: float) -> None:
        """Start the keeper; wait up to `connect_s` for a server, then `register_s` for its answer."""
        self._keeper = self.system.start_thread(self._keep, "lmcache-keeper")
        limit_s = self.system.now_s() + connect_s
        while self.system.now_s() < limit_s and not self._connected and not self._attempted.is_set():
            self.system.sleep(0.005)
        if self._connected:
            self._attempted.wait(register_s)

    def submit(
        self, message: Message, timeout_s: float, on_late: Callable[[Message], None] | None = None
    ) -> Pending:
        """Send a request; never blocks and never raises for the connection: the Pending tells.

        `on_late` is given a reply that comes when nobody waits for it any more (in any thread).
        """
        pending = Pending(self.system.now_s() + timeout_s, on_late)
        with self._lock:
            if self._connection is None or not self._connected or len(self._pending) >= MAX_PENDING:
                pending._fail("no connection to the lmcache server")
                pending.settled = True
                return pending
            request_id = self._next_id
            self._next_id += 1
            try:
                frame = messages.encode_request(request_id, message)
                if len(frame) > MAX_MESSAGE_BYTES:
                    raise ProtocolError(f"a message of {len(frame)} bytes is too large")
                self._connection.send(frame)
            except (ConnectionLostError, ProtocolError) as error:
                pending._fail(f"the request could not be sent: {error}")
                pending.settled = True
                return pending
            self._pending[request_id] = pending
        return pending

    def poll(self, pending: Pending | None = None, wait_s: float = 0.0) -> None:
        """Take in what has arrived; with `pending`, wait up to `wait_s` for that one to be done."""
        limit_s = self.system.now_s() + wait_s
        with self._lock:
            self._receive()
            while pending is not None and not pending.done and self._connection and self._connected:
                left_s = limit_s - self.system.now_s()
                if left_s <= 0:
                    break
                self._connection.wait(left_s)
                self._receive()

    def call(self, message: Message, timeout_s: float) -> Message:
        """Send a request and wait for its reply; raises ChannelError. Not for the engine's thread."""
        return self.wait(self.submit(message, timeout_s))

    def wait(self, pending: Pending) -> Message:
        """The reply to a request, when it is here; raises ChannelError. Not for the engine's thread."""
        while not pending.done and not self._closed.is_set():
            self._attend()
            if not pending.done:
                self.system.sleep(0.001)
        if pending.error is not None:
            raise pending.error
        if pending.reply is None:
            raise ChannelError("the channel was closed")
        return pending.reply

    def close(self, goodbye_s: float = 1.0) -> None:
        """End the session in order; waits up to `goodbye_s` for the server's answer."""
        if self._connected:
            with contextlib.suppress(ChannelError):
                self.call(messages.Goodbye(), goodbye_s)
        self._closed.set()
        if self._keeper is not None:
            self._keeper.join(2 * KEEPER_INTERVAL_S + GREET_TIMEOUT_S)
        with self._lock:
            self.ready = False
            self._break("the channel was closed")

    # -- the rest runs with the lock held, except the keeper's loop -------------------------------

    def _receive(self) -> None:
        while self._connection and (frame := self._connection.receive()) is not None:
            self._take(frame)
        now_s = self.system.now_s()
        for request_id in [i for i, pending in self._pending.items() if now_s >= pending.deadline_s]:
            late = self._pending[request_id]
            if not late.done:
                late._fail("the lmcache server did not answer in time")
                self.responsive = False

    def _take(self, frame: bytes) -> None:
        try:
            boot_id, request_id, reply = messages.decode_reply(frame)
        except ProtocolError as error:
            self._on_state(False, f"not an answer of an lmcache server: {error}")
            return
        self._last_heard_s = self.system.now_s()
        self.responsive = True
        pending = self._pending.pop(request_id, None)
        if pending is not None:
            pending._finish(reply)
        forgotten = isinstance(reply, Refused) and reply.code == messages.NOT_REGISTERED and self.ready
        if forgotten or (self.boot_id and boot_id != self.boot_id and not isinstance(reply, Welcome)):
            self._break("the lmcache server has forgotten this engine")

    def _watch_connection(self) -> None:
        while self._connection and (is_up := self._connection.event()) is not None:
            if not is_up:
                self._break("the connection to the lmcache server broke")
                return
            self._connected = True

    def _break(self, reason: str) -> None:
        """The session is over: fail what waits, start afresh on a new socket."""
        was_ready = self.ready
        self.ready = self._connected = self.responsive = False
        self.boot_id = b""
        for pending in self._pending.values():
            pending._fail(reason)
            self._unsettled.append(pending)
        self._pending.clear()
        self._ping = None
        if self._connection is not None:
            self._connection.close()
        self._connection = None if self._closed.is_set() else self.system.connect(self._address)
        if self._server is not None and self._server.ended():
            self._settle()
        if was_ready:
            self._on_state(False, f"{reason}: requests are computed without it until it is back")

    def _settle_if_dead(self) -> None:
        """A process that has ended copies nothing any more. Where this process has no descriptor of it, the
        kernel must have refused connections for a while: a socket closes when the last thread has ended or,
        if the server ends in order, a moment before."""
        if not self._unsettled or self._server is not None:
            self._refused_since_s = math.inf
            if self._unsettled and self._server is not None and self._server.ended():
                self._settle()
            return
        now_s = self.system.now_s()
        if now_s < self._probe_s:
            return
        self._probe_s = now_s + PROBE_INTERVAL_S
        if not self.system.nobody_listens(self._address):
            self._refused_since_s = math.inf
            return
        self._refused_since_s = min(self._refused_since_s, now_s)
        if now_s - self._refused_since_s >= OVERDUE_S:
            self._settle()

    def _settle(self) -> None:
        for pending in self._unsettled:
            pending.settled = True
        self._unsettled.clear()

    # -- keeper thread ----------------------------------------------------------------------------

    def _keep(self) -> None:
        while not self._closed.wait(KEEPER_INTERVAL_S if self._attempted.is_set() else 0.01):
            self._attend()
            with self._lock:
                self._settle_if_dead()
                if any(self._last_heard_s - each.deadline_s > OVERDUE_S for each in self._pending.values()):
                    # What it named would stay held for ever; a new session settles it.
                    self._break("the lmcache server did not answer everything")
            if self._connected and not self.ready and self.system.now_s() >= self._retry_s:
                self._greet()
            elif self.ready:
                self._keep_alive()

    def _attend(self) -> None:
        """Take in replies and what became of the connection, which the engine's thread has no time for."""
        with self._lock:
            self._receive()
            self._watch_connection()

    def _greet(self) -> None:
        try:
            if self._address.startswith("ipc://"):
                check_runtime_directory(Path(self._address.removeprefix("ipc://")).parent)
            if not self.boot_id:
                self._hello()
            self._on_up(self)
        except RefusedError as error:
            if self.refusal is None or str(self.refusal) != str(error):
                self._on_state(False, f"the lmcache server refused this engine: {error}")
            self.refusal = error
            self._retry_s = self.system.now_s() + RETRY_REFUSED_S
        except ChannelError:
            self._retry_s = self.system.now_s() + KEEPER_INTERVAL_S
        except Exception as error:  # a fault in one attempt must not end the keeper
            self._on_state(False, f"cannot use the lmcache server: {error or type(error).__name__}")
            self._retry_s = self.system.now_s() + RETRY_REFUSED_S
        else:
            self.refusal = None
            self.generation += 1
            self.ready = True
            self._on_state(True, f"connected to the lmcache server at {self._address}")
        self._attempted.set()

    def _hello(self) -> None:
        pending = self.submit(Hello(self.system.pid(), self._client_id, VERSION), GREET_TIMEOUT_S)
        while not pending.done and not self._closed.is_set():
            self.system.sleep(0.001)
            self._attend()
        if pending.error is not None:
            raise pending.error
        welcome = pending.reply
        if not isinstance(welcome, Welcome):
            raise ChannelError("the server did not answer a greeting with a greeting")
        with self._lock:
            if self._server is not None:
                self._server.close()
            # A number that the server gives may mean another process here.
            peer_pid = self._connection.peer_pid() if self._connection is not None else None
            pid = welcome.server_pid if peer_pid is None else peer_pid
            self._server = self.system.open_process(pid) if pid else None
            self.server_pid = welcome.server_pid
            self.boot_id = welcome.boot_id
            self._settle()

    def _keep_alive(self) -> None:
        now_s = self.system.now_s()
        if self._ping is not None and self._ping.done:
            self._ping = None
        if self._ping is None and now_s - self._last_heard_s > PING_AFTER_S:
            self._ping = self.submit(Ping(), PING_TIMEOUT_S)
