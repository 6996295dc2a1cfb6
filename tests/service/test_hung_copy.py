"""A copy that never returns: it may stop its own worker's copies, and nothing else.

A GPU that hangs, or memory whose pages the kernel waits for, looks like this to a copy thread.
"""

import threading
from collections.abc import Callable, Iterator

import pytest
from desk import CHUNK_SIZE, Desk, identity, load, store

from lmcache_client.contract.messages import Done, Goodbye, Memory, Refused, Stored, Welcome
from lmcache_server.service import sessions as sessions_module
from lmcache_server.transfer.copy_queue import CopyWorker
from lmcache_server.transfer.host import HostMapping
from lmcache_server.transfer.plan import Pieces

AGAIN, ONCE_MORE = 10, 11
"""Further connections of client 0."""


class Hung:
    """Clients 0 and 1 are engines, and the copy of client 0's first store hangs until `go_on`."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.go_on = threading.Event()
        reached, go_on = threading.Event(), self.go_on

        class Hanging(HostMapping):
            def copies(self, whole: Pieces, *, load: bool) -> Iterator[tuple[int, Callable[[], object]]]:
                reached.set()
                assert go_on.wait(60)
                yield from super().copies(whole, load=load)

        def copier(name: str, memory: Memory, _alive: object) -> CopyWorker:
            kind = Hanging if name == "copy-engine 0-0" else HostMapping
            return CopyWorker(name, kind(memory), lambda: True, desk.target.loop)

        desk.target.system.copier = copier  # type: ignore[method-assign]
        desk.join(0)
        desk.join(1)
        self.store = desk.send(0, store(1))
        assert reached.wait(60)

    def end(self) -> None:
        """The copy ends, and its request is answered."""
        self.go_on.set()
        assert isinstance(self.desk.wait(self.store), Stored)


@pytest.fixture
def hung(desk: Desk) -> Iterator[Hung]:
    one = Hung(desk)
    yield one
    one.go_on.set()


def test_others_look_up_store_and_load_while_a_copy_hangs(desk: Desk, hung: Hung) -> None:
    assert desk.answer(1, store(7)) == Stored(1, 0, 0)
    assert desk.answer(1, load(desk.lookup(1, 7), 7)) == Done()
    assert desk.lookup(0, 7).resume_tokens == CHUNK_SIZE, "the engine whose copies hang still looks up"
    assert hung.store not in desk.replies
    hung.go_on.set()
    assert desk.wait(hung.store) == Stored(1, 0, 0)


def test_goodbye_is_answered_when_the_copy_has_ended(desk: Desk, hung: Hung) -> None:
    goodbye = desk.send(0, Goodbye())
    desk.lookup(1, 1)
    assert goodbye not in desk.replies
    hung.go_on.set()
    assert desk.wait(goodbye) == Done()


@pytest.mark.parametrize("is_known", [True, False])
def test_the_end_of_a_session_whose_copy_hangs_stops_nobody_and_frees_no_frame(desk, hung, is_known):
    """The server may not know that the connection is gone whose client comes again, and reuses its memory."""
    reserved = desk.frames()[1]
    assert reserved > 0
    if is_known:
        desk.leave(0)
    # The same client is answered when its former copy has ended, not before.
    greetings = [desk.send(who, desk.greeting(0)) for who in (AGAIN, ONCE_MORE)]
    assert desk.answer(1, store(7)) == Stored(1, 0, 0)
    assert desk.frames()[1] == reserved, "the copy may still write there"
    assert [each["engine_id"] for each in desk.target.report.status()["sessions"]] == ["engine 1"]
    assert not {*greetings} & desk.replies.keys()
    hung.go_on.set()
    assert isinstance(desk.wait(greetings[1]), Welcome)
    assert isinstance(desk.wait(greetings[0]), Refused), "only the last greeting of a client counts"
    hung.end()
    assert identity(ONCE_MORE) in desk.target.router.sessions.by_identity
    assert desk.frames()[1] == 0


def test_a_client_that_hangs_up_while_its_greeting_waits_leaves_no_session(desk: Desk, hung: Hung) -> None:
    desk.leave(0)
    greeting = desk.send(AGAIN, desk.greeting(0))
    desk.leave(AGAIN)
    hung.go_on.set()
    assert isinstance(desk.wait(greeting), Refused)
    assert len(desk.target.router.sessions.by_identity) == 1


def test_a_connection_that_greets_as_two_clients_has_one_session(desk, hung, monkeypatch):
    sessions, dropped = desk.target.router.sessions, []
    drop = sessions.drop
    monkeypatch.setattr(sessions, "drop", lambda session, why: (dropped.append(session), drop(session, why)))
    desk.leave(0)
    greeting = desk.send(AGAIN, desk.greeting(0))
    assert isinstance(desk.ask(AGAIN, desk.greeting(9)), Welcome)
    other = sessions.by_identity[identity(AGAIN)]
    hung.go_on.set()
    assert isinstance(desk.wait(greeting), Welcome)
    assert other in dropped, "or its leases and its descriptor would stay for ever"


def test_the_end_of_the_server_does_not_wait_for_ever(desk: Desk, hung: Hung) -> None:
    desk.target.router.sessions.close()
    assert not desk.target.loop.run_until_complete(desk.target.system.all_ended(0.2))
    assert isinstance(desk.ask(AGAIN, desk.greeting(1)), Refused), "nobody is welcome any more"
    desk.target.router.sessions._closed = False


def test_a_fault_between_two_digests_gives_all_frames_back(desk, hung, monkeypatch):
    hung.end()
    calls = iter((bytes(16), None))

    def digest(*_arguments: object) -> bytes:
        found = next(calls)
        if found is None:
            raise MemoryError("no room for a digest")
        return found

    monkeypatch.setattr("lmcache_server.transfer.jobs.digest", digest)
    assert desk.answer(1, store(2, 3)) == Stored(0, 0, 2)
    assert desk.frames()[1] == 0


def test_a_greeting_that_its_client_gave_up_does_not_wait_for_a_copy_that_hangs(desk, hung, monkeypatch):
    """A client that gets no answer greets again every few seconds, for as long as the copy hangs."""
    monkeypatch.setattr(sessions_module, "SILENT_SESSION_S", 0.01)
    desk.leave(0)
    given_up, last = (desk.send(who, desk.greeting(0)) for who in (AGAIN, ONCE_MORE))
    assert isinstance(desk.wait(given_up), Refused)
    assert last not in desk.replies
    hung.go_on.set()
    assert isinstance(desk.wait(last), Welcome)
