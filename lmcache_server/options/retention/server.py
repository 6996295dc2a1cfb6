"""Retention as an option of the server: what it answers to Retain."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from prometheus_client import Counter, Gauge

from lmcache_client.contract.control import Retain
from lmcache_client.contract.messages import Done, Message
from lmcache_server.core.cache import Layout, Reservation
from lmcache_server.core.index import Chunk
from lmcache_server.core.pool import count_frames
from lmcache_server.options.retention.prefetch import OUTCOMES, Prefetches
from lmcache_server.service.engines import Session
from lmcache_server.service.option import Base, Handler, Option
from lmcache_server.telemetry.metrics import Metric

SHARE = 4
"""One in so many frames of L1 may be retained."""
RENEWALS = 16
"""What is retained becomes recently used each second, and when one part in so many of L1 has been stored."""
MAX_KEYS = 1 << 13
"""The limit for the chunks of all chains; one that several have counts for each. Renewing them takes 6 ms."""


@dataclass(frozen=True)
class Chain:
    namespace: bytes
    keys: tuple[bytes, ...]
    until_s: float
    priority: int


class Server(Option):
    """No chunk is held: a retained chain only becomes recently used again and again, so that others are
    evicted before it. The bound is a share of L1."""

    METRICS = (
        Metric(Gauge, "lmcache_retained_chunks", "Chunks that requests asked to retain, and that are in L1."),
        Metric(Counter, "lmcache_retained_chains_total",
               "Prompts that requests asked to retain, and those of them that were given up before their "
               "time because too much was retained.", {"outcome": ("asked", "given_up")}),
        Metric(Counter, "lmcache_prefetches_total",
               "Prompts that requests asked to bring back from the tiers, by outcome: brought, nothing (L1 "
               "had all, or no more came in time), failed (the engine has ended, or too many waited).",
               {"outcome": OUTCOMES}),
    )  # fmt: skip

    def __init__(self, base: Base) -> None:
        super().__init__(base)
        self._base, self._stored_frames, self._prefetches = base, 0, Prefetches(base)
        self._chains: dict[tuple[bytes, bytes], Chain] = {}
        """By namespace and last key, in the order in which they were asked for."""
        base.metrics.gauge("lmcache_retained_chunks", lambda: len(self._there(self._chains.values())))

    def handlers(self) -> Mapping[type, Handler]:
        return {Retain: lambda session, message, _bytes: self.retain(session, message)}

    def retain(self, session: Session, message: Retain) -> Message:
        """What it asks for takes the place of earlier chains of the same conversation."""
        namespace, keys = self._base.sessions.joined_layout(session).namespace, message.keys[:MAX_KEYS]
        now_s = self._base.system.now_s()
        if keys and message.prefetch_s:
            self._prefetches.ask(session, namespace, message, now_s)
        if keys and message.seconds:
            self._retain(Chain(namespace, keys, now_s + message.seconds, message.priority))
        return Done()

    def _retain(self, new: Chain) -> None:
        for name in ((new.namespace, key) for key in new.keys):
            if name in self._chains and self._chains[name].until_s <= new.until_s:
                del self._chains[name]
        name = new.namespace, new.keys[-1]
        if (same := self._chains.pop(name, None)) is not None:
            new = replace(new, until_s=same.until_s)
        else:
            self._base.metrics.count("lmcache_retained_chains_total", outcome="asked")
        self._chains[name] = new
        excess = sum(len(chain.keys) for chain in self._chains.values()) - MAX_KEYS
        for name, chain in self._ranked() if excess > 0 else ():
            if excess > 0:
                self._give_up(name)
                excess -= len(chain.keys)
        self._base.cache.touch(new.namespace, new.keys)

    def stored(self, layout: Layout, rooms: Sequence[Reservation]) -> None:
        self._stored_frames += sum(count_frames(room.runs) for room in rooms)
        if self._stored_frames * RENEWALS >= self._base.cache.total_frames:
            self.renew()

    def tick(self, now_s: float) -> None:
        self._chains = {name: chain for name, chain in self._chains.items() if chain.until_s > now_s}
        # Fetches evict, too, and hits make others recently used.
        self.renew()
        self._prefetches.tick(now_s)

    def renew(self) -> None:
        """Makes the chunks of all chains recently used. A chain is given up if it does not fit beside those
        with a larger priority or, if that is equal, those that were asked for later."""
        room, seen = self._base.cache.total_frames // SHARE, set[Chunk]()
        for name, chain in reversed(self._ranked()):
            new = self._there((chain,)) - seen
            if (frames := sum(chunk.frames for chunk in new)) > room:
                self._give_up(name)
            else:
                room -= frames
                seen |= new
        for _, chain in self._ranked():
            self._base.cache.touch(chain.namespace, chain.keys)
        self._stored_frames = 0

    def _ranked(self) -> list[tuple[tuple[bytes, bytes], Chain]]:
        """What is given up first comes first."""
        return sorted(self._chains.items(), key=lambda each: each[1].priority)

    def _there(self, chains: Iterable[Chain]) -> set[Chunk]:
        """The chunks of these chains that are in L1."""
        found = (self._base.cache.chunk(chain.namespace, key) for chain in chains for key in chain.keys)
        return {chunk for chunk in found if chunk is not None}

    def _give_up(self, name: tuple[bytes, bytes]) -> None:
        del self._chains[name]
        self._base.metrics.count("lmcache_retained_chains_total", outcome="given_up")
