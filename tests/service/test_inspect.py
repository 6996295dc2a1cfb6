"""Inspect: what is told of a chain of chunks, and that telling it changes nothing. The real router."""

import pytest
from desk import USER, Desk, inspect, is_refused, key, serving
from fuzz.messages import CHUNK_SIZE
from msgspec.structs import replace

from lmcache_client.contract import messages
from lmcache_client.contract.control import Inspect, Inspected
from lmcache_client.contract.keys import ModelTag
from lmcache_client.contract.messages import Clear, Lookup
from lmcache_server.core.layout import Layout
from lmcache_server.service.engines import namespace_summary

__all__ = ["serving"]


def test_it_leases_renews_and_counts_nothing(serving: Desk) -> None:
    """So what was asked about is evicted as if nobody had asked."""
    frames, cache = serving.target.l1.num_frames, serving.target.cache
    serving.stored(*range(frames))
    before = serving.target.report.status()
    for _ in range(3):
        assert inspect(serving, 0) == Inspected(CHUNK_SIZE, (b"\1",), ())
    after = serving.target.report.status()
    for report in (before, after):
        del report["uptime_s"], report["sessions"]
    assert after == before
    assert cache.num_leases == 0
    assert serving.target.metrics.value("lmcache_tokens_requested_total") == 0
    serving.stored(1000)
    assert not serving.has(0, 0), "the oldest one went, although it was asked about"
    assert serving.has(0, 1)


def test_who_may_ask_and_what(serving: Desk) -> None:
    assert is_refused(serving.ask(9, Inspect("engine 0", (), 0)), messages.NOT_REGISTERED)
    assert is_refused(inspect(serving, 1, engine="engine 7"), messages.NOT_REGISTERED)
    short = Inspect("engine 0", (key(1),), CHUNK_SIZE + 1)
    assert is_refused(serving.ask(USER, short), messages.BAD_REQUEST)
    serving.leave(0)
    refused = inspect(serving, 1)
    assert isinstance(refused, messages.Refused)
    assert refused.message == "engine 'engine 0' is not connected any more"


def test_it_agrees_with_a_lookup(serving: Desk) -> None:
    """For every prefix of a chain that has gaps."""
    serving.stored(1, 2, 3, 5)
    for length in range(1, 7):
        numbers, limit = range(1, length + 1), length * CHUNK_SIZE
        told = inspect(serving, *numbers)
        question = Lookup("r", tuple(map(key, numbers)), 0, limit, limit + 1)
        found, traced = (serving.ask(0, replace(question, why=why)) for why in (False, True))
        assert isinstance(told, Inspected)
        assert isinstance(found, messages.Found)
        assert isinstance(traced, messages.Found)
        assert (told.resume_tokens, told.held) == (found.resume_tokens, found.held)
        assert sum(tokens for _, tokens in told.missed) == limit - told.resume_tokens
        assert (found.missed, traced.missed) == ((), told.missed), "only a traced request is told the reasons"
    serving.ask(USER, Clear(everything=True))


@pytest.mark.parametrize(
    ("said", "tokens"), [("1", 1), ("12", 12), ("", 0), ("-1", 0), ("x", 0), ("²", 0), ("9" * 4096, 0)]
)
def test_whatever_an_engine_says_of_its_lookahead_the_report_has_a_small_number(said, tokens):
    model = ModelTag("m", (("lookahead", said),), 1, 1)
    assert namespace_summary(model, Layout(b"", 16, (), ()), 0)["lookahead_tokens"] == tokens
