"""Leases. Each promises a session that the chunks of a resume point stay. An owner is a session's number."""

import itertools
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field

from lmcache_server.core.index import Chunk

LEASE_COST = 256
"""The memory that a lease takes besides its chunks, counted in references to chunks."""
MAX_SESSION_COST = 1 << 20
"""The limit for all leases of one session: 4,080 short ones, or 15 of the longest chains."""
MAX_COST = 1 << 24
"""The limit for all leases: 128 MiB of references."""


@dataclass(frozen=True, eq=False)
class Lease:
    """One lease. `chunks` is the part of the chain from chunk number `first_chunk` to the resume point."""

    lease_id: int
    owner: int
    namespace: bytes
    resume_tokens: int
    first_chunk: int
    chunks: tuple[Chunk, ...]
    deadline_s: float

    @property
    def cost(self) -> int:
        return LEASE_COST + len(self.chunks)


@dataclass(eq=False)
class _Held:
    """The leases of one session, the oldest first."""

    leases: dict[int, Lease] = field(default_factory=dict)
    cost: int = 0


class LeaseTable:
    """The live leases. The table takes no references: the caller does, and drops them at the end."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._last_id = 0
        self._leases: dict[int, Lease] = {}
        self._by_owner: dict[int, _Held] = {}
        self._cost = 0

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def get(self, lease_id: int) -> Lease | None:
        return self._leases.get(lease_id)

    def crowded_out(self, owner: int, num_chunks: int) -> Lease | None:
        """The lease to end before `owner` may get a new lease on `num_chunks` chunks, or None if there is
        room.

        It is the owner's oldest if the owner holds too much, else the oldest of the owner with the most.
        """
        held = self._by_owner.get(owner)
        if held is None or held.cost + LEASE_COST + num_chunks <= MAX_SESSION_COST:
            if self._cost + LEASE_COST + num_chunks <= MAX_COST:
                return None
            held = max(self._by_owner.values(), key=operator.attrgetter("cost"))
        return next(iter(held.leases.values()))

    def grant(
        self,
        owner: int,
        namespace: bytes,
        resume_tokens: int,
        first_chunk: int,
        chunks: tuple[Chunk, ...],
        now_s: float,
    ) -> Lease:
        self._last_id += 1
        deadline_s = now_s + self.lease_s
        lease = Lease(self._last_id, owner, namespace, resume_tokens, first_chunk, chunks, deadline_s)
        self._leases[lease.lease_id] = lease
        held = self._by_owner.setdefault(owner, _Held())
        held.leases[lease.lease_id] = lease
        held.cost += lease.cost
        self._cost += lease.cost
        return lease

    def end(self, lease_id: int, owner: int) -> Lease | None:
        """Takes a lease of this owner out of the table and returns it, or None if there is no such lease."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.owner != owner:
            return None
        del self._leases[lease_id]
        held = self._by_owner[owner]
        del held.leases[lease_id]
        held.cost -= lease.cost
        self._cost -= lease.cost
        if not held.leases:
            del self._by_owner[owner]
        return lease

    def overdue(self, now_s: float) -> list[Lease]:
        """The leases whose deadline has passed. They stay in the table."""
        # All leases last equally long and time never goes back, so the table is sorted by deadline.
        return list(itertools.takewhile(lambda lease: lease.deadline_s <= now_s, self._leases.values()))

    def of_owner(self, owner: int) -> list[Lease]:
        return list(self._by_owner[owner].leases.values()) if owner in self._by_owner else []
