"""Every bound of what one client, or all of them, may have the server keep: the real router, in this process,
with copies that end when the test says so."""

import os
from typing import Any, NoReturn

import pytest
from desk import Desk, is_refused, load, store

from lmcache_client.contract import messages
from lmcache_client.contract.messages import Challenge, Done, Goodbye, Prove, Refused, Stored, Welcome
from lmcache_server.service import copies, sessions
from lmcache_server.service.sessions import MAX_JOBS, MAX_SESSIONS, MAX_WAITING_BYTES, MAX_WORKERS


@pytest.fixture
def worker(desk: Desk) -> Desk:
    """Client 0 is worker and scheduler of an engine."""
    desk.join(0)
    return desk


def refused(reply: messages.Message | None) -> bool:
    assert reply is None or isinstance(reply, Stored) or is_refused(reply, messages.OVERLOADED), reply
    return isinstance(reply, Refused)


def test_copies_that_wait_are_bounded_by_their_number(worker: Desk) -> None:
    worker.stored(1)
    honest = load(worker.lookup(0, 1), 1)
    for _ in range(MAX_JOBS):
        assert worker.ask(0, honest) is None
    assert refused(worker.ask(0, honest))
    assert refused(worker.ask(0, store(2)))
    assert worker.jobs == MAX_JOBS
    worker.end_copies()
    assert worker.ask(0, store(3)) is None
    worker.end_copies()
    assert [*worker.replies.values()].count(Done()) == MAX_JOBS


def test_copies_that_wait_are_bounded_by_the_bytes_of_their_requests(worker: Desk) -> None:
    same = (1,) * 4000  # which are busy then
    message = store(1, *same)
    each = len(messages.encode_request(1000, message))
    accepted = 0
    # L1 has room for fewer objects than it takes: those that find none are answered at once.
    while not refused(worker.ask(0, store(accepted, *same))):
        accepted += 1
        assert accepted < MAX_JOBS
    waiting = worker.jobs
    assert waiting * each <= MAX_WAITING_BYTES < (waiting + 1) * each
    worker.end_copies()
    assert not refused(worker.ask(0, message))


@pytest.mark.parametrize(
    ("ask", "most", "taken"), [(Desk.hello, MAX_SESSIONS, Welcome), (Desk.register, MAX_WORKERS, Challenge)]
)
def test_sessions_and_workers_are_bounded(desk: Desk, ask: Any, most: int, taken: type) -> None:
    for who in range(most):
        desk.hello(who)
        assert isinstance(ask(desk, who), taken)
    desk.hello(most)
    assert refused(ask(desk, most))
    assert isinstance(ask(desk, 5), taken), "who is there already may do so again"
    desk.ask(7, Goodbye())
    desk.hello(most)
    assert isinstance(ask(desk, most), taken)


def test_a_message_names_no_more_pages_than_can_be_planned(
    worker: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However small they are: a plan takes memory for each."""
    worker.stored(1)
    asked = (store(2), load(worker.lookup(0, 1), 1))
    monkeypatch.setattr(copies, "MAX_PAGES", 0)
    assert all(is_refused(worker.ask(0, each), messages.BAD_REQUEST) for each in asked)
    monkeypatch.undo()
    assert [worker.ask(0, each) for each in asked] == [None, None]


def test_models_that_come_and_go_are_forgotten(desk: Desk) -> None:
    desk.hello(0)
    for number in range(200):
        desk.prove(0, f"model {number}")
        assert len(desk.target.router.sessions.known) <= 2
    assert len(list(desk.target.router.sessions.engines)) == 1


def test_a_lookup_counts_no_more_tokens_than_its_keys_can_mean(worker: Desk) -> None:
    keys = (b"\x07" * 32, b"\x08" * 32)
    for num_tokens in (513, 700, (1 << 63) - 1):
        assert isinstance(worker.ask(0, messages.Lookup("r", keys, 0, 512, num_tokens)), messages.Found)
    value = worker.target.metrics.value
    assert value("lmcache_tokens_requested_total") == 513 + 700 + 768
    assert value("lmcache_tokens_total", outcome="tail") == 1 + 188 + 256


def test_a_proof_whose_thread_does_not_start_keeps_no_descriptor(desk: Desk) -> None:
    desk.hello(0)
    before = len(os.listdir("/proc/self/fd"))
    copier = desk.target.system.copier

    def failing(*_: object) -> NoReturn:
        raise RuntimeError("can't start new thread")

    for _ in range(3):
        desk.target.system.copier = failing  # type: ignore[method-assign]
        assert isinstance(desk.register(0), Challenge)
        for _ in range(3):
            assert isinstance(desk.ask(0, Prove()), Refused)
    assert len(os.listdir("/proc/self/fd")) == before
    desk.target.system.copier = copier  # type: ignore[method-assign]
    desk.prove(0)


def test_the_namespaces_that_are_described_are_bounded(worker: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_KNOWN", 3)
    for number in range(8):
        worker.prove(0, f"model {number}")
        worker.stored(number)
    known = worker.target.router.sessions.known
    assert [summary["model"] for summary in known.values()] == ["model 5", "model 6", "model 7"]
    status = worker.target.report.status()
    assert status["namespaces"][0]["engines"] == ["engine 0"]
    assert (len(status["namespaces"]), status["namespaces_left_out"]) == (3, 5)
    # Whoever comes back is described again.
    worker.prove(0, "model 0")
    assert [summary["model"] for summary in known.values()] == ["model 6", "model 7", "model 0"]
