"""What a resume needs and L1 lacks, which is what is fetched from tiers."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lmcache_server.core.layout import Layout


class Wanted(NamedTuple):
    """An object that a resume needs and L1 lacks: chunk number `chunk` of the chain, written by `rank`."""

    chunk: int
    group: int
    rank: int


def wanted(
    layout: Layout, ready: Sequence[int], resume_tokens: int, computed_tokens: int
) -> Iterator[Wanted]:
    """What a resume at `resume_tokens` needs and L1 lacks, in the order of the chain. `ready` has, per chunk,
    the bits of its ready objects; the engine itself holds `computed_tokens`."""
    size, end = layout.chunk_size, resume_tokens // layout.chunk_size
    groups = range(len(layout.groups))
    first = [layout.first_needed_chunk(group, resume_tokens, computed_tokens) for group in groups]
    for chunk in range(min(first, default=end), end):
        for group, spec in enumerate(layout.groups):
            if first[group] <= chunk and spec.stored_blocks(chunk, size):
                for rank in layout.holders[group]:
                    if not ready[chunk] >> layout.bit(group, rank) & 1:
                        yield Wanted(chunk, group, rank)
