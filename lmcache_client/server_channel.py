"""The client's end of the wire: a DEALER socket with request deadlines and automatic reconnection.

A keeper thread notices when the server comes or goes, greets it and runs the owner's `on_up`. The engine's
own thread submits requests and polls for replies. Nobody waits while holding the lock of the socket.

A request has two ends. It is *done* when its owner may stop waiting: a reply came, its deadline passed or
the connection broke. It is *settled* when its own server can no longer act on it: a reply came, that process
has ended, or that server has greeted this client again, which it does only after its earlier copies have
ended. A process that cannot be seen counts as ended once its address has had another server, or none, for
OVERDUE_S. Memory that a request names must not be reused before the request is settled.
"""

import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lmcache_client.contract import messages
from lmcache_client.contract.codec import MAX_MESSAGE_BYTES, ProtocolError, shown
from lmcache_client.contract.endpoint import EndpointError, check_runtime_directory
from lmcache_client.contract.messages import BadRequestError, Hello, Message, Ping, Refused, Welcome
from lmcache_client.contract.version import VERSION
from lmcache_client.transport import SYSTEM, Connection, ConnectionLostError, Process, System

KEEPER_INTERVAL_S = 0.2
GREET_TIMEOUT_S = 5.0
PING_AFTER_S, PING_TIMEOUT_S = 1.0, 2.0
RETRY_REFUSED_S, PROBE_INTERVAL_S = 5.0, 1.0
OVERDUE_S = 30.0
"""The server drops replies to a client that does not read them. If it still talks to us this long after a
request's deadline, that reply is lost. A server whose process cannot be seen must be gone for as long."""
MAX_PENDING, MAX_BURST = 1 << 14, 1 << 10
"""Requests in flight, and replies that one turn processes: a server that floods cannot stop the engine."""


class ChannelError(Exception):
    """There is no connection to the server, or it did not answer in time."""


