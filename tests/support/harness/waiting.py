"""Waiting for what happens by itself."""

import contextlib
import http.client
import time
import urllib.request
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")
PATIENCE_S = 120.0
"""How long a test waits for what takes milliseconds on a quiet machine."""


def wait_until(
    condition: Callable[[], Value],
    timeout_s: float = PATIENCE_S,
    what: str | Callable[[], str] = "this happens",
    interval_s: float = 0.02,
) -> Value:
    """The first value of `condition` that is true. Raises AssertionError when there is none in time.

    `what` goes on where the sentence "waited 10 s in vain until" ends; a function is asked when it is over.
    """
    limit_s = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > limit_s:
            sentence = what if isinstance(what, str) else what()
            raise AssertionError(f"waited {timeout_s:g} s in vain until {sentence}")
        time.sleep(interval_s)
    return value


def timed(work: Callable[[], Value]) -> tuple[Value, float]:
    """What `work` returns, and how many seconds it took. For what must not end too soon: how late it may end
    depends on the machine."""
    started_s = time.monotonic()
    value = work()
    return value, time.monotonic() - started_s


def get(url: str) -> str:
    """The body at a URL; raises OSError unless the answer is a success."""
    with contextlib.suppress(ConnectionResetError):
        return _body(url)
    # The server gives a client 5 s to ask, which this process may lose between two of its lines.
    return _body(url)


def _body(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as response:
        body: bytes = response.read()
    return body.decode()


def answers(url: str) -> bool:
    try:
        get(url)
    except (OSError, http.client.HTTPException):
        return False
    return True
