"""Fixtures of the tests against a real server process."""

from collections.abc import Callable

import pytest
from harness.server import LMCacheServer


@pytest.fixture
def server(start_server: Callable[..., LMCacheServer]) -> LMCacheServer:
    return start_server(l1_size_gb=0.06)
