"""An engine with a drafter. docs/drafters.md has the same rules, with the files and lines of vLLM.

A step computes drafts, too, and vLLM has blocks for them. The model accepts the leading drafts that it would
have said itself. The pages of the others hold what was never said, until they are written again.

The block table of a recurrent group ends with the running block and one scratch block for each draft. The
state after the i-th token of a step is written to the i-th of these. Once the drafts are verified, the state
at the end of a block is copied to the block that ends there. Until then that block has an older state.

vLLM hashes a block as soon as its tokens are known: while it plans a step, or when the result of one arrives.
It then offers the state in it to the connector, but only at the end of the next planning, which may have
given the block to another request.
"""

from dataclasses import dataclass, field
from typing import Any

from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

from lmcache_client.contract.geometry import RECURRENT, GroupSpec
from simulation.engine import HASH_TOKENS, Engine, Running

VOCABULARY = 50
GOOD_GUESS = 0.7

init_none_hash(sha256)


@dataclass
class Drafts:
    """What an engine with a drafter knows of a request while it has blocks."""

    tokens: list[int] = field(default_factory=list)
    """The drafts that the next step verifies."""
    marks: list[int] = field(default_factory=list)
    """What stands for all tokens up to each draft of a step."""
    accepted: int = 0
    """How many of these drafts are right."""
    has_scratch: bool = False
    states: dict[int, int] = field(default_factory=dict)
    """The block with the state after the verified tokens, by recurrent group; without an entry the one that
    they end in."""
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    """(group, from, to): states to be copied once the step is verified."""
    rejected: list[tuple[int, int, int]] = field(default_factory=list)
    """(group, block, mark): pages that end with rejected drafts, and what stands for those."""
    hashed: dict[int, int] = field(default_factory=dict)
    """How many leading blocks have been hashed, by recurrent group."""
    offers: list[tuple[int, int, int]] = field(default_factory=list)
    """(group, block, tokens) for the connector, after the next planning."""


