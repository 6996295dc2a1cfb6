"""Admission: the choice of the objects of a prompt that are worth storing.

Full attention reads every chunk, so every chunk is stored. A window or a state is only read by a request that
resumes right behind it, and requests resume at few places: where an earlier prompt ended, and where prompts
that share a beginning part. Windows and states at every chunk would fill most of L1 and never be read.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from lmcache_client.contract.geometry import CHUNKED_LOCAL, FULL, RECURRENT, GroupSpec

CHECKPOINT_SHARE = 20
"""Between two checkpoints, objects of full attention take at least this many times the size of one."""


class Prompt(NamedTuple):
    """Where requests are likely to resume in a prompt, in chunks.

    `end` is the last place at which the same prompt could resume: the number of whole chunks before its last
    token. `fork` is the number of leading chunks that the server or the engine had before this prompt came; 0
    if that is unknown.
    `spacing` is the distance from one recurrent state that the engine offers to the next.
    """

    end: int
    fork: int
    spacing: int = 1


class Admission(NamedTuple):
    """Which objects of a model's `groups` are stored. Every rank of an engine gets the same answers.

    `interval` is the number of chunks between two checkpoints, which help the first prompt that parts from a
    known one in its middle; 0 admits everything. `all_states` admits every recurrent state, for an engine
    that offers only those at ends and forks.
    """

    groups: tuple[GroupSpec, ...]
    chunk_size: int
    interval: int = 0
    all_states: bool = False

    def admits(self, group: int, chunk: int, prompt: Prompt) -> bool:
        """Whether to store the object of this group and chunk."""
        spec = self.groups[group]
        if spec.kind == FULL or not self.interval or (spec.kind == RECURRENT and self.all_states):
            return True
        # The answer may end anywhere, so every chunk that it completes may be the last one.
        if chunk >= self._first_chunk(spec, prompt.end):
            return True
        checkpoint = math.ceil((chunk + 1) / self.interval) * self.interval
        return self._serves(spec, chunk, prompt.fork, prompt) or self._serves(spec, chunk, checkpoint, prompt)

    def _first_chunk(self, spec: GroupSpec, resume: int) -> int:
        """The first chunk whose object a resume after `resume` chunks reads."""
        return spec.first_needed_token(resume * self.chunk_size) // self.chunk_size

    def _serves(self, spec: GroupSpec, chunk: int, resume: int, prompt: Prompt) -> bool:
        """Whether a request that would resume after `resume` chunks reads this chunk's object. If the engine
        has no state right there, the request resumes at the last one before."""
        if spec.kind == RECURRENT:
            return chunk < resume <= chunk + prompt.spacing
        return self._first_chunk(spec, resume) <= chunk < resume


def checkpoint_interval(groups: Sequence[GroupSpec], block_bytes: Sequence[int], chunk_size: int) -> int:
    """The number of chunks between two checkpoints, the same for all groups, because a resume needs them all.

    `block_bytes` has the bytes of one block of each group. 0 if the model has no full attention, or
    nothing else: then everything is stored.
    """
    chunk_bytes = checkpoint_bytes = 0
    for group, size in zip(groups, block_bytes, strict=True):
        if group.kind == FULL:
            chunk_bytes += chunk_size // group.block_size * size
            continue
        # A chunked-local group needs most right before the end of an attention chunk.
        tokens = group.window if group.kind == CHUNKED_LOCAL else max(group.window - 1, 1)
        checkpoint_bytes += math.ceil(tokens / group.block_size) * size
    if not chunk_bytes or not checkpoint_bytes:
        return 0
    return max(2, math.ceil(CHECKPOINT_SHARE * checkpoint_bytes / chunk_bytes))


def stored_factor(groups: Sequence[GroupSpec], block_bytes: Sequence[int], chunk_size: int) -> float:
    """The bytes that a long prompt takes if everything is stored, divided by those of its full attention. 0
    for a model without full attention, of which everything is always stored."""
    chunk = max((group.window for group in groups), default=0) // chunk_size + 1
    sizes = [
        (group.kind, len(group.stored_blocks(chunk, chunk_size)) * size)
        for group, size in zip(groups, block_bytes, strict=True)
    ]
    full = sum(size for kind, size in sizes if kind == FULL)
    return sum(size for _, size in sizes) / full if full else 0.0


def known_chunks(groups: Sequence[GroupSpec], held: Sequence[bytes]) -> int:
    """How many leading chunks of a prompt the server has in full attention. `held` is that of a Found."""
    known = -1
    for group, bits in zip(groups, held, strict=True):
        if group.kind == FULL:
            known &= int.from_bytes(bits, "little")
    return (~known & known + 1).bit_length() - 1 if known >= 0 else 0
