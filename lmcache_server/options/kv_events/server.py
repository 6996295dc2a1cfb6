"""The events as an option of the server: it answers Follow with the chunks that the cache has forgotten."""

from collections.abc import Mapping

from lmcache_client.contract.control import Follow, Followed
from lmcache_client.contract.messages import Message
from lmcache_server.core.chunks import Gone
from lmcache_server.core.index import Chunk
from lmcache_server.service.engines import Session
from lmcache_server.service.option import Base, Handler, Option

MAX_GONE = 4096
"""Of more chunks, a session learns only that there were too many."""


class Server(Option):
    """Has one list for each session that follows; without any, a forgotten chunk costs one look-up here."""

    def __init__(self, base: Base) -> None:
        super().__init__(base)
        self._cache, self._sessions = base.cache, base.sessions
        self._lists: dict[bytes, dict[int, list[bytes]]] = {}
        """The keys of forgotten chunks, by namespace and session. One key too many stands for all others."""
        base.cache.on_gone.append(self._gone)
        base.cache.on_left.append(self._end)

    def handlers(self) -> Mapping[type, Handler]:
        return {Follow: lambda session, message, _bytes: self.follow(session, message)}

    def follow(self, session: Session, message: Follow) -> Message:
        """Tells what this session has not heard of yet, and whether there is more than that: it has never
        asked, or there are more than MAX_GONE chunks. Changes nothing but this session's list."""
        layout = self._sessions.joined_layout(session)
        lists = self._lists.setdefault(layout.namespace, {})
        gone, lists[session.session_id] = lists.get(session.session_id), []
        missed = gone is None or len(gone) > MAX_GONE
        _, hit = self._cache.find(layout, message.keys, 0, len(message.keys) * layout.chunk_size)
        return Followed(hit.resume_tokens, () if missed else tuple(gone or ()), missed)

    def _gone(self, chunk: Chunk, _why: Gone) -> None:
        """A lookup does not find this chunk any more."""
        for keys in self._lists.get(chunk.namespace, {}).values():
            if len(keys) <= MAX_GONE:
                keys.append(chunk.key)

    def _end(self, session_id: int) -> None:
        for namespace, lists in list(self._lists.items()):
            lists.pop(session_id, None)
            if not lists:
                del self._lists[namespace]
