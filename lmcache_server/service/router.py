"""What each message does. Runs on the event loop, which owns all state; copies run elsewhere.

Every request gets exactly one reply: at once, or when its copy has ended. Nothing that a client says is
believed: block ids, positions and memory are checked against what the client registered and proved.
"""

import dataclasses
import json
import logging
from collections.abc import Callable
from typing import Any

from lmcache_client.contract import messages
from lmcache_client.contract.codec import ProtocolError
from lmcache_client.contract.messages import (
    BadRequestError,
    Clear,
    Cleared,
    Done,
    EndRequest,
    Found,
    Goodbye,
    Hello,
    Join,
    Lookup,
    Message,
    NotCached,
    Ping,
    Prove,
    Refused,
    Register,
    Retrieve,
    Status,
    StatusReport,
    Store,
)
from lmcache_server.config import Config
from lmcache_server.core.cache import Cache
from lmcache_server.service.copies import Copies
from lmcache_server.service.registry import Refusal, Registry
from lmcache_server.service.sessions import Session, Shard
from lmcache_server.telemetry.metrics import Metrics
from lmcache_server.telemetry.partial import PartialChunks

logger = logging.getLogger(__name__)

STATUS_PIECE_CHARS = 16_384

Send = Callable[[bytes, bytes], None]


