"""What is asked of the server: a geometry that no model has, and how much of it."""

import math
from dataclasses import dataclass

from lmcache_client.contract.geometry import (
    FULL,
    RECURRENT,
    SLIDING_WINDOW,
    Geometry,
    GroupSpec,
    Region,
)
from lmcache_server.core.pool import FRAME_BYTES

BLOCKS_PER_CHUNK = 4
"""The server's: an object takes whole frames of L1."""


class BenchError(Exception):
    """Why there are no figures, in one sentence."""


@dataclass(frozen=True)
class Workload:
    """`requests` requests of `chunks` chunks each, of each worker. A page is the bytes of one block in one of
    the `layers` regions of a group; with `hybrid` a hit needs a full, a sliding-window and a recurrent group.
    `chunk_size` is the server's, in tokens."""

    model: str
    chunk_size: int
    hybrid: bool
    layers: int
    page_bytes: int
    chunks: int
    requests: int

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        """Without regions."""
        block_size = self.chunk_size // math.gcd(self.chunk_size, BLOCKS_PER_CHUNK)
        full = GroupSpec(FULL, block_size, 0, "bench", ())
        if not self.hybrid:
            return (full,)
        window = GroupSpec(SLIDING_WINDOW, block_size, self.chunk_size // 2 + 1, "bench", ())
        return full, window, GroupSpec(RECURRENT, self.chunk_size, 0, "bench", ())

    @property
    def positions(self) -> list[list[int]]:
        """For each group the block positions that a request stores."""
        return [
            [at for chunk in range(self.chunks) for at in group.stored_blocks(chunk, self.chunk_size)]
            for group in self.groups
        ]

    @property
    def num_blocks(self) -> int:
        """The null block, those that a request stores, and as many to retrieve into."""
        return 1 + 2 * sum(map(len, self.positions))

    @property
    def block_bytes(self) -> int:
        return self.layers * self.page_bytes

    @property
    def geometry(self) -> Geometry:
        """As vLLM lays it out: all groups share the pages, layer after layer, and no two a block."""
        layer_bytes = self.num_blocks * self.page_bytes
        regions = tuple(
            Region(0, layer * layer_bytes, self.page_bytes, self.page_bytes) for layer in range(self.layers)
        )
        specs = (
            GroupSpec(each.kind, each.block_size, each.window, each.tag, regions) for each in self.groups
        )
        return Geometry(tuple(specs), self.num_blocks)

    @property
    def memory_bytes(self) -> int:
        """Of a worker."""
        return self.num_blocks * self.block_bytes

    @property
    def request_l1_bytes(self) -> int:
        """What a request takes of L1."""
        objects = (len(at) // self.chunks * self.block_bytes for at in self.positions)
        return self.chunks * sum(-(-size // FRAME_BYTES) * FRAME_BYTES for size in objects)