class DraftingEngine(Engine):
    """Its model is greedy: what it says depends on what was said before, and on nothing else."""

    _hasher = staticmethod(get_request_block_hasher(HASH_TOKENS, sha256))

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._drafts: dict[str, Drafts] = {}
        self.conversations: list[list[int]] = []
        """Tokens of requests that have ended, with their answers."""

    def _of(self, sequence: Running) -> Drafts:
        return self._drafts.setdefault(sequence.request.request_id, Drafts())

    def _free(self, sequence: Running) -> None:
        # vLLM drops the offers of a request whose blocks come free.
        self._drafts.pop(sequence.request.request_id, None)
        super()._free(sequence)

    # -- planning ---------------------------------------------------------------------------------

    def _next_tokens(self, sequence: Running, budget: int) -> int:
        start, end = sequence.computed, sequence.request.num_tokens
        if end - start <= 1:
            drafts = self._of(sequence)
            del drafts.tokens[max(0, budget - 1) :]
            sequence.request.spec_token_ids = list(drafts.tokens)
            return min(budget, 1 + len(drafts.tokens))
        # Steps of a prompt end where a state can be kept, but for the last one.
        last = end // self.unified * self.unified
        if start < last:
            end = min(last, (start + budget) // self.unified * self.unified)
        return max(0, min(end - start, budget))

    def _entries(self, spec: GroupSpec, tokens: int) -> int:
        if spec.kind == RECURRENT:
            return super()._entries(spec, tokens) + self.model.drafts
        # The drafter has slots for its next drafts.
        return super()._entries(spec, tokens + self.model.drafts)

    def _moved(self, sequence: Running, spec: GroupSpec, table: list[int], count: int) -> list[int]:
        """As vLLM's MambaManager: null entries between two states, and scratch blocks stay scratch blocks."""
        if spec.kind != RECURRENT:
            return table
        skipped = -(-(sequence.computed + count) // spec.block_size) - 1
        kept = table + [0] * (skipped - len(table))
        if self._of(sequence).has_scratch:
            for position in range(len(table) - self.model.drafts, min(skipped, len(table))):
                block = self.pool.blocks[kept[position]]
                assert self.pool.is_block_writable(block), "somebody else holds a scratch block"
                self.world.count("scratch blocks moved")
                kept.append(kept[position])
                kept[position] = 0
        return kept

    def _grow(self, sequence: Running, count: int) -> bool:
        if not super()._grow(sequence, count):
            return False
        self._of(sequence).has_scratch = True
        # Drafts are not hashed.
        self._hash(sequence, min(sequence.computed + count, sequence.request.num_tokens))
        return True

    def _hash(self, sequence: Running, tokens: int) -> None:
        """vLLM's cache_blocks."""
        drafts = self._of(sequence)
        for index, spec in enumerate(self.groups):
            size = spec.block_size
            first, last = drafts.hashed.get(index, 0), tokens // size
            if spec.kind != RECURRENT or first >= last:
                continue
            blocks = [self.pool.blocks[i] for i in sequence.tables[index][:last]]
            self.pool.cache_full_blocks(sequence.request, blocks, first, last, size, index)
            drafts.hashed[index] = last
            whole = [i for i in range(first, last) if not blocks[i].is_null]
            drafts.offers += [(index, blocks[i].block_id, (i + 1) * size) for i in whole]

    def _states(self, scheduled: list[tuple[Running, int]]) -> dict[str, list[tuple[int, int, int]]]:
        used = {block for each in self.running for table in each.tables for block in table}
        offers = {}
        for sequence in self.running:
            drafts = self._of(sequence)
            if drafts.offers:
                offers[sequence.request.request_id], drafts.offers = drafts.offers, []
            for index, block, _ in offers.get(sequence.request.request_id, ()):
                if block not in sequence.tables[index]:
                    self.world.count("states offered after their block was freed")
                    self.world.count("states offered after their block was given away", block in used)
        return offers

    def _allocate(self, sequence: Running, local_blocks: list[list[int]], local: int, resume: int) -> bool:
        if not super()._allocate(sequence, local_blocks, local, resume):
            return False
        for index, spec in enumerate(self.groups):
            self._of(sequence).hashed[index] = local // spec.block_size
        return True

    def _loaded(self, sequence: Running) -> None:
        self._hash(sequence, sequence.computed)

    # -- computing --------------------------------------------------------------------------------

    def _mark(self, sequence: Running, tokens: int) -> int:
        drafted = tokens - sequence.request.num_tokens
        return self._of(sequence).marks[drafted] if drafted > 0 else super()._mark(sequence, tokens)

    def _said(self, sequence: Running, count: int) -> list[int]:
        """The next tokens that the model says."""
        said, mark = [], self._mark(sequence, sequence.request.num_tokens)
        while len(said) < count:
            said.append(mark % VOCABULARY)
            mark = hash((mark, said[-1]))
        return said

    def _compute(self, sequence: Running, count: int) -> None:
        if sequence not in self.running:
            return
        self._postprocess(sequence)
        drafts = self._of(sequence)
        for index, block, mark in drafts.rejected:
            # The slots of rejected drafts are written again.
            self._check(index, block, mark, "a page with rejected drafts")
            self._write(index, block, self._mark(sequence, sequence.computed))
        drafts.rejected.clear()
        drafts.marks = [self._mark(sequence, sequence.request.num_tokens)]
        for token in drafts.tokens:
            drafts.marks.append(hash((drafts.marks[-1], token)))
        said = self._said(sequence, len(drafts.tokens))
        agreed = [draft == token for draft, token in zip(drafts.tokens, said, strict=True)]
        drafts.accepted = [*agreed, False].index(False)
        super()._compute(sequence, count)
        end = sequence.computed + count
        valid = end - len(agreed) + drafts.accepted
        for index, spec in enumerate(self.groups):
            position = (valid - 1) // spec.block_size
            last = min((position + 1) * spec.block_size, end)
            if spec.kind != RECURRENT and valid < last:
                block = sequence.tables[index][position]
                drafts.rejected.append((index, block, self._mark(sequence, last)))

    def _state_block(self, sequence: Running, index: int) -> int:
        return self._of(sequence).states.get(index) or super()._state_block(sequence, index)

    def _write_states(self, sequence: Running, index: int, start: int, end: int) -> None:
        drafts, size = self._of(sequence), self.groups[index].block_size
        first = end - len(drafts.tokens)
        blocks = sequence.tables[index][(end - 1) // size :][: 1 + len(drafts.tokens)]
        for tokens, block in enumerate(blocks, first):
            self._write(index, block, self._mark(sequence, tokens))
        drafts.states[index] = blocks[drafts.accepted]
        boundary = (first + drafts.accepted) // size * size
        if drafts.tokens and boundary >= first:
            source, target = blocks[boundary - first], sequence.tables[index][boundary // size - 1]
            drafts.copies += [(index, source, target)] if source != target else []

    def _verify(self, scheduled: list[tuple[Running, int]]) -> None:
        for sequence, _ in scheduled:
            if sequence in self.running:
                self._postprocess(sequence)

    def _postprocess(self, sequence: Running) -> None:
        """What vLLM does once it knows which drafts were right."""
        drafts = self._of(sequence)
        for index, source, target in drafts.copies:
            self.world.count("states copied after a step")
            for rank in range(self.model.ranks):
                for old, new in zip(
                    self._pages(rank, index, source), self._pages(rank, index, target), strict=True
                ):
                    new[:] = old
        drafts.copies.clear()

    def _advance(self, sequence: Running, count: int) -> None:
        if sequence not in self.running:
            return
        request, drafts = sequence.request, self._of(sequence)
        sequence.computed += count - len(drafts.tokens) + drafts.accepted
        self.world.count("drafts accepted", drafts.accepted)
        self.world.count("drafts rejected", len(drafts.tokens) - drafts.accepted)
        if sequence.computed >= request.num_tokens:
            left = request.max_tokens - request.num_output_tokens
            request.append_output_token_ids(self._said(sequence, drafts.accepted + 1)[:left])
            drafts.tokens = self._guess(sequence)
            if left <= drafts.accepted + 1:
                self.conversations.append(list(request.all_token_ids))
                self._finish(sequence)
                return
        self._keep_prefix(sequence)
        self._hash(sequence, sequence.computed)

    def _guess(self, sequence: Running) -> list[int]:
        draw = self.world.random
        said = self._said(sequence, draw.randint(0, self.model.drafts))
        return [token if draw.random() < GOOD_GUESS else draw.randrange(VOCABULARY) for token in said]
