"""Passes every message to the handler that answers it. Runs on the event loop, which owns all state.

Every request gets exactly one reply: at once or, if its handler is a coroutine, when that returns. The server
does not trust a client: it checks block ids, positions and memory against what the client has registered and
proved.
"""

import contextlib
import json
import logging
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from lmcache_client.contract import control, messages
from lmcache_client.contract.codec import ProtocolError
from lmcache_client.contract.control import Follow, Inspect
from lmcache_client.contract.messages import Message, Refused
from lmcache_server.service.copies import Copies
from lmcache_server.service.engines import Session
from lmcache_server.service.lookups import Lookups
from lmcache_server.service.option import Base, Handler, Reply
from lmcache_server.service.refusals import Refusal, log_request

logger = logging.getLogger(__name__)

STATUS_PIECE_CHARS = 16_384
WARN_AGAIN_S = 60.0
SALT_UNKNOWN = "records in tiers do not say which salt they had: clear their namespace"
MAX_WARNED = 64
"""At most so many refused registrations are logged as warnings in WARN_AGAIN_S."""

Send = Callable[[bytes, bytes], None]


class Request(NamedTuple):
    """A decoded request from the client that ROUTER calls `identity`; its frame had `num_bytes` bytes."""

    identity: bytes
    request_id: int
    message: Message
    num_bytes: int

    @property
    def operation(self) -> str:
        return _OPERATIONS.get(type(self.message), "other")


