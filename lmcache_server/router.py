"""What each message does. Runs on the event loop, which owns all state; copies run elsewhere.

Every request gets exactly one reply: at once, or when its copy has ended. Nothing that a client says is
believed: block ids, positions and memory are checked against what the client registered and proved.
"""

import asyncio
import hmac
import json
import logging
import os
import time
from collections.abc import Callable
from typing import Any

from lmcache_client.contract import protocol
from lmcache_client.contract.codec import ProtocolError
from lmcache_client.contract.geometry import GeometryError, chunk_size_warning, resolve_chunk_size
from lmcache_client.contract.keys import ModelTag
from lmcache_client.contract.protocol import (
    BadRequestError,
    Challenge,
    Clear,
    Cleared,
    Done,
    EndRequest,
    Found,
    Goodbye,
    Hello,
    Join,
    Joined,
    Lookup,
    Message,
    Ping,
    Prove,
    Refused,
    Register,
    Registered,
    Retrieve,
    Status,
    StatusReport,
    Store,
    Welcome,
)
from lmcache_client.contract.version import VERSION
from lmcache_server.config import Config
from lmcache_server.copies import Copies
from lmcache_server.core.cache import Cache, Layout
from lmcache_server.metrics import Metrics
from lmcache_server.report import status_report
from lmcache_server.sessions import MAX_JOBS, MAX_SESSIONS, Engines, Session, Shard, open_pidfd
from lmcache_server.transfer import host

logger = logging.getLogger(__name__)

SILENT_SESSION_S = 15.0
"""A session whose process cannot be watched is dropped after this silence; clients ping every second."""
STATUS_PIECE_CHARS = 16_384

Send = Callable[[bytes, bytes], None]


