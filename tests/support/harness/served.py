"""What most tests of engines do again and again."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from harness.clients import go_on, stop
from harness.engine import Engine, Result
from harness.server import LMCacheServer


def served(
    engine: Engine, tokens: Sequence[int], external_tokens: int, max_tokens: int = 8, **options: Any
) -> Result:
    """The answer to a prompt of which the engine has forgotten everything; so many tokens of it come from the
    server."""
    assert engine.reset_prefix_cache()
    result = engine.run(tokens, max_tokens, **options)
    assert (result.external_tokens, result.local_tokens) == (external_tokens, 0)
    return result


def from_own_cache(
    engine: Engine, server: LMCacheServer, tokens: Sequence[int], resume: int, *before: Sequence[int]
) -> Result:
    """vLLM's own answer from its prefix cache, into which it has computed the prompts `before`. It resumes at
    the same token as from the server, and so rounds the same way."""
    server.clear()
    assert engine.reset_prefix_cache()
    for each in before:
        engine.run(each)
        server.clear()
    local = engine.run(tokens)
    assert (local.external_tokens, local.local_tokens) == (0, resume)
    return local


def held_blocks(engine: Engine) -> int:
    """How many blocks somebody holds, beside vLLM's null block."""
    info = engine.info()
    return int(info["num_blocks"] - 1 - info["free_blocks"])


def chunk_size(server: LMCacheServer) -> int:
    """Of the one engine that uses the server."""

    def used(status: dict[str, Any]) -> list[int]:
        return [each["chunk_size"] for each in status["namespaces"] if each["engines"]]

    # The engine before may have ended a moment ago.
    server.wait_for_status(lambda status: len(used(status)) == 1)
    return used(server.status())[0]


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    stop(pid)
    try:
        yield
    finally:
        go_on(pid)


def step_output(
    scheduled: dict[str, int],
    *,
    new: Sequence[tuple[str, int]] = (),
    cached: Sequence[tuple[str, int]] = (),
    tables: Any = {}.get,
    states: dict[str, Any] | None = None,
) -> Any:
    """What vLLM's scheduler says of a step: the tokens of each request, how many a request had that begins
    here or goes on, their block tables, and states at block boundaries."""
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=each) for name, each in new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, _ in cached], num_computed_tokens=[each for _, each in cached]
        ),
        kv_connector_block_state=SimpleNamespace(get_block_ids=tables, boundary_state_offloads=states or {}),
    )
