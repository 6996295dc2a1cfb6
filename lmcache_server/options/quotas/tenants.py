"""Tenants: what the chunks of each `cache_salt` take of L1, and how much they may take.

A tenant is known by a digest of its salt (`tenant_id`). Chunks without a salt belong to nobody.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from lmcache_server.core.index import Chunk
from lmcache_server.core.named_limits import Limits
from lmcache_server.core.tenant_policy import TenantPolicy
from lmcache_server.host.units import GB_BYTES


class Tenant:
    """What the chunks of one salt take of L1, and those of them that can be evicted, in their own order. It
    has the two parts of EvictionOrder."""

    def __init__(self, name: bytes, quota_frames: float) -> None:
        self.name = name
        self.quota_frames = quota_frames
        self.frames = 0
        """The frames of all its chunks that are ready or reserved, in use or not."""
        self._ends, self._border = Chunk(b"", b""), Chunk(b"", b"")
        self._ends.tenant_older = self._ends.tenant_newer = self._border
        self._border.tenant_older = self._border.tenant_newer = self._ends

    def line(self, once: bool = False) -> Iterator[Chunk]:
        """From the least to the most recently used; with `once`, only those that nobody will ask for."""
        chunk = self._ends.tenant_newer
        while chunk is not None and chunk is not self._ends and not (once and chunk is self._border):
            if chunk is not self._border:
                yield chunk
            chunk = chunk.tenant_newer

    def add(self, chunk: Chunk, ahead_of: Chunk | None) -> None:
        newer: Chunk | None = self._border if chunk.once else self._ends
        if ahead_of is not None:
            # If `ahead_of` is not of this tenant, the chunk is its first.
            newer = ahead_of if ahead_of.tenant == self.name else self._ends.tenant_newer
        older = newer.tenant_older if newer is not None else None
        assert newer is not None, "`ahead_of` is not in the order"
        assert older is not None, "`ahead_of` is not in the order"
        chunk.tenant_older, chunk.tenant_newer = older, newer
        older.tenant_newer = newer.tenant_older = chunk

    @staticmethod
    def remove(chunk: Chunk) -> None:
        older, newer = chunk.tenant_older, chunk.tenant_newer
        assert older is not None, "not in the order"
        assert newer is not None, "not in the order"
        older.tenant_newer, newer.tenant_older = newer, older
        chunk.tenant_older = chunk.tenant_newer = None

    def close(self) -> None:
        """Without chunks, it is garbage that is in no cycle."""
        self._ends.tenant_older = self._ends.tenant_newer = None


class Tenants(TenantPolicy):
    """The tenants whose chunks have frames in L1. `quotas` is in GB."""

    def __init__(self, quotas: Limits, frame_bytes: int) -> None:
        self._quotas, self._frame_bytes = quotas, frame_bytes
        self._tenants: dict[bytes, Tenant] = {}

    def __len__(self) -> int:
        return len(self._tenants)

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants.values())

    def most_frames(self, tenant: bytes) -> float:
        return self._quotas.of(tenant) * GB_BYTES / self._frame_bytes if tenant else math.inf

    def grew(self, chunk: Chunk, frames: int) -> None:
        if (tenant := self._tenants.get(chunk.tenant)) is None:
            tenant = self._tenants[chunk.tenant] = Tenant(chunk.tenant, self.most_frames(chunk.tenant))
        tenant.frames += frames
        if not tenant.frames:
            self._tenants.pop(chunk.tenant).close()

    def added(self, chunk: Chunk, ahead_of: Chunk | None) -> None:
        self._tenants[chunk.tenant].add(chunk, ahead_of)

    def removed(self, chunk: Chunk) -> None:
        Tenant.remove(chunk)

    def excess_frames(self, tenant: bytes, frames: int) -> int:
        known = self._tenants.get(tenant)
        over = known.frames + frames - known.quota_frames if known else frames - self.most_frames(tenant)
        # Far above its quota, as after a restart with a smaller one, it shrinks with every store.
        return math.ceil(min(max(over, 0), 2 * frames))

    def line(self, tenant: bytes, once: bool) -> Iterable[Chunk]:
        known = self._tenants.get(tenant)
        return known.line(once) if known else ()

    def check(self, chunks: Iterable[Chunk], writing: Mapping[Chunk, int], order: Iterable[Chunk]) -> None:
        frames, members = Counter[bytes](), list[Chunk]()
        for chunk in chunks:
            if chunk.tenant:
                frames[chunk.tenant] += chunk.frames + writing.get(chunk, 0)
        for tenant in self:
            members += (line := list(tenant.line()))
            assert all(chunk.tenant == tenant.name for chunk in line)
        assert frames == {tenant.name: tenant.frames for tenant in self}
        assert len(members) == len(set(members)), "a chunk is in the line of its tenant once"
        assert set(members) == {chunk for chunk in order if chunk.tenant}
