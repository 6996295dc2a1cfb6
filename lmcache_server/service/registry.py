"""Who may use the cache: sessions come and go, workers register memory and prove that it is theirs."""

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Coroutine
from typing import Any

from lmcache_client.contract import messages
from lmcache_client.contract.geometry import GeometryError, chunk_size_warning, resolve_chunk_size
from lmcache_client.contract.messages import (
    Challenge,
    Done,
    Hello,
    Join,
    Joined,
    Message,
    NotCached,
    Register,
    Registered,
    Welcome,
)
from lmcache_client.contract.version import VERSION
from lmcache_server.config import Config
from lmcache_server.core.cache import Cache, Layout
from lmcache_server.service.requests import Refusal
from lmcache_server.service.sessions import (
    MAX_JOBS,
    MAX_SESSIONS,
    MAX_WAITING_BYTES,
    MAX_WORKERS,
    Engines,
    Greeting,
    Session,
    Shard,
    namespace_summary,
)
from lmcache_server.service.system import Process, ScarceError, System

logger = logging.getLogger(__name__)

SILENT_SESSION_S = 15.0
"""A session whose process cannot be watched is dropped after this silence; clients ping every second."""
SILENT_PROCESS_S = 300.0
"""One whose process lives after this: it may be stopped, and can greet again when it goes on."""


