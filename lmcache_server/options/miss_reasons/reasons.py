"""Why a lookup did not find more: what became of the chunks behind its resume point."""

import functools
import operator
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from lmcache_client.contract.geometry import FULL
from lmcache_client.contract.hits import group_ends
from lmcache_server.core.layout import Layout
from lmcache_server.telemetry.metrics import REASONS

NOT_STORED, EVICTED, TIER_DOWN, TIER_LATE, NO_STATE, PARTIAL = REASONS
SLOTS = 1 << 19


class Evicted:
    """The chunks that were evicted last, in a table of fixed size. Each has one slot, which a later one may
    take. Two chunks hardly ever have the same name."""

    def __init__(self, slots: int = SLOTS) -> None:
        self._names = array("Q", bytes(8 * slots))

    def add(self, namespace: bytes, key: bytes) -> None:
        name = _name(namespace, key)
        self._names[name % len(self._names)] = name

    def has(self, namespace: bytes, key: bytes) -> bool:
        name = _name(namespace, key)
        return self._names[name % len(self._names)] == name

    def leading(self, namespace: bytes, keys: Sequence[bytes]) -> int:
        """How many chunks at the beginning of a chain were evicted. A chain is evicted from its tail, so only
        a few of them are looked up."""
        return bisect_left(range(len(keys)), True, key=lambda place: not self.has(namespace, keys[place]))


def missed_tokens(
    layout: Layout,
    keys: Sequence[bytes],
    held: Sequence[bytes],
    start: int,
    limit: int,
    evicted: Evicted,
    is_partial: Callable[[bytes], bool],
    is_tier_down: bool = False,
    in_tiers: int = 0,
) -> dict[str, int]:
    """The tokens from `start` to `limit`, which a lookup of `keys` did not find, by reason. Reasons without
    tokens are left out. `held` is that of the lookup's Hit; the engine holds what lies before `start`. With
    `is_tier_down`, a tier that may have all of it is left alone. Tiers have said that they have what a resume
    at `in_tiers` needs."""
    late, size = max(min(in_tiers, limit) - start, 0), layout.chunk_size
    start += late
    known = _held_chunks(layout, held, start // size)
    beyond = keys[known : limit // size]
    if beyond and is_partial(beyond[0]):
        reason, until = PARTIAL, known + len(beyond)
    else:
        reason = TIER_DOWN if is_tier_down else EVICTED
        until = known + (len(beyond) if is_tier_down else evicted.leading(layout.namespace, beyond))
    ends = [min(max(start, chunks * size), limit) for chunks in (known, until)]
    tokens = {NO_STATE: ends[0] - start, reason: ends[1] - ends[0], NOT_STORED: limit - ends[1]}
    tokens[TIER_LATE] = late
    return {reason: number for reason, number in tokens.items() if number}


def ending_groups(
    layout: Layout, held: Sequence[bytes], ready: Sequence[int], limit: int
) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """As `ends` of Inspected. `ready` has, per chunk, the bits of its ready objects."""
    size = layout.chunk_size
    for group, end in enumerate(group_ends(layout.groups, size, held, 0, limit)):
        if end // size < limit // size:
            mask = layout.masks[group]
            behind = (bits for bits in ready[end // size : limit // size] if bits & mask not in (0, mask))
            bits = next(behind, mask)
            yield group, end, tuple(r for r in layout.holders[group] if not bits >> layout.bit(group, r) & 1)


def _held_chunks(layout: Layout, held: Sequence[bytes], first: int) -> int:
    """How many leading chunks full attention has, where the engine has the `first` ones. Without full
    attention, the end of the last chunk that any group has."""
    bits = [int.from_bytes(bitmap, "little") for bitmap in held]
    full = [each for each, group in zip(bits, layout.groups, strict=True) if group.kind == FULL]
    if not full:
        return max(first, *(each.bit_length() for each in bits))
    known = functools.reduce(operator.and_, full) | (1 << first) - 1
    return (~known & known + 1).bit_length() - 1


def _name(namespace: bytes, key: bytes) -> int:
    # Keys and namespaces are digests.
    return int.from_bytes(namespace[:8], "little") ^ int.from_bytes(key[:8], "little")
