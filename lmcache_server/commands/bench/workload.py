"""The bench's requests: the geometry of a made-up model, and the number of chunks and requests."""

import math
from dataclasses import dataclass

from msgspec.structs import replace

from lmcache_client.contract.geometry import FULL, RECURRENT, SLIDING_WINDOW, Geometry, GroupSpec, Region
from lmcache_server.core.pool import FRAME_BYTES

BLOCKS_PER_CHUNK = 4
"""The block size is the server's chunk size divided by this, if that is possible."""


@dataclass(frozen=True)
class Workload:
    """Each worker makes `requests` requests of `chunks` chunks of `chunk_size` tokens. A page of `page_bytes`
    is one block in one of the `layers` regions of a group. A `hybrid` model has a full, a sliding-window and
    a recurrent group; else it has a full one. With `seconds`, each operation lasts that long, and loads
    repeat the last `requests` stores."""

    model: str
    chunk_size: int
    hybrid: bool
    layers: int
    page_bytes: int
    chunks: int
    requests: int
    seconds: float = 0.0

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        """The groups, still without regions."""
        block_size = self.chunk_size // math.gcd(self.chunk_size, BLOCKS_PER_CHUNK)
        full = GroupSpec(FULL, block_size, 0, "bench", ())
        if not self.hybrid:
            return (full,)
        window = GroupSpec(SLIDING_WINDOW, block_size, self.chunk_size // 2 + 1, "bench", ())
        return full, window, GroupSpec(RECURRENT, self.chunk_size, 0, "bench", ())

    @property
    def positions(self) -> list[list[int]]:
        """For each group, the positions of the blocks that a request stores."""
        return [
            [at for chunk in range(self.chunks) for at in group.stored_blocks(chunk, self.chunk_size)]
            for group in self.groups
        ]

    @property
    def num_blocks(self) -> int:
        """The null block, the blocks that a request stores, and as many to load into."""
        return 1 + 2 * sum(map(len, self.positions))

    @property
    def block_bytes(self) -> int:
        return self.layers * self.page_bytes

    @property
    def geometry(self) -> Geometry:
        """vLLM's layout: all groups share the pages of each layer, but every block belongs to one group."""
        layer_bytes = self.num_blocks * self.page_bytes
        starts = range(0, self.layers * layer_bytes, layer_bytes)
        regions = tuple(Region(0, at, self.page_bytes, self.page_bytes) for at in starts)
        groups = tuple(replace(group, regions=regions) for group in self.groups)
        return Geometry(groups, self.num_blocks)

    @property
    def memory_bytes(self) -> int:
        """The size of one worker's memory."""
        return self.num_blocks * self.block_bytes

    @property
    def request_l1_bytes(self) -> int:
        """The L1 space of one request; every object takes whole frames."""
        objects = (len(at) // self.chunks * self.block_bytes for at in self.positions)
        return self.chunks * sum(-(-size // FRAME_BYTES) * FRAME_BYTES for size in objects)
