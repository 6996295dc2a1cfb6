"""Decides who may use the cache: clients open sessions, and workers register memory and prove they own it."""

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from lmcache_client.contract import messages
from lmcache_client.contract.chunk_size import chunk_size_warning, resolve_chunk_size
from lmcache_client.contract.geometry import GeometryError
from lmcache_client.contract.messages import Message
from lmcache_client.contract.version import VERSION
from lmcache_server.config import Config
from lmcache_server.core.cache import Cache, Layout
from lmcache_server.service.engines import Engines, Greeting, Session, Shard, namespace_summary
from lmcache_server.service.memory_owner import explained, with_owner
from lmcache_server.service.refusals import MAX_TEXT, Refusal
from lmcache_server.service.system import Process, ScarceError, System

logger = logging.getLogger(__name__)

MAX_SESSIONS = 1024
MAX_WORKERS = 256
"""How many sessions may have registered memory; each of them has a copy thread, or two for a GPU."""
MAX_JOBS = 256
"""How many copies of one session may wait. Beyond that its stores are dropped and its loads refused."""
MAX_WAITING_BYTES = 8 << 20
"""The limit for the requests of one session whose copies wait. Decoded they take up to twenty times that."""
SILENT_SESSION_S = 15.0
"""A session whose process cannot be watched is dropped after this silence. Clients ping every second."""
SILENT_PROCESS_S = 300.0
"""A session whose process still runs is dropped after this silence. If the process was only suspended, it can
greet again when it continues."""
MAX_KNOWN = 256
"""Namespaces that the status report describes. A namespace outlives its engines as long as it has a chunk."""

PeerPid = Callable[[bytes], int | None]
"""The process at the other end of a client's connection; 0 if it is not visible here, None if unknown."""


