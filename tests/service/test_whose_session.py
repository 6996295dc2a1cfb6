"""Whose session a message belongs to, which engine's layout answers it, and how it is counted and logged."""

import logging
import re
import subprocess
from collections.abc import Callable

import pytest
from desk import NOBODY, Desk, HeldCopies
from test_invariants import CHUNK_SIZE, is_refused, key, lookup, store

from lmcache_client.contract import messages
from lmcache_client.contract.messages import (
    Challenge,
    Done,
    Hello,
    Join,
    Joined,
    Lookup,
    Memory,
    NotCached,
    Prove,
    Registered,
    Welcome,
)
from lmcache_server.service import registry as registry_module
from lmcache_server.transfer.base import HandleError, Opened


def test_a_client_that_connects_again_is_welcomed_when_its_earlier_copies_have_ended(desk: Desk) -> None:
    """The server may not know that the earlier connection is gone. The client now reuses its memory."""
    desk.join(0)
    desk.ask(0, store(1))
    copier = desk.copies[0]
    copier.close = lambda: copier.ended  # type: ignore[method-assign]  # its slice goes on
    again = Hello(NOBODY, (0).to_bytes(16, "big"), "test")
    assert desk.ask(3, again) is None, "nobody is welcomed while the copy goes on"
    assert not desk.target.router.registry.sessions, "the earlier session has ended"
    copier.ended.set_result(None)
    desk.end_copies()
    assert any(isinstance(reply, Welcome) for _, reply in desk.replies[-2:])
    (session,) = desk.target.router.registry.sessions.values()
    assert session.identity == (3).to_bytes(4, "big")


def test_a_worker_that_registers_again_is_answered_when_its_earlier_copies_have_ended(desk: Desk) -> None:
    """It may have freed the memory that it registered before."""
    desk.join(0)
    desk.ask(0, store(1))
    copier = desk.copies[0]
    copier.close = lambda: copier.ended  # type: ignore[method-assign]  # its slice goes on
    assert desk.register(0) is None, "nobody registers while the copy goes on"
    copier.ended.set_result(None)
    desk.end_copies()
    assert any(isinstance(reply, Challenge) for _, reply in desk.replies[-2:])


def test_a_session_that_is_silent_for_too_long_ends_and_others_stay(desk: Desk) -> None:
    """Of a process that the server sees, it knows more: that one may be silent for longer."""
    registry = desk.target.router.registry
    watched = Hello(desk.memory.pid, b"w" * 16, "test")
    for who, limit_s in ((0, registry_module.SILENT_SESSION_S), (1, registry_module.SILENT_PROCESS_S)):
        for silent_s in (limit_s - 5, limit_s + 5):
            assert isinstance(desk.ask(who, watched) if who else desk.hello(0), Welcome)
            (session,) = registry.sessions.values()
            assert (session.process is not None) == bool(who)
            session.heard_s -= silent_s
            registry.tick()
            assert (session in registry.sessions.values()) == (silent_s < limit_s)


def engine_0(desk: Desk, model: str) -> None:
    """Client 0 is the worker of "engine 0"."""
    desk.hello(0)
    desk.register(0, model)
    assert isinstance(desk.ask(0, Prove()), Registered)


def test_a_scheduler_is_answered_with_the_layout_that_it_joined_and_no_other(desk: Desk) -> None:
    """Its keys and blocks follow that layout: another engine that takes the name must not answer it."""
    engine_0(desk, "model")
    desk.ask(0, store(1))
    desk.end_copies()
    desk.hello(4)
    assert isinstance(desk.ask(4, Join("engine 0")), Joined)
    assert lookup(desk, 4, 1).resume_tokens == CHUNK_SIZE
    desk.leave(0)
    engine_0(desk, "another model")
    question = Lookup("r", (key(1),), 0, CHUNK_SIZE, CHUNK_SIZE + 1)
    assert is_refused(desk.ask(4, question), messages.NOT_REGISTERED)
    assert isinstance(desk.ask(4, Join("engine 0")), Joined)
    assert lookup(desk, 4, 1).resume_tokens == 0


def test_who_joined_no_engine_looks_up_nothing(desk: Desk) -> None:
    engine_0(desk, "model")
    desk.hello(4)
    question = Lookup("r", (key(1),), 0, CHUNK_SIZE, CHUNK_SIZE + 1)
    for who in (0, 4):
        assert is_refused(desk.ask(who, question), messages.NOT_REGISTERED)


def test_an_engine_that_is_not_cached_is_counted_as_such(desk: Desk) -> None:
    desk.hello(0)
    assert desk.ask(0, NotCached("engine", "model", "0.32.0", "a reason")) == Done()
    assert counted(desk, "not_cached") == 1
    assert counted(desk, "other") == 0


def counted(desk: Desk, operation: str) -> float:
    text = desk.target.router._metrics.render().decode()
    (line,) = re.findall(rf'lmcache_requests_total{{op="{operation}",outcome="ok"}} (.*)', text)
    return float(line)


def test_a_line_of_the_log_has_a_bounded_part_of_a_models_name(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    engine_0(desk, "m" * 4096)
    (line,) = (record.getMessage() for record in caplog.records if "is registered" in record.getMessage())
    assert "m" * 100 in line
    assert len(line) < 600


@pytest.mark.parametrize("is_visible", [True, False])
def test_for_memory_on_a_gpu_the_process_is_watched_that_the_kernel_names(
    desk: Desk, is_visible: bool
) -> None:
    """In another process namespace, the client's own number may be that of a stranger, who may end."""
    honest, alive = desk.memory, []
    registry = desk.target.router.registry
    registry._peer_pid = lambda _identity: honest.pid if is_visible else 0

    def copier(name: str, _memory: Memory, is_alive: Callable[[], bool]) -> HeldCopies:
        alive.append(is_alive)
        return desk._copier(name, honest, is_alive)

    desk.target.system.copier = copier  # type: ignore[method-assign,assignment]
    with subprocess.Popen(["sleep", "1000"]) as stranger:
        try:
            desk.memory = Memory(stranger.pid, honest.buffers, 0, b"\xee" * 16, (b"\xee" * 64,))
            engine_0(desk, "model")
        finally:
            stranger.kill()
    (session,) = registry.sessions.values()
    assert session.shard is not None
    assert (session.shard.process is not None) == is_visible
    assert alive[0](), "the stranger has ended, the worker has not"


def test_a_handle_that_cuda_refuses_is_explained_by_where_its_worker_runs(desk: Desk) -> None:
    desk.target.router.registry._peer_pid = lambda _identity: 0
    opened = Opened(HandleError("no handle"), [])
    desk.target.system.copier = lambda *_: HeldCopies(opened, desk.target.loop)  # type: ignore
    desk.memory = Memory(NOBODY, desk.memory.buffers, 0, b"\xee" * 16, (b"\xee" * 64,))
    desk.hello(0)
    desk.register(0)
    reply = desk.ask(0, Prove())
    assert is_refused(reply, messages.NO_ACCESS)
    assert str(reply.message).startswith("no handle: vLLM is in a process namespace that the server does not")
