"""Who may make the server forget, and what."""

from desk import Desk
from test_invariants import is_refused, lookup, store

from lmcache_client.contract import messages
from lmcache_client.contract.messages import Clear, Cleared


def test_a_scheduler_clears_its_own_namespace_and_no_other(desk: Desk) -> None:
    desk.join(0)
    desk.join(1)
    desk.join(2, "another model")
    for who in (0, 2):
        desk.ask(who, store(1))
    desk.end_copies()
    assert desk.ask(1, Clear()) == Cleared(1)
    assert lookup(desk, 0, 1).resume_tokens == 0
    assert lookup(desk, 2, 1).resume_tokens > 0, "another model keeps its pages"


def test_a_store_that_was_being_copied_is_not_there_after_a_clear_of_its_namespace(desk: Desk) -> None:
    desk.join(0)
    desk.ask(0, store(1))
    assert desk.ask(0, Clear()) == Cleared(1)
    desk.end_copies()
    assert lookup(desk, 0, 1).resume_tokens == 0


def test_only_a_client_that_greeted_clears_and_everything_only_if_it_says_so(desk: Desk) -> None:
    desk.join(0)
    desk.ask(0, store(1))
    desk.end_copies()
    for everything in (False, True):
        assert is_refused(desk.ask(5, Clear(everything)), messages.NOT_REGISTERED)
    desk.hello(5)
    assert is_refused(desk.ask(5, Clear()), messages.NOT_REGISTERED)
    assert lookup(desk, 0, 1).resume_tokens > 0
    assert desk.ask(5, Clear(everything=True)) == Cleared(1)
    assert lookup(desk, 0, 1).resume_tokens == 0
