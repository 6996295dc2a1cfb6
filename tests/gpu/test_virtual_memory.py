"""Memory of CUDA's virtual memory API is served by file descriptors, and given back whole."""

import ctypes
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import virtual_memory
from gpu_engine import GpuEngine, fused
from harness.processes import ChildProcess
from harness.rawclient import start_all
from harness.server import LMCacheServer
from harness.waiting import wait_until
from msgspec import structs
from test_round_trips import CHUNK_SIZE, restored, stored_prompt, tables
from virtual_memory import VirtualMemory

from lmcache_client.contract.messages import Memory
from lmcache_client.memory.cuda import CudaExport, ExportError
from lmcache_client.server_channel import RefusedError

PAGE_BYTES, BLOCKS = 64 << 10, 32
LAYOUT = fused(PAGE_BYTES, BLOCKS)
SYS_PTRACE = 19
on_stand_in = pytest.mark.skipif("CUDA_STANDIN_DIR" not in os.environ, reason="no driver says no at will")


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.fixture
def make_engine(stack) -> Callable[..., GpuEngine]:
    def make(server: LMCacheServer, engine_id: str = "engine") -> GpuEngine:
        engine = GpuEngine(server.address, LAYOUT, BLOCKS, engine_id, virtual_memory.allocate)
        stack.callback(engine._keeper.close)
        stack.callback(engine.close)
        return engine

    return make


def test_pages_come_back_and_everything_is_given_back(start_server, make_engine, counters, device_bytes):
    server = start_server(chunk_size=CHUNK_SIZE)
    engine = make_engine(server).start()
    assert engine.own_memory().descriptors
    assert not engine.own_memory().handles
    keys, pages = stored_prompt(engine, 3, list(range(1, 16)), 1)
    assert restored(engine, keys, pages, tables(engine, 3, list(range(16, 32)))) == 6
    if (counted := counters(server)) is not None:
        assert (counted.mappings, counted.reservations, counted.handles) == (1, 1, 0)
    engine.worker.close()
    server.wait_at_rest(1)
    wait_until(lambda: is_unmapped(counters(server)))
    before = device_bytes()
    engine.export.close()
    engine._keeper.sleep()
    what = "the memory is free again when nobody has it"
    wait_until(lambda: device_bytes() >= before + engine._keeper.num_bytes, 5.0, what)


