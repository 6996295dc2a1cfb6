"""Questions to an engine that speculates: its answers, its drafts, and how many of them were right."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from harness.engine import Engine, Result
from harness.served import held_blocks
from harness.server import LMCacheServer

NGRAM: dict[str, Any] = {"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 1}


class Answer(NamedTuple):
    result: Result
    drafts: list[list[int]]
    accepted: float

    @property
    def came_from(self) -> tuple[int, int]:
        """The tokens that the server and vLLM's own cache had."""
        return self.result.external_tokens, self.result.local_tokens

    @property
    def all(self) -> tuple[object, ...]:
        return self.result.output, self.drafts, self.accepted

    @property
    def said(self) -> tuple[object, ...]:
        """All but the drafts of the steps that compute the prompt: nobody uses these, and there may be more
        such steps after one resume than after another."""
        tokens, accepted = len(self.result.tokens), int(self.accepted)
        return self.result.output, self.accepted, self.drafts[-(tokens - accepted - 1) :]


def ask(engine: Engine, tokens: Sequence[int], length: int) -> Answer:
    name = "vllm:spec_decode_num_accepted_tokens"
    before = engine.metrics().get(name, 0.0)
    engine.drafts()
    result = engine.run(tokens, length)
    return Answer(result, engine.drafts(), engine.metrics().get(name, 0.0) - before)


def again(engine: Engine, tokens: Sequence[int], length: int, external_tokens: int) -> Answer:
    """The answer when the engine has forgotten everything; so many tokens come from the server."""
    assert engine.reset_prefix_cache()
    answer = ask(engine, tokens, length)
    assert answer.came_from == (external_tokens, 0)
    return answer


def own(
    engine: Engine,
    server: LMCacheServer,
    tokens: Sequence[int],
    length: int,
    resume: int,
    first: Sequence[int],
    answer_tokens: int = 1,
) -> Answer:
    """vLLM's answer from its own prefix cache, which ends at `resume` after `first` and an answer to it."""
    forget(engine, server)
    ask(engine, first, answer_tokens)
    server.clear()
    answer = ask(engine, tokens, length)
    assert answer.came_from == (0, resume)
    return answer


def forget(engine: Engine, server: LMCacheServer) -> None:
    server.clear()
    assert engine.reset_prefix_cache()


def ask_while_the_server_dies(
    engine: Engine, server: LMCacheServer, tokens: Sequence[int], length: int
) -> Answer:
    """The server dies between the lookup and the load. Afterwards the engine holds no block."""
    engine.call("kill_server_at_load", pid=server.pid)
    failed = again(engine, tokens, length, 0)
    assert held_blocks(engine) == 0
    return failed
