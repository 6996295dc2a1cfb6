"""Which requests a step looks at: those that may complete a chunk."""

from typing import Any

from harness.served import step_output
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from lmcache_client.connector.offers import Offers
from lmcache_client.connector.request import Tracked
from lmcache_client.contract.geometry import FULL, GroupSpec


class Decoding:
    """A request with 16 tokens of a prompt that computes one token in each step, in blocks of 4."""

    def __init__(self) -> None:
        self.request = Request("r", list(range(16)), SamplingParams(max_tokens=64), None)
        self.tracked = Tracked(self.request)
        self.tracked.reset(1, 8)
        self.offers = Offers((GroupSpec(FULL, 4, 0, "", ()),))
        self.looked_at = 0
        self.computed = 0

    def step(self, scheduled: int = 1, generation: int = 1, has_tables: bool = True) -> list[int]:
        """The numbers of the chunks that are stored."""
        blocks = list(range(1, 17))
        tables: Any = {"r": (blocks,)} if has_tables else {}
        new = [("r", 0)] if not self.computed else []
        cached = [("r", self.computed)] if self.computed else []
        output = step_output({"r": scheduled}, new=new, cached=cached, tables=tables.get)
        found = self.offers.of_step(output, {"r": self.tracked}, self._current, generation)
        self.computed += scheduled
        self.request.append_output_token_ids([7])
        return [each.chunk_index for _, each in found]

    def _current(self, _request_id: str) -> Tracked:
        self.looked_at += 1
        return self.tracked


def test_a_decoding_request_is_looked_at_when_a_chunk_is_complete() -> None:
    one = Decoding()
    assert one.step(16) == [0, 1]
    assert [one.step() for _ in range(16)] == [*[[]] * 7, [2], *[[]] * 7, [3]]
    assert one.looked_at == 3


def test_after_a_new_registration_every_request_is_looked_at() -> None:
    """The server may have another chunk size now."""
    one = Decoding()
    one.step(16)
    one.tracked.reset(2, 4)
    one.tracked.due_tokens = 24
    assert one.step(generation=2) == [0, 1, 2, 3]
    assert [one.step(generation=2) for _ in range(3)] == [[], [], [4]]


def test_a_request_whose_blocks_are_not_told_is_looked_at_again() -> None:
    one = Decoding()
    assert not one.step(16, has_tables=False)
    assert one.step() == [0, 1]


def test_a_prompt_that_is_computed_in_parts_is_looked_at_again() -> None:
    one = Decoding()
    assert [one.step(6), one.step(6), one.step(4)] == [[], [0], [1]]
