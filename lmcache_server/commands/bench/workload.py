"""What the bench asks of the server: a geometry that no model has, and how much of it."""

import math
from dataclasses import dataclass

from msgspec.structs import replace

from lmcache_client.contract.geometry import (
    FULL,
    RECURRENT,
    SLIDING_WINDOW,
    Geometry,
    GroupSpec,
    Region,
)
from lmcache_server.core.pool import FRAME_BYTES
from lmcache_server.errors import CommandError

BLOCKS_PER_CHUNK = 4
"""The block size follows from it and from the server's chunk size."""


class BenchError(CommandError):
    """There are no figures; the message is one sentence that says why."""


@dataclass(frozen=True)
class Workload:
    """Each worker makes `requests` requests of `chunks` chunks. A page is the bytes of one block in one of
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
        """The groups, without their regions."""
        block_size = self.chunk_size // math.gcd(self.chunk_size, BLOCKS_PER_CHUNK)
        full = GroupSpec(FULL, block_size, 0, "bench", ())
        if not self.hybrid:
            return (full,)
        window = GroupSpec(SLIDING_WINDOW, block_size, self.chunk_size // 2 + 1, "bench", ())
        return full, window, GroupSpec(RECURRENT, self.chunk_size, 0, "bench", ())

    @property
    def positions(self) -> list[list[int]]:
        """The block positions that a request stores, by group."""
        return [
            [at for chunk in range(self.chunks) for at in group.stored_blocks(chunk, self.chunk_size)]
            for group in self.groups
        ]

    @property
    def num_blocks(self) -> int:
        """The number of the null block, those that a request stores, and as many to load into."""
        return 1 + 2 * sum(map(len, self.positions))

    @property
    def block_bytes(self) -> int:
        return self.layers * self.page_bytes

    @property
    def geometry(self) -> Geometry:
        """The layout is vLLM's: all groups share the pages, layer after layer, but no two share a block."""
        layer_bytes = self.num_blocks * self.page_bytes
        regions = tuple(
            Region(0, layer * layer_bytes, self.page_bytes, self.page_bytes) for layer in range(self.layers)
        )
        groups = tuple(replace(group, regions=regions) for group in self.groups)
        return Geometry(groups, self.num_blocks)

    @property
    def memory_bytes(self) -> int:
        """The size of a worker's memory."""
        return self.num_blocks * self.block_bytes

    @property
    def request_l1_bytes(self) -> int:
        """How much of L1 a request takes: objects fill whole frames."""
        objects = (len(at) // self.chunks * self.block_bytes for at in self.positions)
        return self.chunks * sum(-(-size // FRAME_BYTES) * FRAME_BYTES for size in objects)
