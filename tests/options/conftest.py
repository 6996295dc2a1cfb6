"""What the tests of this folder share."""

import asyncio
from collections.abc import Iterator

import pytest
from desk import desk

__all__ = ["desk"]


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()