class Sessions:
    """The sessions, and the engines that their workers make up."""

    def __init__(self, config: Config, cache: Cache, system: System, peer_pid: PeerPid) -> None:
        self.boot_id = system.random_bytes(messages.BOOT_ID_BYTES)
        self.by_identity: dict[bytes, Session] = {}
        """By ROUTER's identity of the client."""
        self.engines = Engines()
        self.known: dict[bytes, dict[str, Any]] = {}
        """For the status report: summaries of namespaces that have chunks or engines, the oldest first."""
        self.may_wait_longer = False
        """Whether a lookup may wait for what an option brings. Engines are told so."""
        self._config = config
        self._cache = cache
        self._system = system
        self._peer_pid = peer_pid
        self._next_session = 1
        self._closed = False
        self._ending: dict[bytes, list[Shard]] = {}
        """By client id, the shards of ended sessions whose copies may still run."""
        self._greeting: dict[bytes, Greeting] = {}
        """By client id, the client's last greeting while it waits for the end of those copies."""

    def hello(self, identity: bytes, message: messages.Hello) -> Message | Coroutine[Any, Any, Message]:
        sessions = self.by_identity.values()
        for old in [s for s in sessions if s.client_id == message.client_id or s.identity == identity]:
            self.drop(old, "connected again")
        # The client has given up any earlier greeting that still waits.
        self._greeting.pop(message.client_id, None)
        if self._copying(message.client_id):
            greeting = self._greeting[message.client_id] = Greeting(identity)
            return self._hello_after(greeting, message)
        return self._welcome(identity, message)

    async def _hello_after(self, greeting: Greeting, message: messages.Hello) -> Message:
        """Welcomes a client when its earlier copies have ended: Welcome promises that none runs any more."""
        while (copying := self._copying(message.client_id)) and greeting in self._greeting.values():
            await self._system.wait(copying[:1], SILENT_SESSION_S)
        # The client may have gone meanwhile, even if there was nothing to wait for.
        if self._greeting.get(message.client_id) is not greeting:
            raise Refusal(messages.NOT_REGISTERED, "this client has greeted again or has disconnected")
        del self._greeting[message.client_id]
        # The same connection may have greeted as another client meanwhile.
        if (other := self.by_identity.get(greeting.identity)) is not None:
            self.drop(other, "connected again")
        return self._welcome(greeting.identity, message)

    def _welcome(self, identity: bytes, message: messages.Hello) -> Message:
        if self._closed:
            raise Refusal(messages.OVERLOADED, "the server is shutting down")
        if len(self.by_identity) + len(self._ending) >= MAX_SESSIONS:
            raise Refusal(messages.OVERLOADED, f"the server already has {MAX_SESSIONS} sessions")
        # The client's number may mean another process here: over a Unix socket the kernel knows better.
        peer_pid = self._peer_pid(identity)
        pid = message.pid if peer_pid is None else peer_pid
        process = self._watched(pid) if pid else None
        now_s, number = self._system.now_s(), self._next_session
        session = self.by_identity[identity] = Session(
            number, identity, message.pid, message.client_id, message.client_version, now_s, now_s, process
        )
        self._next_session += 1
        if process is not None:
            process.when_ended(self.drop, session, "its process ended")
        return messages.Welcome(self.boot_id, self._system.pid, VERSION, session.session_id)

    def disconnected(self, identity: bytes) -> None:
        """Drops the session or the waiting greeting of a client whose connection has ended."""
        waiting = self._greeting.items()
        self._greeting = {client: greeting for client, greeting in waiting if greeting.identity != identity}
        session = self.by_identity.get(identity)
        if session is not None:
            self.drop(session, "its connection ended")

    def _watched(self, pid: int) -> Process | None:
        try:
            return self._system.open_process(pid)
        except ScarceError as error:
            told = "the server has no file descriptor left to watch the process: raise its limit (ulimit -n)"
            raise Refusal(messages.OVERLOADED, told) from error

    def drop(self, session: Session, reason: str) -> None:
        """Ends a session. Its leases end at once. Its copies end after the running slice, and each
        reservation ends with its copy."""
        if self.by_identity.get(session.identity) is not session:
            return
        del self.by_identity[session.identity]
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
        """Unregisters the session's memory. Its copies end after the slice that is running."""
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
        """Keeps the descriptor of the shard's process open until the shard's memory is neither mapped nor
        copied."""
        await ended
        if shard.process is not None:
            shard.process.close()
        self._ending[client_id].remove(shard)
        if not self._ending[client_id]:
            del self._ending[client_id]

    def _copying(self, client_id: bytes) -> list["asyncio.Future[None]"]:
        """A future for each shard of this client's earlier sessions that may still be copying."""
        copiers = [shard.copier for shard in self._ending.get(client_id, ())]
        return [copier.ended for copier in copiers if copier is not None and not copier.ended.done()]

    async def goodbye(self, session: Session) -> Message:
        self.drop(session, "it said goodbye")
        while copying := self._copying(session.client_id):
            await copying[0]
        return messages.Done()

    def tick(self) -> None:
        """Drops sessions that are silent or whose GPU has failed; called once a second."""
        now_s = self._system.now_s()
        for session in list(self.by_identity.values()):
            limit_s = SILENT_SESSION_S if session.process is None else SILENT_PROCESS_S
            if now_s - session.heard_s > limit_s:
                self.drop(session, f"silent for {limit_s:.0f} s")
            elif session.shard is not None and session.shard.copier is not None and session.shard.copier.lost:
                self.drop(session, "its GPU has failed")

    # -- registration -----------------------------------------------------------------------------

    async def register(self, session: Session, message: messages.Register) -> Message:
        rank, model, geometry = message.rank, message.model, message.geometry
        session.model = model.model
        workers = sum(other.shard is not None for other in self.by_identity.values() if other is not session)
        if workers >= MAX_WORKERS:
            raise Refusal(messages.OVERLOADED, f"the server already has {MAX_WORKERS} workers")
        if rank not in model.ranks:
            raise Refusal(messages.BAD_REQUEST, f"rank {rank} of {model.world_size} workers")
        memory = with_owner(message.memory, self._peer_pid(session.identity))
        code = messages.BAD_REQUEST
        try:
            geometry.check_buffers(tuple(size for _, size in memory.buffers))
            code = messages.CONFIGURATION
            chunk_size = resolve_chunk_size(self._config.chunk_size, geometry.groups)
        except GeometryError as error:
            raise Refusal(code, str(error)) from error
        self._end_shard(session)
        while copying := self._copying(session.client_id):
            await copying[0]
            self._end_shard(session)
        if self.by_identity.get(session.identity) is not session:
            raise Refusal(messages.NOT_REGISTERED, "the session ended before it was registered")
        if not self.engines.fits(message.engine_id, rank, model, message.ephemeral):
            raise _taken(message.engine_id)
        # Read as a number, these bytes are harmless: see Challenge.
        nonce = bytes(byte & 0x3F for byte in self._system.random_bytes(messages.NONCE_BYTES))
        session.shard = Shard(
            message.engine_id, rank, model, geometry, memory, chunk_size, nonce, message.ephemeral
        )
        return messages.Challenge(nonce)

    async def prove(self, session: Session) -> Message:
        """Maps the memory, looks for the nonce in it, and lets the shard join its engine."""
        shard = session.shard
        if shard is None or shard.copier is not None:
            raise Refusal(messages.BAD_REQUEST, "there is no registration to prove")
        # The descriptor is opened before the nonce is read, so it watches the process that has the nonce.
        shard.process = self._watched(shard.memory.pid)
        if shard.process is None and (not shard.memory.device or shard.memory.descriptors):
            self._end_shard(session)
            told = f"the server cannot see process {shard.memory.pid}"
            fix = "run it in the same process namespace as vLLM (containers: a shared pid namespace)"
            raise Refusal(messages.NO_ACCESS, f"{told}: {fix}")
        # Checked before each slice, because the process id may be reused.
        alive = shard.process.alive if shard.process is not None else lambda: True
        name = f"copy-{shard.engine_id[:8]}-{shard.rank}"
        try:
            shard.copier = self._system.copier(name, shard.memory, alive)
        except Exception:
            self._end_shard(session)
            raise
        opened = await shard.copier.opened
        if session.shard is not shard:
            raise Refusal(messages.BAD_REQUEST, "the registration was given up before it was proven")
        if opened.error is not None:
            self._end_shard(session)
            reason = explained(opened.error, self._peer_pid(session.identity))
            raise Refusal(messages.NO_ACCESS, reason) from opened.error
        if not all(hmac.compare_digest(nonce, shard.nonce) for nonce in opened.nonces):
            self._end_shard(session)
            raise Refusal(messages.NO_ACCESS, "the nonce is not in the memory that was registered")
        return self._join_engine(session, shard)

    def _join_engine(self, session: Session, shard: Shard) -> Message:
        """Adds a proven shard to its engine. The last shard completes the engine."""
        if not self.engines.fits(shard.engine_id, shard.rank, shard.model, shard.ephemeral):
            self._end_shard(session)
            raise _taken(shard.engine_id)
        shard.proven = True
        engine = self.engines.add(shard)
        try:
            layout = engine.complete()
        except GeometryError as misfit:
            self._end_shard(session)
            raise Refusal(messages.BAD_REQUEST, str(misfit)) from misfit
        if layout is not None:
            self.known.pop(layout.namespace, None)
            capacity_tokens = engine.capacity_tokens(self._config.l1_size_bytes, self._cache.frame_bytes)
            self.known[layout.namespace] = namespace_summary(shard.model, layout, capacity_tokens)
            self.forget_namespaces()
            logger.log(
                logging.DEBUG if shard.ephemeral else logging.INFO,
                "engine %(engine)s of %(model)s is registered: %(groups)d KV cache group(s), chunk size "
                "%(chunk_size)d, namespace %(namespace)s, room for about %(room)s tokens",
                {
                    "engine": shard.engine_id,
                    "model": shard.model.model[:MAX_TEXT],
                    "groups": len(layout.groups),
                    "chunk_size": layout.chunk_size,
                    "namespace": layout.namespace.hex()[:16],
                    "room": f"{capacity_tokens:,}",
                    "session": session.session_id,
                },
            )
        warning = chunk_size_warning(shard.chunk_size, shard.geometry.groups)
        return messages.Registered(shard.chunk_size, warning)

    def forget_namespaces(self) -> None:
        """Clears ephemeral namespaces without engines. Forgets the summaries of namespaces with neither
        chunks nor engines, and the oldest of those without engines beyond MAX_KNOWN."""
        live = {engine.layout.namespace for engine in self.engines if engine.layout is not None}
        for namespace in [each for each in self.known if each not in live]:
            ephemeral = self.known[namespace].get("ephemeral")
            if ephemeral:
                self._cache.clear(namespace)
            # A store that still runs may add to an ephemeral namespace, which is then cleared again.
            too_many = len(self.known) > MAX_KNOWN and not ephemeral
            if too_many or namespace not in self._cache.namespaces():
                del self.known[namespace]

    def named(self, model: str, namespace: str) -> list[bytes]:
        """The namespaces of this model, or of any if it is empty, whose digits begin with `namespace`. Raises
        Refusal if there is none."""
        found = [
            name
            for name, summary in self.known.items()
            if model in ("", summary["model"]) and name.hex().startswith(namespace)
        ]
        if not found:
            reason = "no namespace has this name: `lmcache status` lists the models and namespaces"
            raise Refusal(messages.BAD_REQUEST, reason)
        return found

    def join(self, session: Session, message: messages.Join) -> Message:
        engine = self.engines.get(message.engine_id)
        if engine is None or (layout := engine.layout) is None:
            return messages.Joined(False, 0)
        others = (other for other in self.by_identity.values() if other is not session)
        if any(other.joined == message.engine_id for other in others):
            raise _taken(message.engine_id)
        session.joined, session.joined_namespace = message.engine_id, layout.namespace
        self._cache.leave(session.session_id)
        l1_bytes = self._config.l1_size_bytes
        capacity_tokens = engine.capacity_tokens(l1_bytes, self._cache.frame_bytes)
        return messages.Joined(True, layout.chunk_size, self.may_wait_longer, l1_bytes, capacity_tokens)

    def not_cached(self, session: Session, message: messages.NotCached) -> Message:
        if session.not_cached is None:
            text = "engine %(engine)s of %(model)s is not cached, because it has %(reason)s"
            values = {"engine": message.engine_id, "model": message.model, "reason": message.reason}
            logger.info(text, values | {"session": session.session_id})
        session.not_cached = message
        return messages.Done()

    def joined_layout(self, session: Session) -> Layout:
        """The layout of the engine that this scheduler has joined. The scheduler's keys and blocks follow
        this layout."""
        layout = self.layout(session.joined)
        if layout is None or layout.namespace != session.joined_namespace:
            raise Refusal(messages.NOT_REGISTERED, f"engine {session.joined!r} is not registered")
        return layout

    def layout(self, engine_id: str) -> Layout | None:
        """The layout of an engine that is complete."""
        engine = self.engines.get(engine_id)
        return engine.layout if engine is not None else None

    def shards(self, session: Session) -> dict[int, Shard]:
        """The shards, by rank, of the engine that this scheduler has joined."""
        engine = self.engines.get(session.joined)
        return dict(engine.shards) if engine is not None else {}

    def may_wait(self, session: Session, request_bytes: int) -> bool:
        """Whether one more request of this session, of `request_bytes`, may wait."""
        return session.jobs < MAX_JOBS and session.waiting_bytes + request_bytes <= MAX_WAITING_BYTES

    def shard(self, session: Session, request_bytes: int) -> tuple[Shard, Layout]:
        """The session's proven shard and its engine's layout, for a copy whose request takes `request_bytes`.
        Raises Refusal unless the session may copy."""
        shard = session.shard
        engine = self.engines.get(shard.engine_id) if shard is not None else None
        if shard is None or not shard.proven or engine is None or engine.layout is None:
            raise Refusal(messages.NOT_REGISTERED, "the engine of this worker is not registered yet")
        assert engine.shards[shard.rank] is shard, "an engine has one worker of each rank"
        if not self.may_wait(session, request_bytes):
            limits = f"the limits are {MAX_JOBS}, and {MAX_WAITING_BYTES} bytes of requests"
            raise Refusal(messages.OVERLOADED, f"no more copies of this worker may wait: {limits}")
        return shard, engine.layout

    def close(self) -> None:
        """Ends every session and accepts no new one. Running copies end after their slice."""
        self._closed = True
        for session in list(self.by_identity.values()):
            self.drop(session, "the server is shutting down")


def _taken(engine_id: str) -> Refusal:
    told = f"another live engine has the engine_id {engine_id!r}"
    fix = "give each engine an engine_id of its own in --kv-transfer-config, or leave it out"
    return Refusal(messages.ENGINE_ID_TAKEN, f"{told}: {fix}")
