"""Prompts of random tokens for the tiny models."""

import random

VOCABULARY = range(3, 512)


def prompt(length: int, seed: int = 0) -> list[int]:
    """`length` tokens, the same for the same seed; the shorter one is a prefix of the longer."""
    draw = random.Random(seed)
    return [draw.choice(VOCABULARY) for _ in range(length)]