class Router:
    """The dispatcher. `send(identity, frame)` must not block; `status()` gives the answer to Status."""

    def __init__(self, base: Base, send: Send, status: Callable[[bool], dict[str, Any]]) -> None:
        copies, sessions, lookups = Copies(base), base.sessions, Lookups(base)
        self.sessions, self.lookups, self.options = sessions, lookups, base.options
        self._cache, self._system = base.cache, base.system
        self._metrics, self._failures = base.metrics, base.failures
        self._send, self._status = send, status
        self.disconnected = sessions.disconnected
        self._logged_other_version = False
        self._warned_s: dict[tuple[str, str], float] = {}
        """When a refused registration was last logged as a warning, by engine and code."""
        self._for_anyone: dict[type[Any], Callable[[bytes, Any], Reply]] = {
            messages.Hello: sessions.hello,
            messages.Ping: self._ping,
            control.Status: lambda _identity, message: self._report(message),
        }
        self._for_sessions: dict[type[Any], Handler] = {
            messages.Register: lambda session, message, _bytes: sessions.register(session, message),
            messages.Prove: lambda session, _message, _bytes: sessions.prove(session),
            messages.Join: lambda session, message, _bytes: sessions.join(session, message),
            messages.NotCached: lambda session, message, _bytes: sessions.not_cached(session, message),
            messages.Goodbye: lambda session, _message, _bytes: sessions.goodbye(session),
            messages.Clear: lambda session, message, _bytes: self._clear(session, message),
            Inspect: lambda _session, message, _bytes: lookups.inspect(message),
            messages.Lookup: lookups.lookup,
            messages.Accept: lambda session, message, _bytes: lookups.accept(session, message),
            messages.Release: lambda session, message, _bytes: lookups.release(session, message),
            messages.Store: copies.store,
            messages.Load: copies.load,
        }
        for option in self.options:
            self._for_sessions |= option.handlers()

    def receive(self, identity: bytes, frame: bytes) -> None:
        """Handles one request from the client that ROUTER calls `identity`."""
        request = self._decoded(identity, frame)
        if request is None:
            return
        try:
            reply = self._handle(request)
        except Exception as error:
            self._answer(request, self._failure(request, error))
        else:
            if isinstance(reply, Coroutine):
                self._system.spawn(self._answer_later(request, reply))
            else:
                self._answer(request, reply)

    async def _answer_later(self, request: Request, reply: Coroutine[Any, Any, Message]) -> None:
        try:
            message = await reply
        except Exception as error:
            message = self._failure(request, error)
        self._answer(request, message)

    def turn_away(self, identity: bytes, frame: memoryview) -> None:
        """Refuses a request without decoding it, because too many of its process wait."""
        session = self.sessions.by_identity.get(identity)
        process = f"process {session.pid}" if session is not None else "this process"
        reason = f"too many requests of {process} are already waiting"
        self._count("other", "refused")
        self._failures.add(self._system.now_s(), "request turned away", "", reason)
        with contextlib.suppress(ProtocolError):
            self._reply(identity, messages.request_id(frame), Refused(messages.OVERLOADED, reason))

    def tick(self) -> None:
        """Ends the leases and sessions whose time is over; called once a second."""
        self._cache.expire(self._system.now_s())
        self.sessions.tick()
        for option in self.options:
            option.tick(self._system.now_s())

    # -- one request ------------------------------------------------------------------------------

    def _decoded(self, identity: bytes, frame: bytes) -> Request | None:
        """The request in a frame, or None for a bad frame, which is answered or dropped here."""
        try:
            request_id, message = messages.decode_request(frame)
        except messages.BadRequestError as error:
            self._count("other", "refused")
            # A client of another version tries again every few seconds.
            first = error.code == messages.WRONG_VERSION and not self._logged_other_version
            self._logged_other_version |= first
            level = logging.WARNING if first else logging.DEBUG
            logger.log(level, "refused a message: %(reason)s", {"reason": str(error), "code": error.code})
            self._reply(identity, error.request_id, Refused(error.code, str(error)))
            return None
        except ProtocolError as error:
            self._count("other", "refused")
            values = {"bytes": len(frame), "reason": str(error)}
            logger.debug("dropped a frame of %(bytes)d bytes: %(reason)s", values)
            return None
        return Request(identity, request_id, message, len(frame))

    def _handle(self, request: Request) -> Reply:
        session = self.sessions.by_identity.get(request.identity)
        if session is not None:
            session.heard_s = self._system.now_s()
        kind = type(request.message)
        if kind in self._for_anyone:
            return self._for_anyone[kind](request.identity, request.message)
        if session is None:
            raise Refusal(messages.NOT_REGISTERED, "greet the server first")
        if kind not in self._for_sessions:
            raise Refusal(messages.BAD_REQUEST, f"a client must not send {kind.__name__}")
        return self._for_sessions[kind](session, request.message, request.num_bytes)

    def _failure(self, request: Request, error: Exception) -> Refused:
        """The reply to a request whose handler raised `error`. Logs the error; remembers it if it matters."""
        session = self.sessions.by_identity.get(request.identity)
        operation = request.operation
        if isinstance(error, Refusal):
            # After a restart of the server, a client registers again by itself.
            if operation in _REMEMBERED and error.code != messages.NOT_REGISTERED:
                self._remember(f"{operation} refused", request, str(error))
            # A refused engine is worth a warning; a refused request costs only time.
            news = session is not None and operation == "register" and self._is_news(request, session, error)
            client = "session %(session)d (pid %(pid)d, model %(model)r): " if session is not None else ""
            text = client + "refused %(operation)s: %(reason)s"
            values = {"operation": operation, "code": error.code, "reason": str(error)}
            log_request(logging.WARNING if news else logging.DEBUG, text, session, request.message, values)
            return Refused(error.code, str(error))
        # A bug must cost one request, not the server. What the handler changed before the error is
        # consistent.
        text, values = "request %(operation)s failed", {"operation": operation}
        log_request(logging.ERROR, text, session, request.message, values)
        self._remember(f"{operation} failed", request, "the server failed on a request; its log says why")
        return Refused(messages.INTERNAL, "the server failed on this request; its log says why")

    def _is_news(self, request: Request, session: Session, error: Refusal) -> bool:
        """Whether a refused registration is worth a warning. A refused engine tries again every few seconds,
        so one is logged at most once a minute."""
        engine_id = getattr(request.message, "engine_id", session.client_id.hex())  # Prove has none
        now_s, name = self._system.now_s(), (engine_id, error.code)
        recent = {each: at_s for each, at_s in self._warned_s.items() if now_s - at_s < WARN_AGAIN_S}
        self._warned_s = {name: now_s, **recent} if len(recent) < MAX_WARNED else recent
        return name not in recent and name in self._warned_s

    def _answer(self, request: Request, reply: Message) -> None:
        code = reply.code if isinstance(reply, Refused) else ""
        failed = code in (messages.INTERNAL, messages.COPY_FAILED)
        self._count(request.operation, "failed" if failed else "refused" if code else "ok")
        self._reply(request.identity, request.request_id, reply)

    def _reply(self, identity: bytes, request_id: int, message: Message) -> None:
        self._send(identity, messages.encode_reply(self.sessions.boot_id, request_id, message))

    def _count(self, operation: str, outcome: str) -> None:
        self._metrics.count("lmcache_requests_total", 1, op=operation, outcome=outcome)

    def _remember(self, what: str, request: Request, reason: str) -> None:
        session = self.sessions.by_identity.get(request.identity)
        registering = request.message.engine_id if isinstance(request.message, messages.Register) else ""
        engine_id = registering or (session.engine_id if session is not None else "")
        self._failures.add(self._system.now_s(), what, engine_id, reason)

    # -- messages about the server itself ---------------------------------------------------------

    def _ping(self, identity: bytes, message: messages.Ping) -> messages.Done:
        session = self.sessions.by_identity.get(identity)
        if message.session_id and (session is None or session.session_id != message.session_id):
            raise Refusal(messages.NOT_REGISTERED, "this session has ended: greet the server again")
        return messages.Done()

    def _report(self, message: control.Status) -> control.StatusReport:
        text = json.dumps(self._status(message.explain))
        step = STATUS_PIECE_CHARS
        return control.StatusReport(tuple(text[i : i + step] for i in range(0, len(text), step)))

    def _clear(self, session: Session, message: messages.Clear) -> Reply:
        """Forgets chunks, and waits until options have, if it is told to."""
        if message.tiers and message.tenant_digits:
            raise Refusal(messages.BAD_REQUEST, SALT_UNKNOWN)
        namespaces: list[bytes | None] = [None]
        if not message.everything:
            namespaces = [self.sessions.joined_layout(session).namespace]
        elif message.model or message.namespace:
            namespaces = [*self.sessions.named(message.model, message.namespace)]
        chunks = sum(self._cache.clear(namespace, message.tenant_digits) for namespace in namespaces)
        level = logging.INFO if chunks else logging.DEBUG
        asked = "cleared: %(chunks)d chunks forgotten, as session %(session)d (pid %(pid)d) asked"
        log_request(level, asked, session, message, {"chunks": chunks})
        # After a reset, an engine uses new keys: no record that is left can serve it.
        if not message.everything:
            return messages.Cleared(chunks)
        tiers = tuple(place for option in self.options for place in option.places())
        if not (message.tiers and tiers):
            return messages.Cleared(chunks, tiers)
        return self._cleared(namespaces, chunks, tiers)

    async def _cleared(self, namespaces: list[bytes | None], chunks: int, tiers: tuple[str, ...]) -> Message:
        failed = [reason for option in self.options for reason in await option.clear(namespaces)]
        # Meanwhile a fetch may have brought some of it back.
        chunks += sum(map(self._cache.clear, namespaces))
        return messages.Cleared(chunks, tiers, tuple(failed))


_REMEMBERED = ("register", "load", "store")
"""If one of these is refused, something is not cached or not loaded."""
_OPERATIONS: dict[type[Any], str] = {
    messages.Hello: "hello", messages.Register: "register", messages.Prove: "register",
    messages.Join: "join", messages.NotCached: "not_cached", messages.Lookup: "lookup",
    messages.Accept: "accept", messages.Release: "release", messages.Load: "load",
    messages.Store: "store", messages.Clear: "clear",
    messages.Pin: "pin", messages.Unpin: "unpin", control.Retain: "retain",
    Inspect: "inspect", Follow: "follow",
    control.Status: "status", messages.Ping: "ping", messages.Goodbye: "goodbye",
}  # fmt: skip
