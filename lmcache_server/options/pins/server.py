"""The pins as an option of the server. A user names a request, and the release at its end tells which chunks
it has."""

import itertools
import logging
import operator
from collections.abc import Mapping
from typing import Any

from prometheus_client import Gauge

from lmcache_client.contract import codec, messages
from lmcache_client.contract.codec import ProtocolError
from lmcache_client.contract.messages import Pin, PinName, Pinned, Release, Unpin, Unpinned
from lmcache_server.core.cache import Layout
from lmcache_server.core.pool import FRAME_BYTES
from lmcache_server.options.pins.named_pins import NamedPins, PinError, Place
from lmcache_server.service.option import Base, Handler, Option
from lmcache_server.service.refusals import Refusal
from lmcache_server.telemetry.metrics import Metric

logger = logging.getLogger(__name__)

MAX_WATCHED = 16
"""How many requests the server watches for. Their keys take up to 80 MB together."""
_decoded = codec.decoder(dict[PinName, list[Place]])


class Server(Option):
    """Handles Pin and Unpin, and learns of each Release. Pins belong to no session."""

    METRICS = (
        Metric(Gauge, "lmcache_pinned_chunks", "Chunks that `lmcache pin` keeps from eviction."),
        Metric(Gauge, "lmcache_pinned_chunk_bytes", "L1 taken by these chunks; at most half of it."),
    )

    def __init__(self, base: Base) -> None:
        super().__init__(base)
        self._cache, self.pins = base.cache, NamedPins(base.cache)
        self._watched: dict[str, tuple[Layout, tuple[bytes, ...]] | None] = {}
        """The chain of each request that is watched for, None before its end; the oldest first."""
        base.metrics.gauge("lmcache_pinned_chunks", lambda: len(self.pins))
        base.metrics.gauge("lmcache_pinned_chunk_bytes", lambda: self.pins.frames * FRAME_BYTES)

    def handlers(self) -> Mapping[type, Handler]:
        return {
            Pin: lambda _session, message, _bytes: self.pin(message),
            Unpin: lambda _session, message, _bytes: self.unpin(message),
        }

    def released(self, session_id: int, layout: Layout, message: Release) -> None:
        for request in self._watched:
            if request in message.request_id:
                self._watched[request] = layout, message.keys

    def tick(self, now_s: float) -> None:
        """Small objects may have been pinned, and large ones added to their chunks since."""
        for name in self.pins.unpin_excess():
            logger.warning(
                "pinned chunks have grown beyond half of L1, so the newest name, %(name)r, is not pinned any "
                "more: give the server more memory with --l1-size-gb",
                {"name": name},
            )

    def pin(self, message: Pin) -> Pinned:
        seen = self._watched.setdefault(message.request, None)
        if len(self._watched) > MAX_WATCHED:
            del self._watched[next(iter(self._watched))]
        if seen is None:
            return Pinned(0, 0, 0, 0)
        layout, keys = seen
        if message.name:
            try:
                self.pins.pin(message.name, layout.namespace, keys)
            except PinError as error:
                raise Refusal(messages.OVERLOADED, str(error)) from error
        chain, hit = self._cache.find(layout, keys, 0, len(keys) * layout.chunk_size)
        held = sum(chunk is not None and chunk.ready > 0 for chunk in chain)
        return Pinned(len(keys), held, hit.resume_tokens, layout.chunk_size)

    def unpin(self, message: Unpin) -> Unpinned:
        names = [message.name] if message.name else list(self.pins.names)
        if message.name and message.name not in self.pins.names:
            reason = f"nothing is pinned as {message.name!r}: 'lmcache status' lists the names that are"
            raise Refusal(messages.BAD_REQUEST, reason)
        chunks = sum(len(self.pins.unpin(name)) for name in names)
        logger.info("unpinned: %(chunks)d chunks", {"chunks": chunks})
        return Unpinned(chunks)

    def report(self, now_s: float) -> dict[str, Any]:
        pins = [
            {
                "name": name,
                "chunks": len(chunks),
                "bytes": sum(each.frames for each in chunks.values()) * FRAME_BYTES,
            }
            for name, chunks in self.pins.names.items()
        ]
        return {"pins": pins, "pinned_chunk_bytes": self.pins.frames * FRAME_BYTES}

    def saved(self) -> bytes:
        return codec.pack({name: list(chunks) for name, chunks in self.pins.names.items()})

    def restored(self, saved: bytes) -> None:
        try:
            for name, places in _decoded(saved).items() if saved else ():
                for namespace, chunks in itertools.groupby(places, operator.itemgetter(0)):
                    self.pins.pin(name, namespace, [key for _, key in chunks])
        except (ProtocolError, PinError) as error:
            told = "not everything that was pinned before the restart is pinned again: %(reason)s"
            logger.warning(told, {"reason": error})
