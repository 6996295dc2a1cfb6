"""The geometry of an engine's KV cache: where each block lies and which blocks a resume needs.

Everything here is a pure function of what a worker registered. The scheduler side of the connector and
the server compute the same results from it, so they never need to ask each other.
"""

from lmcache_client.contract.codec import Natural, Text, Wire

FULL = "full"
SLIDING_WINDOW = "sliding_window"
CHUNKED_LOCAL = "chunked_local"
RECURRENT = "recurrent"
KINDS = (FULL, SLIDING_WINDOW, CHUNKED_LOCAL, RECURRENT)

MAX_GROUPS = 64
MAX_REGIONS = 8192
"""The limit for all groups of one worker together."""
MAX_BLOCKS = 1 << 31
MAX_PAGE_BYTES = 1 << 32
MAX_CHUNK_TOKENS = 1 << 22


class GeometryError(ValueError):
    """The geometry or the chunk size cannot be served; the message says what to change."""


class Region(Wire, frozen=True):
    """One strided array of pages inside the engine's memory.

    The page of block `b` is at `offset + b * stride_bytes` of exported buffer `buffer`, `page_bytes` long.
    """

    buffer: Natural
    offset: Natural
    stride_bytes: Natural
    page_bytes: Natural


class GroupSpec(Wire, frozen=True):
    """One KV cache group: what it needs to resume, and where its pages are.

    `window` is the size of the sliding window or attention chunk in tokens, and 0 for other kinds. `tag`
    holds everything else that must match before two engines may share pages (dtype, attention backend,
    kernel block size); it is compared, never parsed. If `replicated`, all tensor-parallel ranks of a
    pipeline stage hold the same bytes, which are stored once.
    """

    kind: Text
    block_size: Natural
    window: Natural
    tag: Text
    regions: tuple[Region, ...]
    replicated: bool = False

    def __post_init__(self) -> None:
        windowed = self.kind in (SLIDING_WINDOW, CHUNKED_LOCAL)
        if self.kind not in KINDS:
            raise GeometryError(f"a group's kind is one of {', '.join(KINDS)}, not {self.kind!r}")
        if not 0 < self.block_size <= MAX_CHUNK_TOKENS:
            raise GeometryError(f"a block holds 1 to {MAX_CHUNK_TOKENS} tokens, not {self.block_size}")
        if (self.window > 0) != windowed:
            raise GeometryError(f"window {self.window} does not fit a group of kind {self.kind}")

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all regions, which is the space it takes in L1."""
        return sum(region.page_bytes for region in self.regions)

    def first_needed_token(self, resume_tokens: int) -> int:
        """The first token whose KV or state a resume at `resume_tokens` reads."""
        if self.kind == SLIDING_WINDOW:
            return max(0, resume_tokens - self.window + 1)
        if self.kind == CHUNKED_LOCAL:
            return resume_tokens // self.window * self.window
        if self.kind == RECURRENT:
            return max(0, resume_tokens - 1)
        return 0

    def needed_blocks(self, resume_tokens: int, computed_tokens: int = 0) -> range:
        """The block positions that a resume at `resume_tokens` needs, apart from the first
        `computed_tokens` tokens, which the engine holds. Both are multiples of the block size."""
        first = max(self.first_needed_token(resume_tokens), computed_tokens)
        end = resume_tokens // self.block_size
        return range(min(first // self.block_size, end), end)

    def stored_blocks(self, chunk_index: int, chunk_size: int) -> range:
        """The block positions that this group stores for chunk `chunk_index`: all that a resume at the
        end of the chunk, or at any later chunk boundary, can need. May be empty."""
        if self.kind == FULL:  # asked for each chunk of each load
            blocks = chunk_size // self.block_size
            return range(chunk_index * blocks, (chunk_index + 1) * blocks)
        end = (chunk_index + 1) * chunk_size
        needed = self.needed_blocks(end)
        return range(max(needed.start, chunk_index * chunk_size // self.block_size), needed.stop)


class Geometry(Wire, frozen=True):
    """The groups of one worker. Their block ids are in [0, num_blocks); id 0 is the null block."""

    groups: tuple[GroupSpec, ...]
    num_blocks: Natural

    def __post_init__(self) -> None:
        if not 0 < len(self.groups) <= MAX_GROUPS:
            raise GeometryError(f"an engine has 1 to {MAX_GROUPS} KV cache groups, not {len(self.groups)}")
        regions = sum(len(group.regions) for group in self.groups)
        if regions > MAX_REGIONS:
            raise GeometryError(f"an engine has at most {MAX_REGIONS} regions, not {regions}")
        if not 1 < self.num_blocks <= MAX_BLOCKS:
            raise GeometryError(f"an engine has 2 to {MAX_BLOCKS} blocks, not {self.num_blocks}")

    def check_buffers(self, buffer_bytes: tuple[int, ...]) -> None:
        """Raises GeometryError unless every page of every block lies inside its exported buffer."""
        for region in (region for group in self.groups for region in group.regions):
            if not 0 < region.page_bytes <= MAX_PAGE_BYTES:
                raise GeometryError(f"a page has 1 to {MAX_PAGE_BYTES} bytes, not {region.page_bytes}")
            if region.buffer >= len(buffer_bytes) or region.stride_bytes < region.page_bytes:
                raise GeometryError(f"{region} does not describe pages of an exported buffer")
            end = region.offset + (self.num_blocks - 1) * region.stride_bytes + region.page_bytes
            if end > buffer_bytes[region.buffer]:
                raise GeometryError(
                    f"{region} ends at byte {end}, beyond its buffer of {buffer_bytes[region.buffer]} bytes"
                )