class Refusal(Exception):
    """A request that is answered with Refused."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Router:
    """See the module. `send(identity, frame)` must not block; `clock` gives monotonic seconds."""

    def __init__(
        self,
        config: Config,
        cache: Cache,
        copies: Copies,
        metrics: Metrics,
        send: Send,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.cache = cache
        self.copies = copies
        self.metrics = metrics
        self.engines = Engines()
        self.known: dict[bytes, tuple[ModelTag, Layout]] = {}
        """Namespaces that have chunks or engines, for the status report."""
        self.sessions: dict[bytes, Session] = {}
        self.boot_id = os.urandom(protocol.BOOT_ID_BYTES)
        self.clock = clock
        self.started_s = clock()
        self._send = send
        self._next_session = 1
        self._handlers: dict[type[Any], Callable[[Session, Any, int], Message | None]] = {
            Register: self._register,
            Prove: self._prove,
            Join: self._join,
            Lookup: self._lookup,
            EndRequest: self._end_request,
            Retrieve: self._retrieve,
            Store: self._store,
            Goodbye: self._goodbye,
        }

    # -- in and out -------------------------------------------------------------------------------

    def receive(self, identity: bytes, frame: bytes) -> None:
        """Handle one request of the client that ROUTER calls `identity`."""
        try:
            request_id, message = protocol.decode_request(frame)
        except BadRequestError as error:
            self._count("other", "refused")
            self.reply(identity, error.request_id, Refused(error.code, str(error)))
            return
        except ProtocolError as error:
            self._count("other", "refused")
            logger.debug("dropped a frame of %d bytes: %s", len(frame), error)
            return
        operation = _OPERATIONS.get(type(message), "other")
        try:
            reply = self._handle(identity, message, request_id)
        except Refusal as refusal:
            self._count(operation, "refused")
            reply = Refused(refusal.code, str(refusal))
        except Exception:
            # A fault here must cost one request, not the server; state changes before it are complete.
            logger.exception("request %s failed", type(message).__name__)
            self._count(operation, "failed")
            reply = Refused(protocol.INTERNAL, "the server failed on this request; its log says why")
        else:
            if reply is not None:
                self._count(operation, "ok")
        if reply is not None:
            self.reply(identity, request_id, reply)

    def reply(self, identity: bytes, request_id: int, message: Message) -> None:
        self._send(identity, protocol.encode_reply(self.boot_id, request_id, message))

    def _count(self, operation: str, outcome: str) -> None:
        self.metrics.count("lmcache_requests_total", 1, op=operation, outcome=outcome)

    def _handle(self, identity: bytes, message: Message, request_id: int) -> Message | None:
        session = self.sessions.get(identity)
        if session is not None:
            session.heard_s = self.clock()
        if isinstance(message, Hello):
            return self._hello(identity, message)
        if isinstance(message, Ping):
            return Done()
        if isinstance(message, Status):
            text = json.dumps(status_report(self))
            step = STATUS_PIECE_CHARS
            return StatusReport(tuple(text[i : i + step] for i in range(0, len(text), step)))
        if isinstance(message, Clear):
            chunks = self.cache.clear()
            logger.info("cleared: %d chunks forgotten", chunks)
            return Cleared(chunks)
        if session is None:
            raise Refusal(protocol.NOT_REGISTERED, "greet the server first")
        handler = self._handlers.get(type(message))
        if handler is None:
            raise Refusal(protocol.BAD_REQUEST, f"a client does not send {type(message).__name__}")
        return handler(session, message, request_id)

    # -- sessions ---------------------------------------------------------------------------------

    def _hello(self, identity: bytes, message: Hello) -> Message:
        for old in [s for s in self.sessions.values() if s.client_id == message.client_id]:
            self.drop(old, "connected again")
        if len(self.sessions) >= MAX_SESSIONS:
            raise Refusal(protocol.OVERLOADED, f"the server has {MAX_SESSIONS} sessions already")
        now_s = self.clock()
        session = Session(
            self._next_session,
            identity,
            message.pid,
            message.client_id,
            message.client_version,
            now_s,
            now_s,
            open_pidfd(message.pid),
        )
        self._next_session += 1
        self.sessions[identity] = session
        if session.pidfd is not None:
            asyncio.get_running_loop().add_reader(session.pidfd, self.drop, session, "its process ended")
        return Welcome(self.boot_id, os.getpid(), VERSION, session.session_id)

    def drop(self, session: Session, reason: str) -> None:
        """End a session: its leases at once, its copies when the slice that runs has ended, then its
        reservations. When this returns none of its memory is being copied."""
        if self.sessions.get(session.identity) is not session:
            return
        del self.sessions[session.identity]
        self._drop_shard(session)
        self.cache.drop_session(session.session_id)
        if session.pidfd is not None:
            asyncio.get_running_loop().remove_reader(session.pidfd)
            os.close(session.pidfd)
        level = logging.DEBUG if session.role == "client" else logging.INFO
        logger.log(
            level, "session %d (%s, pid %d) ended: %s", session.session_id, session.role, session.pid, reason
        )

    def _drop_shard(self, session: Session) -> None:
        shard, session.shard = session.shard, None
        if shard is None:
            return
        self.engines.remove(shard)
        self.copies.detach(shard)
        if shard.pidfd is not None:
            os.close(shard.pidfd)
            shard.pidfd = None

    def _goodbye(self, session: Session, _message: Goodbye, request_id: int) -> Message | None:
        self.drop(session, "it said goodbye")
        return Done()

    def tick(self) -> None:
        """Once a second: what time ends."""
        now_s = self.clock()
        self.cache.expire(now_s)
        for session in list(self.sessions.values()):
            if session.pidfd is None and now_s - session.heard_s > SILENT_SESSION_S:
                self.drop(session, f"silent for {SILENT_SESSION_S:.0f} s")

    # -- registration -----------------------------------------------------------------------------

    def _register(self, session: Session, message: Register, _request_id: int) -> Message:
        geometry, memory = message.geometry, message.memory
        if not 0 <= message.rank < message.model.world_size:
            raise Refusal(protocol.BAD_REQUEST, f"rank {message.rank} of {message.model.world_size} workers")
        try:
            geometry.check_buffers(tuple(size for _, size in memory.buffers))
            chunk_size = resolve_chunk_size(self.config.chunk_size, geometry.groups)
        except GeometryError as error:
            logger.warning("refused an engine of %s: %s", message.model.model, error)
            raise Refusal(protocol.CONFIGURATION, str(error)) from error
        self._drop_shard(session)
        session.shard = Shard(
            message.engine_id,
            message.rank,
            message.model,
            geometry,
            memory,
            chunk_size,
            nonce=os.urandom(protocol.NONCE_BYTES),
        )
        return Challenge(session.shard.nonce)

    def _prove(self, session: Session, _message: Prove, _request_id: int) -> Message:
        shard = session.shard
        if shard is None or shard.copier is not None:
            raise Refusal(protocol.BAD_REQUEST, "there is no registration to prove")
        # Opened before the nonce is read: from then on the descriptor, not the number, is the process.
        shard.pidfd = open_pidfd(shard.memory.pid)
        try:
            if shard.pidfd is None:
                raise host.NoAccessError(
                    f"the server cannot see process {shard.memory.pid}: run it in the same process "
                    "namespace as vLLM (containers: a shared pid namespace)"
                )
            found = host.read(shard.memory.pid, shard.memory.proof_address, len(shard.nonce))
            for start, size in shard.memory.buffers:
                host.check_access(shard.memory.pid, start, size)
        except host.CopyError as error:
            self._drop_shard(session)
            logger.warning("refused a worker of %s: %s", shard.model.model, error)
            raise Refusal(protocol.NO_ACCESS, str(error)) from error
        if not hmac.compare_digest(found, shard.nonce):
            self._drop_shard(session)
            raise Refusal(protocol.NO_ACCESS, "the nonce is not in the memory that was registered")
        self.copies.attach(shard)
        engine = self.engines.add(shard)
        try:
            layout = engine.complete()
        except GeometryError as error:
            self._drop_shard(session)
            raise Refusal(protocol.CONFIGURATION, str(error)) from error
        if layout is not None:
            self.known[layout.namespace] = (shard.model, layout)
            logger.info(
                "engine %s of %s is registered: %d groups, chunk size %d, namespace %s",
                shard.engine_id,
                shard.model.model,
                len(layout.groups),
                layout.chunk_size,
                layout.namespace.hex()[:16],
            )
        return Registered(shard.chunk_size, chunk_size_warning(shard.chunk_size, shard.geometry.groups))

    def _join(self, session: Session, message: Join, _request_id: int) -> Message:
        engine = self.engines.get(message.engine_id)
        layout = engine.layout if engine is not None else None
        if layout is None:
            return Joined(False, 0, b"")
        session.joined = message.engine_id
        return Joined(True, layout.chunk_size, layout.namespace)

    # -- the cache --------------------------------------------------------------------------------

    def _lookup(self, session: Session, message: Lookup, _request_id: int) -> Message:
        started_s = self.clock()
        engine = self.engines.get(message.engine_id)
        layout = engine.layout if engine is not None else None
        if layout is None or session.joined != message.engine_id:
            raise Refusal(protocol.NOT_REGISTERED, f"engine {message.engine_id!r} is not registered")
        computed, limit = message.computed_tokens, message.limit_tokens
        if not computed <= limit < message.num_tokens or limit > len(message.keys) * layout.chunk_size:
            raise Refusal(protocol.BAD_REQUEST, "computed_tokens <= limit_tokens < num_tokens does not hold")
        hit = self.cache.lookup(layout, message.keys, computed, limit, session.session_id, started_s)
        served = max(hit.resume_tokens - computed, 0)
        self.metrics.count_tokens(message.num_tokens, computed=computed, hit=served, limit=limit)
        self.metrics.observe("lmcache_lookup_seconds", self.clock() - started_s)
        logger.debug(
            "request %s: %d of %d tokens can be restored", message.request_id, served, message.num_tokens
        )
        return Found(hit.resume_tokens, hit.lease_id, int(self.config.lease_s), hit.held)

    def _end_request(self, session: Session, message: EndRequest, _request_id: int) -> Message:
        for lease_id in message.lease_ids:
            self.cache.release(lease_id, session.session_id)
        engine = self.engines.get(message.engine_id)
        if engine is not None and engine.layout is not None and session.joined == message.engine_id:
            self.cache.touch(engine.layout.namespace, message.keys)
        return Done()

    def _retrieve(self, session: Session, message: Retrieve, request_id: int) -> Message | None:
        shard, layout = self._shard(session)
        groups = shard.geometry.groups
        resume, computed = message.resume_tokens, message.computed_tokens
        if len(message.block_ids) != len(groups) or resume % layout.chunk_size:
            raise Refusal(protocol.BAD_REQUEST, "the message does not fit the registered groups")
        for group, block_ids in zip(groups, message.block_ids, strict=True):
            _check_blocks(shard, block_ids, len(group.needed_blocks(resume, computed)))
        read = self.cache.open_read(message.lease_id, layout.namespace, shard.rank, resume, computed, layout)
        if read is None:
            raise Refusal(protocol.EXPIRED, "what was promised to this request is no longer held for it")
        session.jobs += 1

        def ended(error: Exception | None) -> None:
            session.jobs -= 1
            self.cache.close_read(read)
            self._count("retrieve", "ok" if error is None else "failed")
            logger.debug(
                "request %s: loaded %d tokens: %s", message.request_id, resume - computed, error or "ok"
            )
            reply = Done() if error is None else Refused(protocol.COPY_FAILED, str(error))
            self.reply(session.identity, request_id, reply)

        self.copies.load(shard, read, message.block_ids, ended)
        return None

    def _store(self, session: Session, message: Store, request_id: int) -> Message | None:
        shard, layout = self._shard(session)
        for each in message.objects:
            if each.group >= len(layout.groups) or each.chunk_index >= protocol.MAX_CHUNKS:
                raise Refusal(
                    protocol.BAD_REQUEST, f"no object of group {each.group}, chunk {each.chunk_index}"
                )
            positions = layout.groups[each.group].stored_blocks(each.chunk_index, layout.chunk_size)
            _check_blocks(shard, each.block_ids, len(positions))
        session.jobs += 1

        def ended(stored: protocol.Stored) -> None:
            session.jobs -= 1
            self._count("store", "ok")
            self.reply(session.identity, request_id, stored)

        self.copies.store(self.cache, shard, layout, message.objects, session.session_id, ended)
        return None

    def _shard(self, session: Session) -> tuple[Shard, Layout]:
        """The session's proven shard and its engine's layout."""
        shard = session.shard
        engine = self.engines.get(shard.engine_id) if shard is not None else None
        if shard is None or shard.copier is None or engine is None or engine.layout is None:
            raise Refusal(protocol.NOT_REGISTERED, "the engine of this worker is not (yet) registered")
        if session.jobs >= MAX_JOBS:
            raise Refusal(protocol.OVERLOADED, f"{MAX_JOBS} copies of this worker are waiting already")
        return shard, engine.layout

    def close(self) -> None:
        """End every session; when this returns no memory is being copied."""
        for session in list(self.sessions.values()):
            self.drop(session, "the server ends")


def _check_blocks(shard: Shard, block_ids: tuple[int, ...], count: int) -> None:
    if len(block_ids) != count or not all(0 < block < shard.geometry.num_blocks for block in block_ids):
        raise Refusal(
            protocol.BAD_REQUEST,
            f"expected {count} block ids from 1 to {shard.geometry.num_blocks - 1}, got {len(block_ids)}",
        )


_OPERATIONS: dict[type[Any], str] = {
    Hello: "hello", Register: "register", Prove: "register", Join: "join", Lookup: "lookup",
    EndRequest: "end_request", Retrieve: "retrieve", Store: "store", Clear: "clear", Status: "status",
    Ping: "ping", Goodbye: "goodbye",
}  # fmt: skip
