"""Finds the resume point: how far a chain of chunks can be restored."""

from collections.abc import Sequence

from lmcache_client.contract.geometry import FULL, GroupSpec


def resume_point(
    groups: Sequence[GroupSpec],
    chunk_size: int,
    present: Sequence[Sequence[bool] | bytes],
    computed_tokens: int,
    limit_tokens: int,
) -> int:
    """The largest resume point in tokens, a multiple of `chunk_size`, or 0 if there is none.

    `present` has one flag per group and chunk: whether every shard can restore that chunk of that group.
    The engine itself holds `computed_tokens`, a multiple of the unified block size; the result is larger
    than that and at most `limit_tokens`.
    """
    flags = [bytes(group_flags) for group_flags in present]
    computed_chunks = computed_tokens // chunk_size
    chunks = min(limit_tokens // chunk_size, *map(len, flags))
    windowed = []
    for group, group_flags in zip(groups, flags, strict=True):
        if group.kind == FULL:
            missing = group_flags.find(0, computed_chunks, max(chunks, 0))
            chunks = chunks if missing < 0 else missing
        else:
            windowed.append((group, group_flags))
    while chunks > computed_chunks:
        for group, group_flags in windowed:
            needed = group.needed_blocks(chunks * chunk_size, computed_tokens)
            missing = group_flags.rfind(0, needed.start * group.block_size // chunk_size, chunks)
            if missing >= 0:
                # As the resume point grows, the first token that a group needs never moves back. So every
                # resume point between the missing chunk and here needs that chunk too, and is skipped.
                chunks = missing
                break
        else:
            return chunks * chunk_size
    return 0


def group_ends(
    groups: Sequence[GroupSpec],
    chunk_size: int,
    held: Sequence[bytes],
    computed_tokens: int,
    limit_tokens: int,
) -> tuple[int, ...]:
    """How far each group alone can be restored, in tokens. `held` has, per group, a bitmap as in Found.

    The hit ends before the limit if one of these ends does: that group is the reason.
    """
    ends = []
    for group, bitmap in zip(groups, held, strict=True):
        digits = f"{int.from_bytes(bitmap, 'little'):b}"[::-1].ljust(limit_tokens // chunk_size, "0")
        flags = [digit == "1" for digit in digits]
        point = resume_point([group], chunk_size, [flags], computed_tokens, limit_tokens)
        ends.append(max(point, computed_tokens))
    return tuple(ends)


def fetch_patience_s(num_tokens: int) -> float:
    """How many seconds a lookup for so many tokens may wait for tiers. Both sides use this."""
    return min(30.0, 2.0 + num_tokens / 10_000)
