"""`lmcache server` whose index has a given number of chunks of the lookup benchmark before it starts.

Everything is the server's own but the content: to have it stored by a client would take an hour. Started
with the number of chunks, then the server's own options.
"""

import hashlib
import sys
from collections.abc import Iterator
from typing import Any

from lmcache_client.contract.geometry import Geometry, GroupSpec, Region
from lmcache_client.contract.keys import ModelTag, namespace_id
from lmcache_server import app
from lmcache_server.commands import cli
from lmcache_server.core.cache import Cache
from lmcache_server.core.index import Chunk
from lmcache_server.core.packed import StoredObject

BLOCK_TOKENS = 16
CHUNK_TOKENS = 256
BLOCKS = 64
PAGE_BYTES = 4096
NAME = "lookup benchmark"
MODEL = ModelTag(NAME, (("weights", NAME),), 1, 1)
"""As a RawEngine of this name has it."""
GROUPS = (GroupSpec("full", BLOCK_TOKENS, 0, "bench", (Region(0, 0, PAGE_BYTES, PAGE_BYTES),)),)
GEOMETRY = Geometry(GROUPS, BLOCKS)
CHAIN_CHUNKS = 512
SMALLEST = 1024


def key(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def _chunks(count: int) -> Iterator[Chunk]:
    namespace = namespace_id(MODEL, [GEOMETRY])
    num_bytes = BLOCK_TOKENS * PAGE_BYTES
    for number in range(count):
        chunk = Chunk(namespace, key(number))
        chunk.add(0, StoredObject(BLOCK_TOKENS, num_bytes, ((number, 1),), b""), 1)
        yield chunk


class FullCache(Cache):
    """Its frames are numbers without memory behind them: the benchmark only looks up."""

    content = 0

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        for chunk in _chunks(self.content):
            self._index.add(chunk)
            self.order.add(chunk)

    def check_integrity(self) -> None:
        """Not of this content, whose frames do not exist."""


if __name__ == "__main__":
    FullCache.content = int(sys.argv.pop(1))
    app.Cache = FullCache  # type: ignore[misc]
    cli.main(["server", *sys.argv[1:]])
