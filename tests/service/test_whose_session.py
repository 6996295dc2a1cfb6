"""Whose session a message belongs to, which engine's layout answers it, and how it is counted and logged."""

import logging
import subprocess
from collections.abc import Callable

import pytest
from desk import NOBODY, Desk, HeldCopies, is_refused, question, store

from lmcache_client.contract import messages
from lmcache_client.contract.messages import Challenge, Done, Hello, Join, Joined, Memory, Prove, Welcome
from lmcache_server.service import sessions as sessions_module
from lmcache_server.transfer.base import HandleError, Opened


def test_a_worker_that_registers_again_is_answered_when_its_earlier_copies_have_ended(desk: Desk) -> None:
    """It may have freed the memory that it registered before."""
    desk.join(0)
    desk.ask(0, store(1))
    copier = desk.copies[0]
    copier.close = lambda: copier.ended  # type: ignore[method-assign]  # its slice goes on
    assert desk.register(0) is None, "nobody registers while the copy goes on"
    copier.ended.set_result(None)
    desk.end_copies()
    assert any(isinstance(reply, Challenge) for reply in [*desk.replies.values()][-2:])


def test_a_session_that_is_silent_for_too_long_ends_and_others_stay(desk: Desk) -> None:
    """Of a process that the server sees, it knows more: that one may be silent for longer."""
    sessions = desk.target.router.sessions
    watched = Hello(desk.memory.pid, b"w" * 16, "test")
    for who, limit_s in ((0, sessions_module.SILENT_SESSION_S), (1, sessions_module.SILENT_PROCESS_S)):
        for silent_s in (limit_s - 5, limit_s + 5):
            assert isinstance(desk.ask(who, watched) if who else desk.hello(0), Welcome)
            (session,) = sessions.by_identity.values()
            assert (session.process is not None) == bool(who)
            session.heard_s -= silent_s
            sessions.tick()
            assert (session in sessions.by_identity.values()) == (silent_s < limit_s)


def engine_0(desk: Desk, model: str = "model") -> None:
    """Client 0 is the worker of "engine 0"."""
    desk.hello(0)
    desk.prove(0, model)


def test_a_scheduler_is_answered_with_the_layout_that_it_joined_and_no_other(desk: Desk) -> None:
    """Its keys and blocks follow that layout: another engine that takes the name must not answer it."""
    engine_0(desk)
    desk.stored(1)
    desk.hello(4)
    for who in (0, 4):
        assert is_refused(desk.ask(who, question(1)), messages.NOT_REGISTERED), "it has joined no engine"
    assert isinstance(desk.ask(4, Join("engine 0")), Joined)
    assert desk.has(4, 1)
    desk.leave(0)
    engine_0(desk, "another model")
    assert is_refused(desk.ask(4, question(1)), messages.NOT_REGISTERED)
    assert isinstance(desk.ask(4, Join("engine 0")), Joined)
    assert not desk.has(4, 1)


def test_an_engine_that_is_not_cached_is_counted_as_such(desk: Desk) -> None:
    desk.hello(0)
    assert desk.ask(0, messages.NotCached("engine", "model", "0.32.0", "a reason")) == Done()
    value = desk.target.metrics.value
    counts = [value("lmcache_requests_total", op=each, outcome="ok") for each in ("not_cached", "other")]
    assert counts == [1, 0]


def test_a_line_of_the_log_has_a_bounded_part_of_a_models_name(desk, caplog):
    caplog.set_level(logging.INFO)
    engine_0(desk, "m" * 4096)
    (line,) = (record.getMessage() for record in caplog.records if "is registered" in record.getMessage())
    assert "m" * 100 in line
    assert len(line) < 600


@pytest.mark.parametrize("is_visible", [True, False])
def test_for_memory_on_a_gpu_the_process_is_watched_that_the_kernel_names(desk, is_visible):
    """In another process namespace, the client's own number may be that of a stranger, who may end."""
    honest, alive = desk.memory, []
    sessions = desk.target.router.sessions
    sessions._peer_pid = lambda _identity: honest.pid if is_visible else 0

    def copier(name: str, _memory: Memory, is_alive: Callable[[], bool]) -> HeldCopies:
        alive.append(is_alive)
        return desk._copier(name, honest, is_alive)

    desk.target.system.copier = copier  # type: ignore[method-assign,assignment]
    with subprocess.Popen(["sleep", "1000"]) as stranger:
        try:
            desk.memory = Memory(stranger.pid, honest.buffers, 0, b"\xee" * 16, (b"\xee" * 64,))
            engine_0(desk)
        finally:
            stranger.kill()
    (session,) = sessions.by_identity.values()
    assert session.shard is not None
    assert (session.shard.process is not None) == is_visible
    assert alive[0](), "the stranger has ended, the worker has not"


def test_a_handle_that_cuda_refuses_is_explained_by_where_its_worker_runs(desk: Desk) -> None:
    desk.target.router.sessions._peer_pid = lambda _identity: 0
    opened = Opened(HandleError("no handle"), [])
    desk.target.system.copier = lambda *_: HeldCopies(opened, desk.target.loop)  # type: ignore
    desk.memory = Memory(NOBODY, desk.memory.buffers, 0, b"\xee" * 16, (b"\xee" * 64,))
    desk.hello(0)
    desk.register(0)
    reply = desk.ask(0, Prove())
    assert is_refused(reply, messages.NO_ACCESS)
    assert str(reply.message).startswith("no handle: vLLM is in a process namespace that the server does not")
