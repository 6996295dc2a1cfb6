"""Chunks that some shards of an engine have stored and others have not, for longer than a step can explain.

Such a chunk makes hits shorter, never wrong: a hit ends before it. It comes from stores that were dropped
on one shard alone, and it is whole again once an engine has computed it anew.
"""

import logging

logger = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""The shards of an engine store a chunk in the same step, but their copies end at different times."""
MAX_SUSPECTS = 1024
MAX_WARNED = 4096


class PartialChunks:
    """What lookups saw; bounded, the oldest is forgotten first."""

    def __init__(self) -> None:
        self._first_seen_s: dict[tuple[bytes, bytes], float] = {}
        self._warned: dict[bytes, None] = {}

    def seen(self, namespace: bytes, key: bytes, now_s: float) -> bool:
        """A lookup met a partial chunk; True if it was met PATIENCE_S before, which begins anew then.
        The first such chunk of a namespace is logged."""
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
                "namespace %(namespace)s: some workers of an engine have stored a chunk and others have not, "
                "so hits are shorter than they could be; look for dropped or failed stores "
                "(lmcache_objects_total), and give the server more --l1-size-gb if there was no room",
                {"namespace": namespace.hex()[:16]},
            )
        return True
