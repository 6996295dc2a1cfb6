"""Leases: promises, bound to a session, that the chunks of a resume point stay."""

from collections.abc import Iterator
from dataclasses import dataclass

from lmcache_server.core.index import Chunk


@dataclass(frozen=True, eq=False)
class Lease:
    """`chunks` are those of the chain from `first_chunk` up to the resume point."""

    lease_id: int
    session: int
    namespace: bytes
    resume_tokens: int
    first_chunk: int
    chunks: tuple[Chunk, ...]
    deadline_s: float


class LeaseTable:
    """Live leases. It pins nothing itself: whoever takes a lease out of it unpins the chunks."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._last_id = 0
        self._leases: dict[int, Lease] = {}
        self._by_session: dict[int, set[int]] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def get(self, lease_id: int) -> Lease | None:
        return self._leases.get(lease_id)

    def grant(
        self,
        session: int,
        namespace: bytes,
        resume_tokens: int,
        first_chunk: int,
        chunks: tuple[Chunk, ...],
        now_s: float,
    ) -> Lease:
        self._last_id += 1
        deadline_s = now_s + self.lease_s
        lease = Lease(self._last_id, session, namespace, resume_tokens, first_chunk, chunks, deadline_s)
        self._leases[lease.lease_id] = lease
        self._by_session.setdefault(session, set()).add(lease.lease_id)
        return lease

    def end(self, lease_id: int, session: int) -> Lease | None:
        """Takes a lease of this session out of the table; None if there is no such lease."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.session != session:
            return None
        del self._leases[lease_id]
        ids = self._by_session[session]
        ids.remove(lease_id)
        if not ids:
            del self._by_session[session]
        return lease

    def overdue(self, now_s: float) -> list[Lease]:
        """The leases whose deadline has come, still in the table."""
        due = []
        for lease in self._leases.values():
            # All leases last equally long and time does not go back: they are in order of deadline.
            if lease.deadline_s > now_s:
                break
            due.append(lease)
        return due

    def of_session(self, session: int) -> list[Lease]:
        return [self._leases[lease_id] for lease_id in sorted(self._by_session.get(session, ()))]
