"""What `make test` leaves to `make test-all`."""

from collections.abc import Iterable
from typing import Any

import pytest


def all_but(names: Iterable[str], *long: str) -> list[Any]:
    """Parameters of a test, of which those named `long` run in `make test-all` only."""
    names = list(names)
    assert set(long) < set(names)
    return [pytest.param(name, marks=pytest.mark.long) if name in long else name for name in names]
