"""The layout of a namespace: its groups, its chunk size, and which shard holds which objects."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lmcache_client.contract.geometry import GroupSpec


@dataclass(frozen=True)
class Layout:
    """The layout of a namespace; all its engines share it.

    `chunk_size` is in tokens. `holders` has, per group, the ranks of the shards with objects of their own.
    With pipeline parallelism a shard may have none, and in a replicated group all `tensor_parallel_size`
    ranks of a pipeline stage share the objects of the stage's first rank here: the server may have only the
    ranks from `first_rank` on. The chunks of an `ephemeral` namespace go with its last engine. `model` is a
    name for reports.
    """

    namespace: bytes
    chunk_size: int
    groups: tuple[GroupSpec, ...]
    holders: tuple[tuple[int, ...], ...]
    tensor_parallel_size: int = 1
    ephemeral: bool = False
    model: str = ""
    first_rank: int = 0

    def holder(self, group: int, rank: int) -> int:
        """The rank whose objects `rank` writes and reads: `rank` itself, unless the group is replicated."""
        if not self.groups[group].replicated:
            return rank
        return max(rank - rank % self.tensor_parallel_size, self.first_rank)

    def bit(self, group: int, rank: int) -> int:
        """The number of the object within its chunk."""
        return (self.holder(group, rank) - self.first_rank) * len(self.groups) + group

    @cached_property
    def masks(self) -> tuple[int, ...]:
        """Per group, the bits of the objects that a complete chunk has; 0 for a group without holders."""
        return tuple(
            sum(1 << self.bit(group, rank) for rank in ranks) for group, ranks in enumerate(self.holders)
        )

    def present(self, ready: Sequence[int]) -> tuple[bytes, ...]:
        """Per group, one byte per chunk: 1 if all objects of the group are ready there, or none is needed.

        `ready` has, per chunk of the chain, the bits of its ready objects.
        """
        flags = []
        for group, mask in enumerate(self.masks):
            # Few values of `ready` differ. A step of Python per chunk would double the time of a lookup.
            complete = {bits: bits & mask == mask for bits in set(ready)}
            present = bytes(map(complete.__getitem__, ready))
            if self.groups[group].window and 0 in present:
                present = bytes(map(operator.or_, present, self._needless(group, len(ready))))
            flags.append(present)
        return tuple(flags)

    def _needless(self, group: int, chunks: int) -> bytearray:
        """One byte for each of at least `chunks` chunks: 1 if no resume ever needs a block of it."""
        known, spec = self._needless_by_group[group], self.groups[group]
        for chunk in range(len(known), chunks):
            known.append(not spec.stored_blocks(chunk, self.chunk_size))
        return known

    @cached_property
    def _needless_by_group(self) -> tuple[bytearray, ...]:
        return tuple(bytearray() for _ in self.groups)

    def is_partial(self, ready: int, reserved: int) -> bool:
        """Whether some but not all of a group's objects of a chunk are ready, and none is being written."""
        return any(ready & mask not in (0, mask) and not reserved & mask for mask in self.masks)

    def first_needed_chunk(self, group: int, resume_tokens: int, computed_tokens: int) -> int:
        """The chunk of the first block that `group` needs; if it needs none, the chunk of `resume_tokens`."""
        spec = self.groups[group]
        needed = spec.needed_blocks(resume_tokens, computed_tokens)
        return needed.start * spec.block_size // self.chunk_size

    def first_leased_chunk(self, resume_tokens: int, computed_tokens: int) -> int:
        """The first chunk that any group with holders needs. Each group needs a suffix of the chain."""
        groups = [group for group, ranks in enumerate(self.holders) if ranks]
        needed = [self.first_needed_chunk(group, resume_tokens, computed_tokens) for group in groups]
        return min(needed, default=resume_tokens // self.chunk_size)


def bitmap(flags: bytes) -> bytes:
    """Packs flags into bits, the first into the least significant bit of the first byte."""
    if not flags:
        return b""
    digits = flags[::-1].translate(_DIGITS)
    return int(digits, 2).to_bytes((len(flags) + 7) // 8, "little")


_DIGITS = bytes.maketrans(b"\x00\x01", b"01")
