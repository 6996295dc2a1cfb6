"""Whether the server is ready (/readyz): it must have memory to serve from."""

from lmcache_server.core.cache import Cache
from lmcache_server.l1.memory import L1Memory


def unready(cache: Cache, l1: L1Memory) -> str:
    """Why it is not ready yet; empty if it is."""
    if not cache.total_frames:
        return "L1 has no memory yet: the first part of its file is being allocated"
    return l1.locked.failure if l1.locked is not None and not l1.locked.pinned_bytes else ""
