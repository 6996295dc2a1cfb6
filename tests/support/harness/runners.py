"""vLLM's model runners: the first, which a CPU has by itself, and the second, which GPUs use."""

import pytest

SECOND = {"second_runner": True}
on_both_runners = pytest.mark.parametrize("runner", [{}, SECOND], ids=["first", "second"])
"""A test gets `runner`, arguments of its engines."""