class Router:
    """See the module. `send(identity, frame)` must not block; `status()` is what Status is answered with."""

    def __init__(
        self,
        config: Config,
        cache: Cache,
        copies: Copies,
        registry: Registry,
        metrics: Metrics,
        send: Send,
        clock: Callable[[], float],
        status: Callable[[], dict[str, Any]],
    ) -> None:
        self.config = config
        self.cache = cache
        self.copies = copies
        self.metrics = metrics
        self.clock = clock
        self.registry = registry
        self._status = status
        self._partial = PartialChunks()
        self._send = send
        self._told_of_versions = False
        self._handlers: dict[type[Any], Callable[[Session, Any], Message]] = {
            Register: self.registry.register,
            Join: self.registry.join,
            NotCached: self.registry.not_cached,
            Lookup: self._lookup,
            EndRequest: self._end_request,
            Goodbye: self.registry.goodbye,
        }
        self._copiers: dict[type[Any], Callable[[Session, Any, int, int], None]] = {
            Retrieve: self._retrieve,
            Store: self._store,
            Prove: self._prove,
        }

    # -- in and out -------------------------------------------------------------------------------

    def receive(self, identity: bytes, frame: bytes) -> None:
        """Handle one request of the client that ROUTER calls `identity`."""
        try:
            request_id, message = messages.decode_request(frame)
        except BadRequestError as error:
            self._count("other", "refused")
            # Who speaks another version comes again every few seconds.
            first = error.code == messages.WRONG_VERSION and not self._told_of_versions
            self._told_of_versions |= first
            logger.log(
                logging.WARNING if first else logging.DEBUG,
                "refused a message: %(reason)s",
                {"reason": str(error), "code": error.code},
            )
            self.reply(identity, error.request_id, Refused(error.code, str(error)))
            return
        except ProtocolError as error:
            self._count("other", "refused")
            logger.debug(
                "dropped a frame of %(bytes)d bytes: %(reason)s", {"bytes": len(frame), "reason": str(error)}
            )
            return
        engine_id = message.engine_id if isinstance(message, Register) else ""
        self._respond(
            identity,
            request_id,
            message,
            lambda: self._handle(identity, message, request_id, len(frame)),
            engine_id,
        )

    def _respond(
        self,
        identity: bytes,
        request_id: int,
        message: Message,
        handle: Callable[[], Message | None],
        engine_id: str,
    ) -> None:
        """Reply what `handle` returns, or why it does not; nothing when it returns None. `engine_id` is that
        of a registration, "" for the one that the session of `identity` has."""
        operation = _OPERATIONS.get(type(message), "other")
        try:
            reply = handle()
        except Refusal as refusal:
            self._count(operation, "refused")
            # A client that the server of today does not know yet asks again by itself.
            if operation in _TOLD and refusal.code != messages.NOT_REGISTERED:
                self._failed(f"{operation} refused", engine_id or self._engine_of(identity), str(refusal))
            reply = Refused(refusal.code, str(refusal))
            # An engine that is not served is an event; a request that is not costs only time.
            session = self.registry.sessions.get(identity)
            matters = operation == "register" and session is not None
            who = "session %(session)d (pid %(pid)d, model %(model)r): " if session is not None else ""
            told = {"operation": operation, "code": refusal.code, "reason": str(refusal)}
            level = logging.WARNING if matters else logging.DEBUG
            _log(level, who + "refused %(operation)s: %(reason)s", session, message, told)
        except Exception:
            # A fault here must cost one request, not the server; state changes before it are complete.
            sentence, session = "request %(operation)s failed", self.registry.sessions.get(identity)
            _log(logging.ERROR, sentence, session, message, {"operation": operation}, trace=True)
            self._count(operation, "failed")
            sentence = "the server failed on a request; its log says why"
            self._failed(f"{operation} failed", engine_id or self._engine_of(identity), sentence)
            reply = Refused(messages.INTERNAL, "the server failed on this request; its log says why")
        else:
            if reply is not None:
                self._count(operation, "ok")
        if reply is not None:
            self.reply(identity, request_id, reply)

    def knows(self, identity: bytes) -> bool:
        """Whether the client that ROUTER calls `identity` has a session."""
        return identity in self.registry.sessions

    def disconnected(self, identity: bytes) -> None:
        """The connection of this client has ended, and the client with it."""
        session = self.registry.sessions.get(identity)
        if session is not None:
            self.registry.drop(session, "its connection ended")

    def reply(self, identity: bytes, request_id: int, message: Message) -> None:
        self._send(identity, messages.encode_reply(self.registry.boot_id, request_id, message))

    def _count(self, operation: str, outcome: str) -> None:
        self.metrics.count("lmcache_requests_total", 1, op=operation, outcome=outcome)

    def _engine_of(self, identity: bytes) -> str:
        session = self.registry.sessions.get(identity)
        return session.engine_id if session is not None else ""

    def _failed(self, what: str, engine_id: str, sentence: str) -> None:
        self.copies.failures.add(self.clock(), what, engine_id, sentence)

    def selftest_ended(self, error: str) -> None:
        """A self-test has ended: well, or with this sentence."""
        self.metrics.count("lmcache_selftests_total", 1, outcome="failed" if error else "ok")
        if error:
            self._failed("self-test failed", "", error)

    def _handle(self, identity: bytes, message: Message, request_id: int, frame_bytes: int) -> Message | None:
        session = self.registry.sessions.get(identity)
        if session is not None:
            session.heard_s = self.clock()
        if isinstance(message, Hello):
            return self.registry.hello(identity, message)
        if isinstance(message, Ping):
            return Done()
        if isinstance(message, Status):
            text = json.dumps(self._status())
            step = STATUS_PIECE_CHARS
            return StatusReport(tuple(text[i : i + step] for i in range(0, len(text), step)))
        if isinstance(message, Clear):
            chunks = self.cache.clear()
            level = logging.INFO if chunks else logging.DEBUG
            logger.log(level, "cleared: %(chunks)d chunks forgotten", {"chunks": chunks})
            return Cleared(chunks)
        if session is None:
            raise Refusal(messages.NOT_REGISTERED, "greet the server first")
        if type(message) in self._handlers:
            return self._handlers[type(message)](session, message)
        if type(message) in self._copiers:
            self._copiers[type(message)](session, message, request_id, frame_bytes)
            return None
        raise Refusal(messages.BAD_REQUEST, f"a client does not send {type(message).__name__}")

    def tick(self) -> None:
        """Once a second: what time ends."""
        self.cache.expire(self.clock())
        self.registry.tick()

    def _prove(self, session: Session, message: Prove, request_id: int, _frame_bytes: int) -> None:
        engine_id = session.engine_id
        self.registry.prove(
            session, lambda finish: self._respond(session.identity, request_id, message, finish, engine_id)
        )

    # -- the cache --------------------------------------------------------------------------------

    def _lookup(self, session: Session, message: Lookup) -> Message:
        started_s = self.clock()
        layout = self.registry.joined_layout(session, message.engine_id)
        computed, limit = message.computed_tokens, message.limit_tokens
        if not computed <= limit < message.num_tokens or limit > len(message.keys) * layout.chunk_size:
            raise Refusal(messages.BAD_REQUEST, "computed_tokens <= limit_tokens < num_tokens does not hold")
        hit = self.cache.lookup(layout, message.keys, computed, limit, session.session_id, started_s)
        served = max(hit.resume_tokens - computed, 0)
        beyond = (computed + served) // layout.chunk_size
        if beyond < limit // layout.chunk_size and self.cache.is_partial(layout, message.keys[beyond]):
            partial = self._partial.seen(layout.namespace, message.keys[beyond], started_s)
            self.metrics.count("lmcache_partial_chunks_total", int(partial))
        # Neither a self-test nor a benchmark is what people want to know the hit rate of.
        if not layout.ephemeral:
            self.metrics.count_tokens(message.num_tokens, computed=computed, hit=served, limit=limit)
        seconds = self.clock() - started_s
        self.metrics.observe("lmcache_lookup_seconds", seconds)
        sentence = "request %(request_id)s: %(hit_tokens)d of %(num_tokens)d tokens can be restored"
        told = {
            "hit_tokens": served,
            "computed_tokens": computed,
            "num_tokens": message.num_tokens,
            "lease": hit.lease_id,
            "namespace": layout.namespace.hex()[:16],
            "seconds": seconds,
        }
        _log(logging.DEBUG, sentence, session, message, told)
        return Found(hit.resume_tokens, hit.lease_id, int(self.config.lease_s), hit.held)

    def _end_request(self, session: Session, message: EndRequest) -> Message:
        for lease_id in message.lease_ids:
            self.cache.release(lease_id, session.session_id)
        self.cache.touch(self.registry.joined_layout(session, message.engine_id).namespace, message.keys)
        sentence = "request %(request_id)s: ended" if message.request_id else "leases given up: %(leases)s"
        _log(logging.DEBUG, sentence, session, message, {"leases": list(message.lease_ids)})
        return Done()

    def _retrieve(self, session: Session, message: Retrieve, request_id: int, frame_bytes: int) -> None:
        shard, layout = self.registry.shard(session, frame_bytes)
        groups = shard.geometry.groups
        resume, computed = message.resume_tokens, message.computed_tokens
        if len(message.block_ids) != len(groups) or resume % layout.chunk_size:
            raise Refusal(messages.BAD_REQUEST, "the message does not fit the registered groups")
        for group, block_ids in zip(groups, message.block_ids, strict=True):
            _check_blocks(shard, block_ids, len(group.needed_blocks(resume, computed)))
        read = self.cache.open_read(message.lease_id, message.key, shard.rank, resume, computed, layout)
        if read is None:
            raise Refusal(messages.EXPIRED, "what was promised to this request is no longer held for it")
        session.jobs += 1
        session.waiting_bytes += frame_bytes
        started_s = self.clock()

        def ended(error: Exception | None, num_bytes: int) -> None:
            session.jobs -= 1
            session.waiting_bytes -= frame_bytes
            self.cache.close_read(read)
            self._count("retrieve", "ok" if error is None else "failed")
            sentence = "request %(request_id)s: loaded %(tokens)d tokens, %(bytes)d bytes: %(outcome)s"
            told = {"tokens": resume - computed, "outcome": str(error or "ok"), "lease": message.lease_id}
            _log(logging.DEBUG, sentence, session, message, told | self._copied("load", num_bytes, started_s))
            reply = Done() if error is None else Refused(messages.COPY_FAILED, str(error))
            self.reply(session.identity, request_id, reply)

        self.copies.load(self.cache, shard, read, message.block_ids, ended)

    def _store(self, session: Session, message: Store, request_id: int, frame_bytes: int) -> None:
        shard, layout = self.registry.shard(session, frame_bytes)
        for each in message.objects:
            if each.group >= len(layout.groups) or each.chunk_index >= messages.MAX_CHUNKS:
                raise Refusal(
                    messages.BAD_REQUEST, f"no object of group {each.group}, chunk {each.chunk_index}"
                )
            positions = layout.groups[each.group].stored_blocks(each.chunk_index, layout.chunk_size)
            _check_blocks(shard, each.block_ids, len(positions))
        session.jobs += 1
        session.waiting_bytes += frame_bytes
        started_s = self.clock()

        def ended(stored: messages.Stored, num_bytes: int) -> None:
            session.jobs -= 1
            session.waiting_bytes -= frame_bytes
            self._count("store", "ok")
            sentence = (
                "requests %(request_ids)s: %(stored)d objects stored, %(bytes)d bytes; "
                "%(present)d were there, %(dropped)d dropped"
            )
            told = dataclasses.asdict(stored) | self._copied("store", num_bytes, started_s)
            _log(logging.DEBUG, sentence, session, message, told)
            self.reply(session.identity, request_id, stored)

        self.copies.store(self.cache, shard, layout, message.objects, session.session_id, ended)

    def _copied(self, direction: str, num_bytes: int, started_s: float) -> dict[str, object]:
        return {"direction": direction, "bytes": num_bytes, "seconds": self.clock() - started_s}


