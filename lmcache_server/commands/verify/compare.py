"""How far two answers to one prompt are apart, and what that means. Pure."""

from lmcache_server.commands.verify.engine import Answer

FACTOR = 2.0
"""A served answer may differ by this times the difference that the engine shows without the cache."""
MAX_NOISE = 0.5
"""With more noise than this, in log probability, an engine's answers do not tell right from wrong."""


def distance(a: Answer, b: Answer) -> float:
    """The largest difference of a log probability, over all positions up to the first at which the tokens
    differ: behind it the answers continue different texts."""
    largest = 0.0
    for token_a, token_b, top_a, top_b in zip(a.tokens, b.tokens, a.tops, b.tops, strict=False):
        largest = max(largest, _apart(top_a, top_b), _apart(top_b, top_a))
        if token_a != token_b:
            break
    return largest


def _apart(top: dict[str, float], other: dict[str, float]) -> float:
    # A token that is not among the other's likeliest is there at most as likely as the last of them.
    last = min(other.values(), default=0.0)
    return max(
        (
            abs(value - other[token]) if token in other else max(0.0, value - last)
            for token, value in top.items()
        ),
        default=0.0,
    )


def is_equal(a: Answer, b: Answer) -> bool:
    """Whether two answers are the same to the last bit that vLLM tells."""
    return (a.tokens, a.tops) == (b.tokens, b.tops)


def is_within(a: Answer, b: Answer, noise: float) -> bool:
    """Whether `b`, not equal to `a`, is as near to it as the engine's own answers are."""
    return 0.0 < distance(a, b) <= FACTOR * noise
