"""`lmcache warm` and `lmcache pin`: send prompts through vLLM, and ask the server what it holds of each."""

import secrets
import time
from collections.abc import Callable, Iterable, Sequence

from lmcache_client.contract.messages import Pinned
from lmcache_server.commands.control import ControlError
from lmcache_server.commands.verify.engine import VllmServer
from lmcache_server.commands.verify.prompts import Case

SETTLE_S = 3.0
"""How long to wait for the next chunk of a prompt. One that is shorter than a chunk has none."""
POLL_S = 0.1

Ask = Callable[[str, str], Pinned]
"""Sends the server a Pin with this name and request."""


def send(
    vllm: VllmServer, cases: Iterable[Case], ask: Ask, name: str, done: Callable[[str], None]
) -> list[Pinned]:
    """Sends each prompt once, one after the other, pins it under `name` unless that is empty, and passes a
    line about it to `done`. Returns what the server held of each when it had been stored."""
    results = []
    for case in cases:
        request = secrets.token_hex(16)
        try:
            ask("", request)
            answer = vllm.ask(case.prompt, 1, request=request)
            held = _settled(ask, request)
            held = ask(name, request) if name else held
        except ControlError as error:
            raise ControlError(f"{case.name}: {error}") from None
        results.append(held)
        done(
            f"{case.name}, {len(answer.prompt_ids):,} tokens: {held.resume_tokens:,} can be restored, "
            f"{held.held} of {held.chunks} chunks are there"
        )
    return results


def _settled(ask: Ask, request: str) -> Pinned:
    """What the server holds once the stores of a prompt have ended. They begin after vLLM's answer."""
    held, changed_s = Pinned(0, 0, 0, 0), time.monotonic()
    while time.monotonic() < changed_s + SETTLE_S:
        before, held = held, ask("", request)
        if held.held == held.chunks > 0 and _resumes_at_the_end(held):
            return held
        if held != before:
            changed_s = time.monotonic()
        time.sleep(POLL_S)
    return held


def _resumes_at_the_end(held: Pinned) -> bool:
    """vLLM always computes the last token, so it never resumes behind a last chunk that ends the prompt."""
    return held.resume_tokens > 0 and held.resume_tokens >= (held.chunks - 1) * held.chunk_size


def verdict(results: Sequence[Pinned]) -> tuple[bool, str]:
    """Whether the server holds all prompts, and a sentence about it."""
    longer = [held for held in results if held.chunks]
    if not longer:
        return False, (
            "the server saw no chunk of these prompts: check that vLLM uses it (`lmcache status`), that they "
            "are longer than its chunk size, and that no proxy replaces the header X-Request-Id"
        )
    # Models without full attention have only some of the chunks, where states are.
    lacking = sum(not (held.held == held.chunks or _resumes_at_the_end(held)) for held in longer)
    if lacking:
        told = f"{lacking} of {len(longer)} prompts are not there as a whole, because L1 had no room for them"
        return False, f"{told}: give the server more memory with --l1-size-gb"
    tokens = sum(held.resume_tokens for held in longer)
    return True, f"{tokens:,} tokens of {len(longer)} prompts can be restored"
