"""Tenants: what the chunks of each `cache_salt` take of L1, and how much they may take.

A tenant is known by a digest of its salt (`tenant_id`). Chunks without a salt belong to nobody.
"""

import math
from collections.abc import Iterator

from lmcache_server.core.index import Tenant
from lmcache_server.core.limits import Limits
from lmcache_server.host.units import GB_BYTES


class Tenants:
    """The tenants whose chunks have frames in L1. `quotas` is in GB."""

    def __init__(self, quotas: Limits, frame_bytes: int) -> None:
        self.quotas = quotas
        self._frame_bytes = frame_bytes
        self._tenants: dict[bytes, Tenant] = {}

    def __len__(self) -> int:
        return len(self._tenants)

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants.values())

    def get(self, name: bytes) -> Tenant | None:
        """The tenant of this name, which need not have chunks yet; None for the empty name."""
        return self._tenants.get(name) or (Tenant(name, self.quota_frames(name)) if name else None)

    def quota_frames(self, name: bytes) -> float:
        """How many frames the tenant of this name may have: inf for the empty name."""
        return self.quotas.of(name) * GB_BYTES / self._frame_bytes if name else math.inf

    def grow(self, tenant: Tenant | None, frames: int) -> None:
        """The chunks of a tenant take so many frames more, or fewer; nothing changes if they are nobody's."""
        if tenant is None:
            return
        tenant.frames += frames
        if tenant.frames:
            self._tenants[tenant.name] = tenant
        else:
            self._tenants.pop(tenant.name, None)
            tenant.close()