def _log(
    level: int,
    sentence: str,
    session: Session | None,
    message: Message,
    told: dict[str, Any],
    trace: bool = False,
) -> None:
    """A line about one message: what is `told`, the session it came from and the requests it names."""
    if not logger.isEnabledFor(level):
        return
    fields: dict[str, Any] = {}
    for name in ("request_id", "request_ids"):
        if hasattr(message, name):
            fields[name] = getattr(message, name)
    if session is not None:
        fields |= {"session": session.session_id, "pid": session.pid}
        fields |= {"engine": session.engine_id, "model": session.model}
    logger.log(level, sentence, fields | told, exc_info=trace)


def _check_blocks(shard: Shard, block_ids: tuple[int, ...], count: int) -> None:
    if len(block_ids) != count or (
        block_ids and not 0 < min(block_ids) <= max(block_ids) < shard.geometry.num_blocks
    ):
        raise Refusal(
            messages.BAD_REQUEST,
            f"expected {count} block ids from 1 to {shard.geometry.num_blocks - 1}, got {len(block_ids)}",
        )


_TOLD = ("register", "retrieve", "store")
"""Operations whose refusal means that something is not cached or not loaded."""
_OPERATIONS: dict[type[Any], str] = {
    Hello: "hello", Register: "register", Prove: "register", Join: "join", Lookup: "lookup",
    EndRequest: "end_request", Retrieve: "retrieve", Store: "store", Clear: "clear", Status: "status",
    Ping: "ping", Goodbye: "goodbye",
}  # fmt: skip
