"""The events as an option of the server: what it answers to Follow."""

from collections.abc import Mapping

from lmcache_client.contract.control import Follow, Followed
from lmcache_client.contract.messages import Message
from lmcache_server.options.kv_events.followers import Followers
from lmcache_server.service.option import Base, Handler, Option
from lmcache_server.service.sessions import Session


class Server(Option):
    def __init__(self, base: Base) -> None:
        super().__init__(base)
        self._cache, self._registry = base.cache, base.registry
        self._followers = Followers()
        base.cache.on_gone.append(self._followers.gone)
        base.cache.on_left.append(self._followers.end)

    def handlers(self) -> Mapping[type, Handler]:
        return {Follow: lambda session, message, _bytes: self.follow(session, message)}

    def follow(self, session: Session, message: Follow) -> Message:
        """Changes nothing but this session's list of forgotten chunks."""
        layout = self._registry.joined_layout(session)
        gone, missed = self._followers.take(layout.namespace, session.session_id)
        _, hit = self._cache.find(layout, message.keys, 0, len(message.keys) * layout.chunk_size)
        return Followed(hit.resume_tokens, gone, missed)
