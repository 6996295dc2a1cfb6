"""Retention as an option of the server: what it answers to Retain."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import Counter, Gauge

from lmcache_client.contract.control import Retain
from lmcache_client.contract.messages import Done, Message
from lmcache_server.core.cache import Layout, Reservation
from lmcache_server.core.pool import count_frames
from lmcache_server.service.option import Base, Handler, Option
from lmcache_server.service.sessions import Session
from lmcache_server.telemetry.metrics import Metric

SHARE = 4
"""One in so many frames of L1 may be retained."""
RENEWALS = 16
"""What is retained becomes recently used as often as so many parts of L1 have been stored."""
MAX_CHUNKS = 1 << 13
"""The limit for the chunks of all chains. To renew them takes 10 ms."""


@dataclass(frozen=True)
class Chain:
    namespace: bytes
    keys: tuple[bytes, ...]
    deadline_s: float


class Server(Option):
    """No chunk is held: a retained chain only becomes recently used again and again, so that others are
    evicted before it. The bound is a share of L1."""

    METRICS = (
        Metric(Gauge, "lmcache_retained_chunks", "Chunks that requests asked to retain, and that are in L1."),
        Metric(
            Counter,
            "lmcache_retained_chains_total",
            "Prompts that requests asked to retain, and those of them that were given up before their time "
            "because too much was retained.",
            {"outcome": ("asked", "given_up")},
        ),
    )

    def __init__(self, base: Base) -> None:
        super().__init__(base)
        self._cache, self._registry, self._metrics = base.cache, base.registry, base.metrics
        self._system = base.system
        self._chains: dict[tuple[bytes, bytes], Chain] = {}
        """By namespace and last key, in the order in which they were asked for."""
        self._chunks = self._stored_frames = 0
        base.metrics.gauge("lmcache_retained_chunks", lambda: self._chunks)

    def handlers(self) -> Mapping[type, Handler]:
        return {Retain: lambda session, message, _bytes: self.retain(session, message)}

    def retain(self, session: Session, message: Retain) -> Message:
        """What it asks for takes the place of an earlier chain of the same conversation."""
        namespace = self._registry.joined_layout(session).namespace
        deadline_s = self._system.now_s() + message.seconds
        for key in message.keys:
            before = self._chains.get((namespace, key))
            if before is not None and before.deadline_s <= deadline_s:
                del self._chains[namespace, key]
        if message.keys:
            self._metrics.count("lmcache_retained_chains_total", outcome="asked")
            self._chains[namespace, message.keys[-1]] = Chain(namespace, message.keys, deadline_s)
            self.renew()
        return Done()

    def stored(self, layout: Layout, rooms: Sequence[Reservation]) -> None:
        self._stored_frames += sum(count_frames(room.runs) for room in rooms)
        if self._stored_frames * RENEWALS >= self._cache.total_frames:
            self.renew()

    def tick(self, now_s: float) -> None:
        if any(chain.deadline_s <= now_s for chain in self._chains.values()):
            self.renew()

    def renew(self) -> None:
        """Makes the chunks of all chains recently used. A chain that does not fit beside those that were
        asked for after it is given up."""
        self._stored_frames = self._chunks = 0
        now_s = self._system.now_s()
        self._chains = {name: chain for name, chain in self._chains.items() if chain.deadline_s > now_s}
        room, kept = self._cache.total_frames // SHARE, dict[tuple[bytes, bytes], Chain]()
        known: set[tuple[bytes, bytes]] = set()
        for name, chain in reversed(self._chains.items()):
            new = {(chain.namespace, key) for key in chain.keys} - known
            there = [chunk for each in new if (chunk := self._cache.chunk(*each)) is not None]
            frames = sum(chunk.frames for chunk in there)
            if frames <= room and len(known) + len(new) <= MAX_CHUNKS:
                room -= frames
                known |= new
                kept[name] = chain
                self._chunks += len(there)
        self._metrics.count(
            "lmcache_retained_chains_total", len(self._chains) - len(kept), outcome="given_up"
        )
        self._chains = dict(reversed(kept.items()))
        for chain in self._chains.values():
            self._cache.touch(chain.namespace, chain.keys)
