"""Pin and Unpin. A user names a request, and the release at its end tells which chunks it has."""

import logging

from lmcache_client.contract import messages
from lmcache_client.contract.messages import Pin, Pinned, Release, Unpin, Unpinned
from lmcache_server.core.cache import Cache, Layout
from lmcache_server.core.named_pins import PinError
from lmcache_server.service.refusals import Refusal

logger = logging.getLogger(__name__)

MAX_WATCHED = 16
"""How many requests the server watches for. Their keys take up to 80 MB together."""


class Pinning:
    """Handles Pin and Unpin, and learns of each Release. Pins belong to no session."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._watched: dict[str, tuple[Layout, tuple[bytes, ...]] | None] = {}
        """The chain of each request that is watched for, None before its end; the oldest first."""

    def released(self, layout: Layout, message: Release) -> None:
        for request in self._watched:
            if request in message.request_id:
                self._watched[request] = layout, message.keys

    def pin(self, message: Pin) -> Pinned:
        seen = self._watched.setdefault(message.request, None)
        if len(self._watched) > MAX_WATCHED:
            del self._watched[next(iter(self._watched))]
        if seen is None:
            return Pinned(0, 0, 0, 0)
        layout, keys = seen
        if message.name:
            try:
                self._cache.pin(message.name, layout.namespace, keys)
            except PinError as error:
                raise Refusal(messages.OVERLOADED, str(error)) from error
        chain, hit = self._cache.find(layout, keys, 0, len(keys) * layout.chunk_size)
        held = sum(chunk is not None and chunk.ready > 0 for chunk in chain)
        return Pinned(len(keys), held, hit.resume_tokens, layout.chunk_size)

    def unpin(self, message: Unpin) -> Unpinned:
        names = [message.name] if message.name else list(self._cache.named_pins.names)
        try:
            chunks = sum(map(self._cache.unpin, names))
        except KeyError:
            reason = f"nothing is pinned as {message.name!r}: 'lmcache status' lists the names that are"
            raise Refusal(messages.BAD_REQUEST, reason) from None
        logger.info("unpinned: %(chunks)d chunks", {"chunks": chunks})
        return Unpinned(chunks)
