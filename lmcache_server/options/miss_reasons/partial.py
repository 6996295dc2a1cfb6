"""Chunks that only some shards of an engine have stored, for longer than one step can explain.

A hit ends before such a chunk, so hits get shorter, never wrong. The cause is a store that failed or was
dropped on one shard alone. The chunk becomes whole when an engine computes it again.
"""

import logging

logger = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""The shards of an engine store a chunk in the same step, but their copies end at different times."""
MAX_SUSPECTS = 1024
MAX_WARNED = 4096


class PartialChunks:
    """The partial chunks that lookups met. Bounded: the oldest entry is forgotten first."""

    def __init__(self) -> None:
        self._first_seen_s: dict[tuple[bytes, bytes], float] = {}
        self._warned: dict[bytes, None] = {}

    def seen(self, namespace: bytes, key: bytes, now_s: float) -> bool:
        """Note that a lookup met a partial chunk. Returns True, and starts over, if the chunk has been
        partial for PATIENCE_S. The first such chunk of a namespace is logged."""
        first_s = self._first_seen_s.setdefault((namespace, key), now_s)
        if len(self._first_seen_s) > MAX_SUSPECTS:
            del self._first_seen_s[next(iter(self._first_seen_s))]
        if now_s - first_s < PATIENCE_S:
            return False
        del self._first_seen_s[namespace, key]
        if namespace not in self._warned:
            self._warned[namespace] = None
            if len(self._warned) > MAX_WARNED:
                del self._warned[next(iter(self._warned))]
            logger.warning(
                "namespace %(namespace)s: only some workers of an engine have stored a chunk, so hits are "
                "shorter than they could be; look for dropped or failed stores in lmcache_objects_total, "
                "and raise --l1-size-gb if there was no room",
                {"namespace": namespace.hex()[:16]},
            )
        return True
