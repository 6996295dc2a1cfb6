"""The chunks that the cache has forgotten, for each session that keeps track of its namespace."""

from lmcache_server.core.chunks import Gone
from lmcache_server.core.index import Chunk

MAX_GONE = 4096
"""Of more chunks, a session learns only that there were too many."""


class Followers:
    """One list for each session that has asked; without any, a forgotten chunk costs one look-up here."""

    def __init__(self) -> None:
        self._lists: dict[bytes, dict[int, list[bytes]]] = {}
        """The keys of forgotten chunks, by namespace and session. One key too many stands for all others."""

    def gone(self, chunk: Chunk, _why: Gone) -> None:
        """A lookup does not find this chunk any more."""
        for keys in self._lists.get(chunk.namespace, {}).values():
            if len(keys) <= MAX_GONE:
                keys.append(chunk.key)

    def take(self, namespace: bytes, owner: int) -> tuple[tuple[bytes, ...], bool]:
        """What this session has not heard of yet, and whether there is more than that: it has never asked, or
        there are more than MAX_GONE chunks."""
        lists = self._lists.setdefault(namespace, {})
        keys, lists[owner] = lists.get(owner), []
        return ((), True) if keys is None or len(keys) > MAX_GONE else (tuple(keys), False)

    def end(self, owner: int) -> None:
        """Forgets the lists of a session."""
        for namespace, lists in list(self._lists.items()):
            lists.pop(owner, None)
            if not lists:
                del self._lists[namespace]
