"""Measures how far two answers to one prompt are apart, and judges it. Pure functions."""

from lmcache_server.commands.verify.engine import Answer

FACTOR = 2.0
"""A served answer may differ by this factor times the engine's own noise."""
MAX_NOISE = 0.5
"""An engine whose answers differ by more than this, in log probability, cannot be judged."""


def distance(a: Answer, b: Answer) -> float:
    """The largest difference of a log probability. Counts the positions up to the first one where the tokens
    differ; after it, the answers continue different texts."""
    largest = 0.0
    for token_a, token_b, top_a, top_b in zip(a.tokens, b.tokens, a.tops, b.tops, strict=False):
        largest = max(largest, _apart(top_a, top_b), _apart(top_b, top_a))
        if token_a != token_b:
            break
    return largest


def _apart(top: dict[str, float], other: dict[str, float]) -> float:
    # A token missing among the other's likeliest tokens is at most as likely as the last of those.
    last = min(other.values(), default=0.0)
    return max((abs(value - other.get(token, min(value, last))) for token, value in top.items()), default=0.0)


def is_equal(a: Answer, b: Answer) -> bool:
    """Whether two answers are the same to the last bit that vLLM sends."""
    return (a.tokens, a.tops) == (b.tokens, b.tops)


def is_within(a: Answer, b: Answer, noise: float) -> bool:
    """Whether `b` differs from `a`, but no more than the engine's own answers may."""
    return 0.0 < distance(a, b) <= FACTOR * noise
