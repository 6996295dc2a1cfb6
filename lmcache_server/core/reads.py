"""Plans which frames a load reads, and in which order."""

from dataclasses import dataclass
from typing import NamedTuple

from lmcache_server.core.index import Chunk
from lmcache_server.core.layout import Layout
from lmcache_server.core.leases import Lease
from lmcache_server.core.pool import Runs


class ReadPart(NamedTuple):
    """Some pages of one object: `pages` blocks from position `first_page` among the `num_blocks` it holds.
    `digest` is of all of them."""

    group: int
    chunk: Chunk
    runs: Runs
    num_blocks: int
    first_page: int
    pages: int
    digest: bytes


@dataclass(frozen=True, eq=False)
class Read:
    """Objects that are being read. `parts` are sorted by group and, within a group, by block; the parts of a
    group cover exactly the blocks that it needs."""

    parts: tuple[ReadPart, ...]
    lease: Lease


def plan_parts(lease: Lease, layout: Layout, rank: int, computed_tokens: int) -> tuple[ReadPart, ...] | None:
    """What `rank` reads to resume at the lease's resume point, or None if any of it is missing."""
    parts: list[ReadPart] = []
    for group, ranks in enumerate(layout.holders):
        if layout.holder(group, rank) in ranks:
            group_parts = _plan_group(lease, layout, group, rank, computed_tokens)
            if group_parts is None:
                return None
            parts += group_parts
    return tuple(parts)


def _plan_group(
    lease: Lease, layout: Layout, group: int, rank: int, computed_tokens: int
) -> list[ReadPart] | None:
    spec, bit = layout.groups[group], layout.bit(group, rank)
    needed = spec.needed_blocks(lease.resume_tokens, computed_tokens)
    first = layout.first_needed_chunk(group, lease.resume_tokens, computed_tokens)
    if first < lease.first_chunk:
        return None
    parts, position = list[ReadPart](), needed.start
    for index in range(first, lease.resume_tokens // layout.chunk_size):
        blocks = spec.stored_blocks(index, layout.chunk_size)
        chunk = lease.chunks[index - lease.first_chunk]
        if (stored := chunk.get(bit)) is None:
            return None
        num_blocks, _, runs, digest = stored
        if num_blocks != len(blocks) or position not in blocks:
            return None
        pages = min(blocks.stop, needed.stop) - position
        parts.append(ReadPart(group, chunk, runs, num_blocks, position - blocks.start, pages, digest))
        position += pages
    return parts if position == needed.stop else None
