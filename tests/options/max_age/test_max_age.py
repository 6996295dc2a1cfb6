"""--max-age: whose chunks go, and how many in a second. The real router, with a clock that the test sets."""

import itertools

from desk import Desk

from lmcache_client.contract.messages import Clear, Cleared
from lmcache_server.options.max_age import server as of_max_age
from lmcache_server.options.max_age.flags import ages_s


def limited(desk: Desk, max_age: str) -> None:
    (option,) = (each for each in desk.target.router.options if isinstance(each, of_max_age.Server))
    option._text, option._ages_s = max_age, ages_s(max_age)


def pass_time(desk: Desk, seconds: float) -> None:
    desk.target.now_s += seconds
    desk.target.router.tick()
    desk.target.report.tick()


def test_chunks_go_at_the_age_of_their_model_however_much_they_are_used(desk: Desk) -> None:
    desk.join(0)
    desk.join(1, "another model")
    desk.stored(5)
    pass_time(desk, 14.0)
    assert desk.has(0, 5), "without a limit nothing goes"
    assert desk.ask(0, Clear()) == Cleared(1)
    limited(desk, "10s,another model=4s")
    for who in (0, 1):
        desk.stored(1, who=who)
    for _ in range(4):
        pass_time(desk, 0.9)
        assert [desk.has(who, 1) for who in (0, 1)] == [True, True]
    pass_time(desk, 0.9)
    assert not desk.has(1, 1)
    assert desk.has(0, 1)
    desk.stored(2, who=1)
    pass_time(desk, 6.0)
    assert not desk.has(0, 1)
    assert desk.target.metrics.value("lmcache_expired_chunks_total") == 3
    desk.frames()


def test_a_namespace_is_named_by_its_first_digits(desk: Desk) -> None:
    desk.join(0)
    desk.join(1, "another model")
    (own,) = (each for each in desk.target.report.status()["namespaces"] if each["model"] == "model")
    limited(desk, f"{own['namespace'][:12]}=5s")
    for who in (0, 1):
        desk.stored(1, who=who)
    pass_time(desk, 14.0)
    assert [desk.has(who, 1) for who in (0, 1)] == [False, True]


def test_a_model_that_nobody_knows_any_more_has_the_smallest_limit(desk: Desk) -> None:
    desk.join(0)
    limited(desk, "model=5s")
    desk.stored(1)
    desk.leave(0)
    desk.target.router.sessions.known.clear()
    pass_time(desk, 6.0)
    assert desk.target.cache.num_chunks == 0


def test_a_second_forgets_a_bounded_number_and_some_of_everybody(desk: Desk, monkeypatch) -> None:
    monkeypatch.setattr(of_max_age, "MAX_FORGOTTEN", 4)
    for who in range(3):
        desk.join(who, f"model {who}")
    limited(desk, "5s")
    desk.stored(*range(8), who=0)
    for who in (1, 2):
        desk.stored(*range(4), who=who)
    left = []
    for _ in range(8):
        pass_time(desk, 6.0 if not left else 0.1)
        left.append([len(chunks) for chunks in desk.target.cache.namespaces().values()])
        desk.frames()
    assert left[0] == [6, 2, 2], "each its share, then one more of each"
    assert all(sum(more) - sum(less) <= 4 + 3 for more, less in itertools.pairwise(left))
    assert left[-1] == []
