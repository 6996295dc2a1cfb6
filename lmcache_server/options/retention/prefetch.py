"""Prompts that come back later are brought from the tiers into L1 before they do."""

from typing import NamedTuple

from lmcache_client.contract.control import Retain
from lmcache_client.contract.messages import Lookup
from lmcache_server.service.option import Base
from lmcache_server.service.sessions import Session

MAX_WAITING = 1024
"""More push out the oldest."""
MAX_STARTED = 8
"""In a second. The tiers have lookups to serve."""
OUTCOMES = ("brought", "nothing", "failed")


class Waiting(NamedTuple):
    due_s: float
    session: Session
    message: Retain


class Prefetches:
    """Fetches as a lookup does. Nobody waits for it, and nothing is leased: what came is recently used."""

    def __init__(self, base: Base) -> None:
        self._base = base
        self._waiting: dict[tuple[bytes, bytes], Waiting] = {}
        """By namespace and last key, in the order in which they were asked for."""

    def ask(self, session: Session, namespace: bytes, message: Retain, now_s: float) -> None:
        """What it asks for takes the place of earlier prompts of the same conversation."""
        for key in message.keys:
            self._waiting.pop((namespace, key), None)
        self._waiting[namespace, message.keys[-1]] = Waiting(now_s + message.prefetch_s, session, message)
        if len(self._waiting) > MAX_WAITING:
            del self._waiting[next(iter(self._waiting))]
            self._count("failed")

    def tick(self, now_s: float) -> None:
        due = [name for name, waiting in self._waiting.items() if waiting.due_s <= now_s]
        for name in due[:MAX_STARTED]:
            waiting = self._waiting.pop(name)
            self._base.system.spawn(self._bring(name[0], waiting.session, waiting.message))

    async def _bring(self, namespace: bytes, session: Session, message: Retain) -> None:
        base, layout = self._base, self._base.registry.layout(session.joined)
        # A session that has ended may be that of an engine that has come back under the same name.
        is_there = base.registry.sessions.get(session.identity) is session
        if layout is None or layout.namespace != namespace or not is_there:
            self._count("failed")
            return
        limit, shards = len(message.keys) * layout.chunk_size, base.registry.shards(session)
        asked = Lookup("", message.keys, 0, limit, limit + 1, tenant=message.tenant)
        found = held = base.cache.find(layout, message.keys, 0, limit)[1].resume_tokens
        for source in base.options if held < limit else ():
            if source.may_fetch(layout):
                await source.fetch(layout, shards, asked, held)
                found = base.cache.find(layout, message.keys, 0, limit)[1].resume_tokens
        base.cache.touch(namespace, message.keys)
        self._count("brought" if found > held else "nothing")

    def _count(self, outcome: str) -> None:
        self._base.metrics.count("lmcache_prefetches_total", outcome=outcome)
