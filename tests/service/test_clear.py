"""Who may make the server forget, and what."""

from desk import Desk, is_refused, store
from msgspec import structs

from lmcache_client.contract import messages
from lmcache_client.contract.keys import tenant_id
from lmcache_client.contract.messages import Clear, Cleared, Store


def test_a_scheduler_clears_its_own_namespace_and_who_greeted_everything_if_he_says_so(
    desk: Desk,
) -> None:
    desk.join(0)
    desk.join(1)
    desk.join(2, "another model")
    for who in (0, 2):
        desk.stored(1, who=who)
    for everything in (False, True):
        assert is_refused(desk.ask(5, Clear(everything)), messages.NOT_REGISTERED)
    desk.hello(5)
    assert is_refused(desk.ask(5, Clear()), messages.NOT_REGISTERED)
    assert desk.has(0, 1)
    assert desk.ask(1, Clear()) == Cleared(1)
    assert not desk.has(0, 1)
    assert desk.has(2, 1), "another model keeps its pages"
    assert desk.ask(5, Clear(everything=True)) == Cleared(1)
    assert not desk.has(2, 1)


def test_one_model_or_one_namespace_is_cleared_and_no_other(desk: Desk) -> None:
    desk.join(0)
    desk.join(1, "another model")
    for who in (0, 1):
        desk.stored(1, who=who)
    names = {each["model"]: each["namespace"] for each in desk.target.report.status()["namespaces"]}
    for absent in (Clear(True, "mode"), Clear(True, "", "xyz"), Clear(True, "model", names["another model"])):
        assert is_refused(desk.ask(0, absent), messages.BAD_REQUEST)
    assert desk.ask(0, Clear(True, "another model")) == Cleared(1)
    assert not desk.has(1, 1)
    assert desk.has(0, 1)
    assert desk.ask(0, Clear(True, "", names["another model"][:12])) == Cleared(0)
    assert desk.ask(0, Clear(True, "model", names["model"])) == Cleared(1)


def test_the_chunks_of_one_tenant_are_cleared_and_no_others(desk: Desk) -> None:
    desk.join(0)
    desk.join(1, "another model")
    for who in (0, 1):
        for number, tenant in ((1, "first"), (2, "second"), (3, None)):
            (stored,) = store(number).objects
            desk.ask(who, Store((structs.replace(stored, tenant=tenant_id(tenant)),)))
    desk.end_copies()
    names = {name: tenant_id(name).hex() for name in ("first", "second", "third")}
    assert desk.ask(0, Clear(True, "", "", names["third"])) == Cleared(0)
    assert desk.ask(0, Clear(True, "model", "", names["first"])) == Cleared(1)
    assert desk.ask(0, Clear(True, "", "", names["first"][:8])) == Cleared(1)
    assert desk.ask(0, Clear(False, "", "", names["second"])) == Cleared(1)
    found = [[desk.has(who, number) for number in (1, 2, 3)] for who in (0, 1)]
    assert found == [[False, False, True], [False, True, True]]
