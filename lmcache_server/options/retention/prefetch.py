"""Brings prompts from the tiers into L1 before they come back."""

from typing import NamedTuple

from lmcache_client.contract.control import Retain
from lmcache_client.contract.messages import Lookup
from lmcache_server.service.engines import Session
from lmcache_server.service.option import Base

MAX_KEYS = 1 << 16
"""Of all prompts that wait. More push out the oldest."""
OUTCOMES = ("brought", "nothing", "failed")


class Waiting(NamedTuple):
    due_s: float
    session: Session
    message: Retain


class Prefetches:
    """Fetches as a lookup does, one prompt at a time, because tiers have lookups to serve. Nobody waits for
    it, and nothing is leased: what came is recently used."""

    def __init__(self, base: Base) -> None:
        self._base, self._is_busy = base, False
        self._waiting: dict[tuple[bytes, bytes], Waiting] = {}
        """By namespace and last key, in the order in which they were asked for."""
        self._num_keys = 0

    def ask(self, session: Session, namespace: bytes, message: Retain, now_s: float) -> None:
        """What it asks for takes the place of earlier prompts of the same conversation."""
        for key in message.keys:
            self._take((namespace, key))
        self._waiting[namespace, message.keys[-1]] = Waiting(now_s + message.prefetch_s, session, message)
        self._num_keys += len(message.keys)
        while self._num_keys > MAX_KEYS:
            self._take(next(iter(self._waiting)))
            self._count("failed")

    def tick(self, now_s: float) -> None:
        due = [name for name, waiting in self._waiting.items() if waiting.due_s <= now_s]
        if due and not self._is_busy:
            self._is_busy = True
            self._base.system.spawn(self._bring(due))

    def _take(self, name: tuple[bytes, bytes]) -> Waiting | None:
        if (waiting := self._waiting.pop(name, None)) is not None:
            self._num_keys -= len(waiting.message.keys)
        return waiting

    async def _bring(self, names: list[tuple[bytes, bytes]]) -> None:
        try:
            for name in names:
                if (waiting := self._take(name)) is not None:
                    self._count(await self._outcome(name[0], waiting.session, waiting.message))
        finally:
            self._is_busy = False

    async def _outcome(self, namespace: bytes, session: Session, message: Retain) -> str:
        base, layout = self._base, self._base.sessions.layout(session.joined)
        is_there = base.sessions.by_identity.get(session.identity) is session
        if layout is None or layout.namespace != namespace or not is_there:
            return "failed"
        limit, shards = len(message.keys) * layout.chunk_size, base.sessions.shards(session)
        asked = Lookup("", message.keys, 0, limit, limit + 1, tenant=message.tenant)
        found = held = base.cache.find(layout, message.keys, 0, limit)[1].resume_tokens
        for source in base.options if held < limit else ():
            if source.may_fetch(layout):
                await source.fetch(layout, shards, asked, held)
                found = base.cache.find(layout, message.keys, 0, limit)[1].resume_tokens
        base.cache.touch(namespace, message.keys)
        return "brought" if found > held else "nothing"

    def _count(self, outcome: str) -> None:
        self._base.metrics.count("lmcache_prefetches_total", outcome=outcome)