def test_a_worker_that_is_killed_is_unmapped(server_of_workers, stack, counters, device_bytes):
    server = server_of_workers
    server.wait_until(lambda l1: l1["pinned_bytes"] == l1["total_bytes"])
    free_bytes = device_bytes()
    command = [
        sys.executable,
        str(Path(__file__).parent / "worker_process.py"),
        server.address,
        "one",
        "virtual",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    worker = stack.enter_context(ChildProcess("worker", command, environment, pipes=True))
    assert worker.stdout.readline() == b"stored\n"
    time.sleep(0.05)
    worker.kill()
    server.wait_for_status(lambda status: not status["sessions"])
    server.wait_at_rest()
    what = "all but 1 GiB, for a context, is free again"
    wait_until(lambda: device_bytes() >= free_bytes - (1 << 30), 10.0, what)

    wait_until(lambda: is_unmapped(counters(server)), what="the server has let go of the memory")


def is_unmapped(counted: Any) -> bool:
    return counted is None or (counted.mappings, counted.reservations, counted.handles) == (0, 0, 0)


def refusal(engine: GpuEngine, change: Callable[[Memory], Memory] = lambda honest: honest) -> str:
    """Why the server refuses the engine, whose memory is described as `change` makes it."""
    honest = engine.own_memory()
    engine.export.memory = lambda _pid: change(honest)  # type: ignore[method-assign]
    start_all([engine.worker])
    refused = engine.worker.refusal
    assert isinstance(refused, RefusedError), engine.states
    engine.worker.close()
    engine.scheduler.close()
    return str(refused)


@pytest.fixture
def forbidden() -> Iterator[Callable[[str], None]]:
    """Makes a call of the stand-in fail in every process."""
    files: list[Path] = []

    def forbid(call: str) -> None:
        files.append(Path(os.environ["CUDA_STANDIN_DIR"], f"no-{call}"))
        files[-1].touch()

    yield forbid
    for file in files:
        file.unlink()


@on_stand_in
@pytest.mark.parametrize(
    "call", ["cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"]
)
def test_what_fails_half_way_leaves_nothing(start_server, make_engine, counters, forbidden, call):
    server = start_server(chunk_size=CHUNK_SIZE)
    make_engine(server, "first").start().worker.close()
    server.wait_at_rest(1)
    before = descriptors(server.pid)
    engine = make_engine(server, "second")
    forbidden(call)
    assert f"cannot use the worker's GPU ({call}: " in refusal(engine)
    server.wait_at_rest(1)
    wait_until(lambda: is_unmapped(counters(server)))
    wait_until(lambda: descriptors(server.pid) <= before, 10.0, "the descriptors are closed")


def named(number: int, size: int) -> Callable[[Memory], Memory]:
    return lambda honest: structs.replace(honest, descriptors=((number, size),))


def test_a_client_may_name_any_descriptor_and_any_size(start_server, make_engine, counters, tmp_path):
    server = start_server(chunk_size=CHUNK_SIZE)
    make_engine(server, "first").start().worker.close()
    server.wait_at_rest(1)
    before = descriptors(server.pid)
    file = (tmp_path / "file").open("w+b")
    file.write(bytes(4 << 20))
    file.flush()
    ends = [*os.pipe(), os.open("/dev/null", os.O_RDWR), os.open("/", os.O_RDONLY), file.fileno()]
    sockets = socket.socketpair()
    ends += [each.fileno() for each in sockets]
    honest_bytes = virtual_memory.GRANULE * 6
    lies = dict.fromkeys(ends, "cannot use the worker's GPU")
    lies |= {999: "has no such file descriptor", (1 << 31) - 1: "has no such file descriptor"}
    for number, sentence in lies.items():
        engine = make_engine(server, f"fd-{number}")
        assert sentence in refusal(engine, named(number, honest_bytes)), number
    for size in (honest_bytes - 1, honest_bytes + virtual_memory.GRANULE, 1 << 45, (1 << 63) - 1):
        engine = make_engine(server, f"size-{size}")
        (number, _), *_ = engine.own_memory().descriptors
        assert "cannot use the worker's GPU" in refusal(engine, named(number, size)), size
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as own:
        reasons = {
            os.getppid(): "is not this client, nor was it started by it",
            1: "is not this client, nor was it started by it",
            server.pid: "the memory of the server itself",
            own.pid: "has no such file descriptor",
        }
        for pid, reason in reasons.items():
            engine = make_engine(server, f"pid-{pid}")
            assert reason in refusal(engine, lambda honest, pid=pid: structs.replace(honest, pid=pid))
        own.kill()
    for each in ends[:4]:
        os.close(each)
    for each in sockets:
        each.close()
    file.seek(0)
    assert file.read() == bytes(4 << 20), "nothing is written to what is no memory of a GPU"
    file.close()
    server.wait_at_rest(1)
    wait_until(lambda: is_unmapped(counters(server)))
    wait_until(lambda: descriptors(server.pid) <= before, 10.0, "the descriptors are closed")
    engine = make_engine(server).start()
    keys, pages = stored_prompt(engine, 3, list(range(1, 16)), 1)
    assert restored(engine, keys, pages, tables(engine, 3, list(range(16, 32)))) == 6


def test_memory_that_cannot_be_shared_is_said_and_nothing_stays_open(stack):
    before = descriptors(os.getpid())
    one, many, private = (
        VirtualMemory(8 << 20),
        VirtualMemory(8 << 20, parts=4),
        VirtualMemory(4 << 20, shareable=False),
    )
    for memory in (one, many, private):
        stack.callback(memory.close)
    before = descriptors(os.getpid())
    wholes = [((memory.address, memory.num_bytes),) for memory in (one, many, private)]
    for buffers in (wholes[1], wholes[2], wholes[0] + wholes[2]):
        with pytest.raises(ExportError, match=r"expandable_segments.*--enable-sleep-mode"):
            CudaExport(buffers, lambda: 0)
    with pytest.raises(ExportError, match=r"--enable-sleep-mode.*vLLM 0\.33"):
        CudaExport(wholes[0], lambda: 0, is_fixed=False)
    assert descriptors(os.getpid()) == before
    first = (one.address, 1 << 20)
    export = CudaExport((first, (one.address + (4 << 20), 1 << 20)), lambda: 0)
    (descriptor, size), *same = export.memory(1).descriptors
    assert (size, same) == (one.num_bytes, [(descriptor, size)]), "one for each allocation"
    assert export.memory(1).buffers == ((0, 1 << 20), (4 << 20, 1 << 20))
    assert not os.get_inheritable(descriptor)
    export.close()
    assert descriptors(os.getpid()) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="gives up a capability")
def test_where_the_kernel_forbids_it_the_refusal_says_what_to_change(start_server, make_engine):
    server = start_server(chunk_size=CHUNK_SIZE, without_capability=SYS_PTRACE)
    engine = make_engine(server)
    libc = ctypes.CDLL(None)
    assert not libc.prctl(4, 0)
    try:
        sentence = refusal(engine)
    finally:
        assert not libc.prctl(4, 1)
    for remedy in ("LMCACHE_RUNTIME_DIR", "--enable-sleep-mode"):
        assert remedy in sentence
