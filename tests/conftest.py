"""Fixtures for tests with real processes; see tests/support/harness."""

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from harness import forks
from harness.engine import Engine
from harness.rawclient import closes_engines
from harness.server import LMCacheServer
from hypothesis import HealthCheck, settings

pytest_plugins = ("harness.cpu_time", "harness.served")  # a plugin's failed checks show their values


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fork-workers", action="store_true", help="from one process that has imported vLLM")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    option = session.config.option
    if option.fork_workers and not hasattr(session.config, "workerinput"):
        option.tx = forks.share(len(option.tx))


# Needs a GPU, or what stands in for one: tests/server/test_gpu_on_stand_in.py runs it.
collect_ignore = ["gpu"]

# A test run in the background (nohup, a shell with &) ignores these, and so would all that it starts.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

# How fast the machine is at the moment is no property of the code.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


# What takes longest begins first, so that no worker ends long before another.
ORDER = ("simulation", "deploy", "engine", "server", "options", "service", "unit")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: ORDER.index(item.path.relative_to(Path(__file__).parent).parts[0]))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Ends, in reverse order, what a test entered."""
    with ExitStack() as entered:
        yield entered


@pytest.fixture(autouse=True)
def _no_engine_is_left() -> Iterator[None]:
    with closes_engines():
        yield


@pytest.fixture
def start_server(stack: ExitStack) -> Callable[..., LMCacheServer]:
    """Call it with the server's options to get a ready server that ends with the test."""

    def start(**flags: Any) -> LMCacheServer:
        return stack.enter_context(LMCacheServer(**flags))

    return start


@pytest.fixture
def server(start_server: Callable[..., LMCacheServer]) -> LMCacheServer:
    """A server with its defaults and 0.5 GB, for one test."""
    return start_server()


@pytest.fixture
def start_engine(stack: ExitStack) -> Callable[..., Engine]:
    """Call it as `Engine(...)` to get a ready engine that ends with the test."""

    def start(model: str, **options: Any) -> Engine:
        return stack.enter_context(Engine(model, **options))

    return start