class Registry:
    """The sessions, and the engines that their workers make up."""

    def __init__(self, config: Config, cache: Cache, system: System) -> None:
        self.boot_id = system.random_bytes(messages.BOOT_ID_BYTES)
        self.sessions: dict[bytes, Session] = {}
        """By ROUTER's name for the client."""
        self.engines = Engines()
        self.known: dict[bytes, dict[str, Any]] = {}
        """Namespaces that have chunks or engines, for the status report."""
        self._config = config
        self._cache = cache
        self._system = system
        self._next_session = 1
        self._closed = False
        self._ending: dict[bytes, list[Shard]] = {}
        """By client id, the shards of ended sessions whose copies may still run."""
        self._greeting: dict[bytes, Greeting] = {}
        """By client id, its last greeting, if that waits for the end of those copies."""

    def hello(self, identity: bytes, message: Hello) -> Message | Coroutine[Any, Any, Message]:
        known = self.sessions.values()
        for old in [s for s in known if s.client_id == message.client_id or s.identity == identity]:
            self.drop(old, "connected again")
        # The client has given up an earlier greeting that still waits.
        self._greeting.pop(message.client_id, None)
        if self._copying(message.client_id):
            greeting = self._greeting[message.client_id] = Greeting(identity)
            return self._hello_after(greeting, message)
        return self._welcome(identity, message)

    async def _hello_after(self, greeting: Greeting, message: Hello) -> Message:
        """The greeting says that no copy of the session before runs any more: it waits until that is so."""
        while copying := self._copying(message.client_id):
            await copying[0]
        # Also where the copies ended before this began to wait: the client may have gone meanwhile.
        if self._greeting.get(message.client_id) is not greeting:
            raise Refusal(messages.NOT_REGISTERED, "this client has greeted again, or has gone")
        del self._greeting[message.client_id]
        # The same connection may have greeted as another client since.
        if (other := self.sessions.get(greeting.identity)) is not None:
            self.drop(other, "connected again")
        return self._welcome(greeting.identity, message)

    def _welcome(self, identity: bytes, message: Hello) -> Message:
        if self._closed:
            raise Refusal(messages.OVERLOADED, "the server is ending")
        if len(self.sessions) + len(self._ending) >= MAX_SESSIONS:
            raise Refusal(messages.OVERLOADED, f"the server has {MAX_SESSIONS} sessions already")
        process = self._watched(message.pid)
        now_s = self._system.now_s()
        session = Session(
            self._next_session,
            identity,
            message.pid,
            message.client_id,
            message.client_version,
            now_s,
            now_s,
            process,
        )
        self._next_session += 1
        self.sessions[identity] = session
        if session.process is not None:
            session.process.when_ended(self.drop, session, "its process ended")
        return Welcome(self.boot_id, self._system.pid, VERSION, session.session_id)

    def disconnected(self, identity: bytes) -> None:
        """The connection of a client has ended, greeted or still waiting for the answer."""
        for client_id in [
            client for client, greeting in self._greeting.items() if greeting.identity == identity
        ]:
            del self._greeting[client_id]
        session = self.sessions.get(identity)
        if session is not None:
            self.drop(session, "its connection ended")

    def _watched(self, pid: int) -> Process | None:
        try:
            return self._system.open_process(pid)
        except ScarceError as error:
            raise Refusal(
                messages.OVERLOADED,
                "the server has no file descriptor left to watch a process with: raise its limit (ulimit -n)",
            ) from error

    def drop(self, session: Session, reason: str) -> None:
        """End a session: its leases at once, its copies when the slice that runs has ended, and each
        reservation with its copy."""
        if self.sessions.get(session.identity) is not session:
            return
        del self.sessions[session.identity]
        role, engine = session.role, self.engines.get(session.engine_id)
        self._end_shard(session)
        self._cache.drop_owner(session.session_id)
        if session.process is not None:
            session.process.close()
        passing = role == "client" or (engine is not None and engine.ephemeral)
        level = logging.DEBUG if passing else logging.INFO
        values = {"session": session.session_id, "role": role, "pid": session.pid, "reason": reason}
        logger.log(level, "session %(session)d (%(role)s, pid %(pid)d) ended: %(reason)s", values)

    def _end_shard(self, session: Session) -> None:
        """The session's memory is registered no more; its copies end after the slice that runs."""
        shard, session.shard = session.shard, None
        if shard is None:
            return
        self.engines.remove(shard)
        self.forget_namespaces()
        if shard.copier is None:
            if shard.process is not None:
                shard.process.close()
            return
        self._ending.setdefault(session.client_id, []).append(shard)
        self._system.spawn(self._wait_for_end(session.client_id, shard, shard.copier.close()))

    async def _wait_for_end(self, client_id: bytes, shard: Shard, ended: Awaitable[None]) -> None:
        """When nothing of the shard is mapped or being copied any more, nothing of it is watched either."""
        await ended
        if shard.process is not None:
            shard.process.close()
        self._ending[client_id].remove(shard)
        if not self._ending[client_id]:
            del self._ending[client_id]

    def _copying(self, client_id: bytes) -> list["asyncio.Future[None]"]:
        """The ends of copies of this client's former sessions that have not come yet."""
        copiers = [shard.copier for shard in self._ending.get(client_id, ())]
        return [copier.ended for copier in copiers if copier is not None and not copier.ended.done()]

    async def goodbye(self, session: Session) -> Message:
        self.drop(session, "it said goodbye")
        while copying := self._copying(session.client_id):
            await copying[0]
        return Done()

    def tick(self) -> None:
        """Once a second: sessions that time ends."""
        now_s = self._system.now_s()
        for session in list(self.sessions.values()):
            limit_s = SILENT_SESSION_S if session.process is None else SILENT_PROCESS_S
            if now_s - session.heard_s > limit_s:
                self.drop(session, f"silent for {limit_s:.0f} s")
            elif session.shard is not None and session.shard.copier is not None and session.shard.copier.lost:
                self.drop(session, "its GPU has failed")

    # -- registration -----------------------------------------------------------------------------

    async def register(self, session: Session, message: Register) -> Message:
        geometry, memory = message.geometry, message.memory
        session.model = message.model.model
        others = sum(each.shard is not None for each in self.sessions.values() if each is not session)
        if others >= MAX_WORKERS:
            raise Refusal(messages.OVERLOADED, f"the server has {MAX_WORKERS} workers already")
        if not 0 <= message.rank < message.model.world_size:
            raise Refusal(messages.BAD_REQUEST, f"rank {message.rank} of {message.model.world_size} workers")
        try:
            geometry.check_buffers(tuple(size for _, size in memory.buffers))
            chunk_size = resolve_chunk_size(self._config.chunk_size, geometry.groups)
        except GeometryError as error:
            raise Refusal(messages.CONFIGURATION, str(error)) from error
        self._end_shard(session)
        while copying := self._copying(session.client_id):
            await copying[0]
            self._end_shard(session)
        if self.sessions.get(session.identity) is not session:
            raise Refusal(messages.NOT_REGISTERED, "the session ended before it was registered")
        if not self.engines.fits(message.engine_id, message.rank, message.model, message.ephemeral):
            raise _taken(message.engine_id)
        session.shard = Shard(
            message.engine_id,
            message.rank,
            message.model,
            geometry,
            memory,
            chunk_size,
            # As a number it is harmless: see Challenge.
            nonce=bytes(byte & 0x3F for byte in self._system.random_bytes(messages.NONCE_BYTES)),
            ephemeral=message.ephemeral,
        )
        return Challenge(session.shard.nonce)

    async def prove(self, session: Session) -> Message:
        """Map the memory, read what is where the nonce should be, and let the shard join its engine."""
        shard = session.shard
        if shard is None or shard.copier is not None:
            raise Refusal(messages.BAD_REQUEST, "there is no registration to prove")
        # Opened before the nonce is read: from then on the descriptor, not the number, is the process.
        shard.process = self._watched(shard.memory.pid)
        if shard.process is None and not shard.memory.device:
            self._end_shard(session)
            raise Refusal(
                messages.NO_ACCESS,
                f"the server cannot see process {shard.memory.pid}: run it in the same process namespace as "
                "vLLM (containers: a shared pid namespace)",
            )
        # Asked before each slice, because the process id may be given to another.
        alive = shard.process.alive if shard.process is not None else lambda: True
        name = f"copy-{shard.engine_id[:8]}-{shard.rank}"
        shard.copier = self._system.copier(name, shard.memory, alive)
        opened = await shard.copier.opened
        if session.shard is not shard:
            raise Refusal(messages.BAD_REQUEST, "the registration was given up before it was proven")
        if opened.error is not None:
            self._end_shard(session)
            raise Refusal(messages.NO_ACCESS, str(opened.error)) from opened.error
        if not all(hmac.compare_digest(each, shard.nonce) for each in opened.found):
            self._end_shard(session)
            raise Refusal(messages.NO_ACCESS, "the nonce is not in the memory that was registered")
        return self._join_engine(session, shard)

    def _join_engine(self, session: Session, shard: Shard) -> Message:
        """A proven shard becomes part of its engine, which is complete with its last shard."""
        if not self.engines.fits(shard.engine_id, shard.rank, shard.model, shard.ephemeral):
            self._end_shard(session)
            raise _taken(shard.engine_id)
        shard.proven = True
        engine = self.engines.add(shard)
        try:
            layout = engine.complete()
        except GeometryError as misfit:
            self._end_shard(session)
            raise Refusal(messages.CONFIGURATION, str(misfit)) from misfit
        if layout is not None:
            self.forget_namespaces()
            self.known[layout.namespace] = namespace_summary(shard.model, layout)
            logger.log(
                logging.DEBUG if shard.ephemeral else logging.INFO,
                "engine %(engine)s of %(model)s is registered: %(groups)d groups, chunk size %(chunk_size)d, "
                "namespace %(namespace)s",
                {
                    "engine": shard.engine_id,
                    "model": shard.model.model,
                    "groups": len(layout.groups),
                    "chunk_size": layout.chunk_size,
                    "namespace": layout.namespace.hex()[:16],
                    "session": session.session_id,
                },
            )
        return Registered(shard.chunk_size, chunk_size_warning(shard.chunk_size, shard.geometry.groups))

    def forget_namespaces(self) -> None:
        """What has neither chunks nor engines is known no more; without engines nothing ephemeral stays."""
        live = {engine.layout.namespace for engine in self.engines if engine.layout is not None}
        gone = self.known.keys() - live
        for namespace in gone:
            if self.known[namespace].get("ephemeral"):
                self._cache.clear(namespace)
        for namespace in gone - self._cache.namespaces().keys():
            del self.known[namespace]

    def join(self, session: Session, message: Join) -> Message:
        engine = self.engines.get(message.engine_id)
        layout = engine.layout if engine is not None else None
        if layout is None:
            return Joined(False, 0)
        if any(each.joined == message.engine_id for each in self.sessions.values() if each is not session):
            raise _taken(message.engine_id)
        session.joined, session.joined_namespace = message.engine_id, layout.namespace
        return Joined(True, layout.chunk_size)

    def not_cached(self, session: Session, message: NotCached) -> Message:
        if session.not_cached is None:
            logger.log(
                logging.INFO,
                "engine %(engine)s of %(model)s is not cached, because it has %(reason)s",
                {
                    "engine": message.engine_id,
                    "model": message.model,
                    "reason": message.reason,
                    "session": session.session_id,
                },
            )
        session.not_cached = message
        return Done()

    def joined_layout(self, session: Session) -> Layout:
        """The layout of the engine that this scheduler has joined; it computed its keys and blocks by it."""
        engine = self.engines.get(session.joined)
        if engine is None or engine.layout is None or engine.layout.namespace != session.joined_namespace:
            raise Refusal(messages.NOT_REGISTERED, f"engine {session.joined!r} is not registered")
        return engine.layout

    def shard(self, session: Session, request_bytes: int) -> tuple[Shard, Layout]:
        """The session's proven shard and its engine's layout, for a copy asked for in `request_bytes`."""
        shard = session.shard
        engine = self.engines.get(shard.engine_id) if shard is not None else None
        if shard is None or not shard.proven or engine is None or engine.layout is None:
            raise Refusal(messages.NOT_REGISTERED, "the engine of this worker is not (yet) registered")
        assert engine.shards[shard.rank] is shard, "an engine has one worker of each rank"
        if session.jobs >= MAX_JOBS:
            raise Refusal(messages.OVERLOADED, f"{MAX_JOBS} copies of this worker are waiting already")
        if session.waiting_bytes + request_bytes > MAX_WAITING_BYTES:
            raise Refusal(messages.OVERLOADED, f"{MAX_WAITING_BYTES} bytes of this worker's requests wait")
        return shard, engine.layout

    def close(self) -> None:
        """End every session and take no new one. Copies that run end after their slice."""
        self._closed = True
        for session in list(self.sessions.values()):
            self.drop(session, "the server ends")


def _taken(engine_id: str) -> Refusal:
    return Refusal(
        messages.ENGINE_ID_TAKEN,
        f"another live engine has the engine_id {engine_id!r}: give each engine an engine_id of its own in "
        "--kv-transfer-config, or leave it out",
    )
