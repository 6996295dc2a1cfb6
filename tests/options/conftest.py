"""What the tests of this folder share."""

from collections.abc import Iterator

import pytest
from desk import Desk
from fuzz.targets import owner


@pytest.fixture
def desk() -> Iterator[Desk]:
    with owner() as (pid, address):
        one = Desk(pid, address)
        yield one
        one.target.close()
