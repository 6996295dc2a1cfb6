"""The wait that all tests share: it returns what it waited for, and says what did not happen."""

import pytest
from harness.waiting import wait_until


def test_it_returns_the_first_value_that_is_true_and_asks_once_even_when_there_is_no_time() -> None:
    values = iter((0, "", None, "there", "too late"))
    assert wait_until(lambda: next(values), interval_s=0.0) == "there"
    assert wait_until(lambda: True, timeout_s=-1.0)


@pytest.mark.parametrize("what", ["the moon is full", lambda: "the moon is full"])
def test_it_fails_with_what_did_not_happen_and_the_time(what) -> None:
    with pytest.raises(AssertionError, match=r"^waited 0\.01 s in vain until the moon is full$"):
        wait_until(lambda: 0, timeout_s=0.01, what=what, interval_s=0.001)