class RefusedError(ChannelError):
    """The server refused the request; `code` is one of the codes of Refused."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(shown(refused.message))
        self.code = refused.code


class Pending:
    """A request in flight. Once it is done (see above) it has a `reply` or an `error`."""

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

    def advance(self) -> bool:
        """Goes on as far as replies have arrived; returns whether it is done."""
        return self.done

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


def unsent(reason: str) -> Pending:
    """A request that could not be sent: done, with an error, and settled."""
    pending = Pending(0.0)
    pending._fail(reason)
    pending.settled = True
    return pending


@dataclass
class Lost:
    """What was in flight when a session ended."""

    boot_id: bytes
    server: Process | None
    pending: list[Pending]
    gone_since_s: float = math.inf


class Channel:
    """A connection to the server at a ZeroMQ address.

    `on_up` runs in the keeper thread after each greeting and registers the owner; while it raises
    RefusedError the channel is not ready. Each change calls `on_state` with a level and a line for the log.
    The keeper calls `on_turn` several times a second.
    """

    def __init__(
        self,
        address: str,
        on_up: Callable[["Channel"], object],
        on_state: Callable[[int, str], None] = lambda _level, _text: None,
        system: System = SYSTEM,
        on_turn: Callable[["Channel"], None] = lambda _channel: None,
    ) -> None:
        self.system, self.address = system, address
        self._on_up, self._on_state, self._on_turn = on_up, on_state, on_turn
        self._client_id = system.random_bytes(messages.CLIENT_ID_BYTES)
        self._lock = system.lock()
        self._pending: dict[int, Pending] = {}
        self._lost: list[Lost] = []
        self._next_id, self._session_id, self._connected = 1, 0, False
        self._closed, self._attempted = system.event(), system.event()
        self._server: Process | None = None
        self._retry_s = self._probe_s = self._last_heard_s = 0.0
        self._ping: Pending | None = None
        self._is_readable = True
        """False after a reply that cannot be read, until the server accepts this client."""
        self.boot_id, self.server_pid, self.ready, self._said = b"", 0, False, ""
        self.generation = 0
        """Counts the registrations; anything the server said before the current one is void."""
        self.responsive = False
        """False after a request got no answer in time, until the server is heard again."""
        self.refusal: RefusedError | None = None
        """The reason why the server refuses this client, until it accepts it."""
        self._connection: Connection | None = None
        self._keeper: threading.Thread | None = None
        self._reconnect()

    def start(self, connect_s: float, register_s: float) -> None:
        """Starts the keeper; waits up to `connect_s` for a server, then up to `register_s` to register."""
        self._keeper = self.system.start_thread(self._keep, "lmcache-keeper")
        limit_s = self.system.now_s() + connect_s
        while self.system.now_s() < limit_s and not self._connected and not self._attempted.is_set():
            self.system.sleep(0.005)
        if self._connected:
            self._attempted.wait(register_s)

    def submit(
        self, message: Message, timeout_s: float, on_late: Callable[[Message], None] | None = None
    ) -> Pending:
        """Sends a request. Never blocks or raises for a lost connection; the Pending then has the error.

        A reply that comes after the Pending is done goes to `on_late`, in any thread.
        """
        pending = Pending(self.system.now_s() + timeout_s, on_late)
        with self._lock:
            if self._connection is None or not self._connected or len(self._pending) >= MAX_PENDING:
                return unsent("no connection to the lmcache server")
            request_id = self._next_id
            self._next_id += 1
            try:
                frame = messages.encode_request(request_id, message)
                if len(frame) > MAX_MESSAGE_BYTES:
                    raise ProtocolError(f"its {len(frame)} bytes exceed the limit of {MAX_MESSAGE_BYTES}")
                self._connection.send(frame)
            except (ConnectionLostError, ProtocolError) as error:
                return unsent(f"the request could not be sent: {error}")
            self._pending[request_id] = pending
        return pending

    def poll(self, pending: Pending | None = None, wait_s: float = 0.0) -> None:
        """Processes replies that have arrived; with `pending`, waits up to `wait_s` until it is done."""
        limit_s = self.system.now_s() + wait_s
        while True:
            with self._lock:
                self._receive()
                connection = self._connection if self._connected else None
            left_s = limit_s - self.system.now_s()
            if pending is None or pending.advance() or connection is None or left_s <= 0:
                return
            # Without the lock, so that other threads can submit requests meanwhile.
            connection.wait(left_s)

    def abandon(self, pending: Pending) -> None:
        """Stops waiting; a reply that still comes goes to `on_late`."""
        with self._lock:  # the keeper may be taking the reply in
            pending._fail("abandoned")

    def call(self, message: Message, timeout_s: float) -> Message:
        """Sends a request and waits for its reply. Raises ChannelError. Not for the engine's thread."""
        return self.wait(self.submit(message, timeout_s))

    def wait(self, pending: Pending) -> Message:
        """Waits for the reply to a request. Raises ChannelError. Not for the engine's thread."""
        while not (pending.advance() or self._closed.is_set()):
            self._attend()
            if not pending.advance():
                self.system.sleep(0.001)
        if pending.reply is None:
            raise pending.error or ChannelError("the channel was closed")
        return pending.reply

    def close(self, goodbye_s: float = 1.0) -> bool:
        """Ends the session. False if, after `goodbye_s`, the server may still have what was lent."""
        self._closed.set()
        if self._keeper is not None:  # first, or it greets the server anew when the server has said goodbye
            self._keeper.join(2 * KEEPER_INTERVAL_S + GREET_TIMEOUT_S)
        self.ready = False
        goodbye = self.submit(messages.Goodbye(), goodbye_s)
        while not goodbye.done:
            self._attend()
            self.system.sleep(0.001)
        with self._lock:
            self._break("the channel was closed")
            for server in (lost.server for lost in self._lost if lost.server is not None):
                server.close()
        return goodbye.reply is not None or not self._lost

    # -- with the lock held -----------------------------------------------------------------------

    def _receive(self) -> None:
        for _ in range(MAX_BURST):
            if self._connection is None or (frame := self._connection.receive()) is None:
                break
            self._take(frame)
        now_s = self.system.now_s()
        for pending in self._pending.values():
            if now_s >= pending.deadline_s and not pending.done:
                pending._fail("the lmcache server did not answer in time")
                self.responsive = False

    def _take(self, frame: bytes) -> None:
        try:
            boot_id, request_id, reply = messages.decode_reply(frame)
        except BadRequestError as error:
            if (pending := self._pending.pop(error.request_id, None)) is not None:
                pending._finish(Refused(error.code, str(error)))
            return
        except ProtocolError as error:
            # Nobody knows which request the reply was for. A new session settles all of them.
            reason = f"the lmcache server sent a reply that cannot be read ({error})"
            if self._is_readable and not self.ready:
                self._on_state(logging.WARNING, reason)
            self._is_readable = False
            self._break(reason)
            return
        self._last_heard_s = self.system.now_s()
        self.responsive = True
        restarted = self.boot_id and boot_id != self.boot_id and not isinstance(reply, Welcome)
        if not restarted and (pending := self._pending.pop(request_id, None)) is not None:
            pending._finish(reply)
        forgotten = isinstance(reply, Refused) and reply.code == messages.NOT_REGISTERED and self.ready
        if restarted or forgotten:
            self._break("the lmcache server has forgotten this engine")

    def _watch_connection(self) -> None:
        while self._connection and (is_up := self._connection.event()) is not None:
            if not is_up:
                if why := self._connection.refusal:
                    self._refused(RefusedError(Refused(messages.NO_ACCESS, why)))
                self._break("the connection to the lmcache server broke")
                return
            self._connected = True

    def _break(self, reason: str) -> None:
        """Ends the session: fails all pending requests and starts again on a new socket."""
        was_ready = self.ready
        self.ready = self._connected = self.responsive = False
        for pending in self._pending.values():
            pending._fail(reason)
        self._lost.append(Lost(self.boot_id, self._server, list(self._pending.values())))
        self._pending.clear()
        self.boot_id, self._server = b"", None
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        self._reconnect()
        self._settle()
        if was_ready:
            self._on_state(logging.WARNING, f"{reason}: requests are computed without it until it is back")

    def _reconnect(self) -> None:
        waits = self.refusal is not None and self.system.now_s() < self._retry_s
        if self._connection is None and not waits and not self._closed.is_set():
            try:
                self._connection = self.system.connect(self.address)
            except ConnectionLostError as error:  # without a descriptor, the keeper tries again
                if isinstance(error.__cause__, EndpointError):
                    self._refused(RefusedError(Refused(messages.NO_ACCESS, str(error))))

    def _settle(self) -> None:
        for lost in filter(self._is_over, self._lost.copy()):
            self._lost.remove(lost)
            for pending in lost.pending:
                pending.settled = True
            if lost.server is not None:
                lost.server.close()

    def _is_over(self, lost: Lost) -> bool:
        waited_s = self.system.now_s() - lost.gone_since_s
        is_gone = waited_s >= OVERDUE_S if lost.server is None else lost.server.ended()
        return is_gone or not lost.pending or bool(self.boot_id and lost.boot_id in (b"", self.boot_id))

    # -- keeper thread ----------------------------------------------------------------------------

    def _keep(self) -> None:
        while not self._closed.wait(KEEPER_INTERVAL_S if self._attempted.is_set() else 0.01):
            self._keep_once()

    def _keep_once(self) -> None:
        try:
            self._look_after()
            self._on_turn(self)
        except Exception as error:  # without its keeper, an engine would never find the server again
            self._on_state(logging.WARNING, f"the connection to the lmcache server cannot be kept: {error}")
            self._closed.wait(RETRY_REFUSED_S)

    def _watch_lost(self) -> None:
        if (watched := [*self._lost]) and self.system.now_s() >= self._probe_s:
            # Without the lock: to resolve a host's name may take long.
            is_gone = bool(self.boot_id) or self.system.nobody_listens(self.address)
            self._probe_s = (now_s := self.system.now_s()) + PROBE_INTERVAL_S
            for lost in watched:
                lost.gone_since_s = min(lost.gone_since_s, now_s) if is_gone else math.inf

    def _look_after(self) -> None:
        self._attend()
        self._watch_lost()
        with self._lock:
            self._reconnect()
            self._settle()
            if any(self._last_heard_s - late.deadline_s > OVERDUE_S for late in self._pending.values()):
                # Without a reply, their memory would be held forever. A new session settles these requests.
                self._break("the lmcache server did not answer every request")
        if self._connected and not self.ready and self.system.now_s() >= self._retry_s:
            self._greet()
        elif self.ready:
            is_silent = self.system.now_s() - self._last_heard_s > PING_AFTER_S
            if is_silent and (self._ping is None or self._ping.done):
                # It names the session: a server that has dropped it says so, and this client greets it again.
                self._ping = self.submit(Ping(self._session_id), PING_TIMEOUT_S)

    def _attend(self) -> None:
        """Processes replies and the state of the connection."""
        with self._lock:
            self._receive()
            self._watch_connection()

    def _greet(self) -> None:
        try:
            if self.address.startswith("ipc://"):
                check_runtime_directory(Path(self.address.removeprefix("ipc://")).parent)
            if not self.boot_id:
                self._hello()
            self._on_up(self)
        except RefusedError as error:
            self._refused(error)
            if error.code == messages.NOT_REGISTERED:
                with self._lock:
                    self._break("the lmcache server has ended the session")
        except ChannelError:
            self._retry_s = self.system.now_s() + KEEPER_INTERVAL_S
        except Exception as error:  # a fault in one attempt must not end the keeper
            if (reason := f"cannot use the lmcache server: {error or type(error).__name__}") != self._said:
                self._on_state(logging.WARNING, reason)
            self._said, self._retry_s = reason, self.system.now_s() + RETRY_REFUSED_S
        else:
            self.refusal, self._said = None, ""
            self._is_readable = True
            self.generation += 1
            self.ready = True
            self._on_state(logging.INFO, f"connected to the lmcache server at {self.address}")
        self._attempted.set()

    def _refused(self, error: RefusedError) -> None:
        if str(self.refusal) != str(error):
            passes = error.code in (messages.NOT_REGISTERED, messages.OVERLOADED)
            level = logging.WARNING if passes else logging.ERROR
            self._on_state(level, f"the lmcache server refused this engine: {error}")
        self.refusal = error
        self._retry_s = self.system.now_s() + RETRY_REFUSED_S
        self._attempted.set()

    def _hello(self) -> None:
        welcome = self.call(Hello(self.system.pid(), self._client_id, VERSION), GREET_TIMEOUT_S)
        if not isinstance(welcome, Welcome):
            raise ChannelError(f"the server answered Hello with {type(welcome).__name__}")
        with self._lock:
            # In this pid namespace, the server's number may belong to another process: the kernel must agree.
            peer_pid = self._connection.peer_pid() if self._connection is not None else None
            self._server = self.system.open_process(peer_pid) if peer_pid == welcome.server_pid else None
            self._session_id = welcome.session_id
            self.server_pid = peer_pid or welcome.server_pid  # believed where the kernel knows no peer
            self.boot_id = welcome.boot_id
            self._settle()
