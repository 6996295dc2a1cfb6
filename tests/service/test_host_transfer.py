"""Copies between this process and a real other one: exact, whatever the pages look like."""

import contextlib
import ctypes
import errno
import mmap
import os
import random
import subprocess
import sys

import numpy as np
import pytest
from harness.processes import ChildProcess
from harness.waiting import wait_until

from lmcache_client.contract.geometry import Region
from lmcache_client.contract.messages import Memory
from lmcache_client.memory.host import ProofBuffer, allow_tracer
from lmcache_server.core.pool import FRAME_BYTES
from lmcache_server.l1.memory import L1Memory
from lmcache_server.transfer import host
from lmcache_server.transfer.base import CopyError
from lmcache_server.transfer.plan import ObjectCopy, Pieces, pieces

MIB = 1 << 20


_CHILD = """
import ctypes, mmap, sys
from lmcache_client.memory.host import allow_tracer
allow_tracer(int(sys.argv[2]))
with open(sys.argv[1], "r+b") as file:
    memory = mmap.mmap(file.fileno(), 0)
print(ctypes.addressof(ctypes.c_char.from_buffer(memory)), flush=True)
sys.stdin.read()
"""


class ChildMemory:
    """`num_bytes` of the memory of a real process `pid`, at `address` there. `view` shows them here through a
    shared file, a way that does not use the copies under test."""

    def __init__(self, path, num_bytes):
        path.write_bytes(bytes(num_bytes))
        with path.open("r+b") as file:
            self.view = mmap.mmap(file.fileno(), 0)
        command = [sys.executable, "-c", _CHILD, str(path), str(os.getpid())]
        self._process = ChildProcess("memory", command, pipes=True)
        self.pid = self._process.pid
        self.address = int(self._process.stdout.readline())

    def end(self):
        self._process.kill()

    def close(self):
        self.end()
        self.view.close()


@pytest.fixture(scope="module")
def child(tmp_path_factory):
    memory = ChildMemory(tmp_path_factory.mktemp("child") / "memory", 24 * MIB)
    yield memory
    memory.close()


@pytest.fixture
def l1():
    memory = L1Memory(24 * MIB)
    yield memory
    memory.close()


@pytest.fixture(params=[1, host.MIN_SHARE_BYTES], ids=["two threads", "as it is"], autouse=True)
def share(request, monkeypatch):
    monkeypatch.setattr(host, "MIN_SHARE_BYTES", request.param)


def some_bytes(num_bytes, seed=0):
    return random.Random(seed).randbytes(num_bytes)


def mapped(child):
    """All of the memory of the child."""
    return host.HostMapping(Memory(child.pid, ((child.address, len(child.view)),), child.address))


def copy_all(mapping, whole, *, load):
    for _, copy in mapping.copies(whole, load=load):
        copy()


def one_piece(local, remote, length):
    return Pieces(*(np.array([value], np.uint64) for value in (local, remote, length)))


def round_trip(child, l1, page, *regions):
    """Store the page, wipe the engine's memory, load it: the pages are back, and nothing else is."""
    child.view[:] = before = some_bytes(len(child.view))
    plan = pieces(page, regions, (child.address,), l1.base_address, FRAME_BYTES)
    mapping = mapped(child)
    copy_all(mapping, plan, load=False)
    child.view[:] = bytes(len(child.view))
    copy_all(mapping, plan, load=True)
    mapping.close()
    expected = bytearray(len(child.view))
    for region in regions:
        for block in page.block_ids:
            start = region.offset + block * region.stride_bytes
            expected[start : start + region.page_bytes] = before[start : start + region.page_bytes]
    assert child.view[:] == bytes(expected)
    return before


@pytest.mark.parametrize("page_bytes", [1, 3, 100, 4096, 65536, 100_000, 4 * MIB])
def test_pages_of_every_size_come_back_exactly(child, l1, page_bytes):
    for stride in (page_bytes, page_bytes + 7):
        count = min(40, len(child.view) // stride - 1)
        block_ids = tuple(random.Random(1).sample(range(1, count + 1), min(5, count)))
        frames = -(-len(block_ids) * page_bytes // FRAME_BYTES)
        page = ObjectCopy(((3, frames),), len(block_ids), 0, block_ids)
        round_trip(child, l1, page, Region(0, 0, stride, page_bytes))


@pytest.mark.parametrize("stride", [1, 3])
def test_more_pieces_than_one_call_takes(child, l1, stride):
    count = 5 * host.MAX_PIECES + 17
    block_ids = random.Random(2).sample(range(1, 20_000), count)
    round_trip(child, l1, ObjectCopy(((0, 1),), count, 0, tuple(block_ids)), Region(0, 5, stride, 1))


def test_calls_are_cut_at_the_same_byte_on_both_sides(child, l1, monkeypatch):
    monkeypatch.setattr(host, "MAX_CALL_BYTES", 1000)
    monkeypatch.setattr(host, "MAX_PIECES", 3)
    page = ObjectCopy(((9, 2), (2, 3)), 20, 0, tuple(range(20, 0, -1)))
    round_trip(child, l1, page, Region(0, 3, 11_000, 10_007))


def test_nothing_to_copy_is_no_error(child):
    empty = np.zeros(0, np.uint64)
    host.copy(child.pid, Pieces(empty, empty, empty), load=True)


@pytest.mark.parametrize("load", [False, True])
def test_a_piece_that_is_not_mapped_is_a_copy_error_in_either_thread(child, l1, load):
    mapping = mapped(child)
    for count, bad in ((1, 0), *((4, number) for number in range(4))):
        remote = [child.address + number * MIB for number in range(count)]
        remote[bad] = 4096
        local = [l1.base_address + number * MIB for number in range(count)]
        plan = Pieces(*(np.array(values, np.uint64) for values in (local, remote, [MIB] * count)))
        with pytest.raises(CopyError, match=f"copying memory of process {child.pid} failed"):
            copy_all(mapping, plan, load=load)
    mapping.close()


def test_a_copy_that_runs_off_the_mapping_is_an_error_not_a_short_copy(child, l1):
    end = child.address + len(child.view)
    # Far enough that no other mapping of the child lies behind its end.
    with pytest.raises(CopyError):
        host.copy(child.pid, one_piece(l1.base_address, end - 8192, 20 * MIB), load=False)


def test_a_dead_process_has_no_access(tmp_path, l1):
    with contextlib.closing(ChildMemory(tmp_path / "memory", MIB)) as child:
        child.end()
        with pytest.raises(host.NoAccessError, match="has ended, or it is in another process namespace"):
            host.copy(child.pid, one_piece(l1.base_address, child.address, 100), load=False)


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
def test_refusals_of_the_kernel_say_what_to_change(monkeypatch, number):
    def refuse(*_arguments):
        ctypes.set_errno(number)
        return -1

    monkeypatch.setattr(host, "_libc", type("Libc", (), {"process_vm_readv": staticmethod(refuse)}))
    with pytest.raises(host.NoAccessError) as caught:
        host.read(1234, 4096, 100)
    for advice in ("process 1234", "user of vLLM", "ptrace_scope", "seccomp", "namespace"):
        assert advice in str(caught.value)


def test_opening_tries_both_ends_of_every_buffer(child):
    def mapping(*sizes):
        buffers = tuple((child.address, size) for size in sizes)
        return host.HostMapping(Memory(child.pid, buffers, child.address))

    assert mapping(1, len(child.view)).open() == [bytes(child.view[:32])]
    with pytest.raises(CopyError):
        mapping(1, 1 << 46).open()


def test_the_nonce_is_read_where_the_client_wrote_it():
    proof, nonce = ProofBuffer(), some_bytes(32)
    allow_tracer(os.getpid())
    proof.write(nonce)
    assert host.read(os.getpid(), proof.address, 32) == nonce
    with pytest.raises(ValueError, match="a nonce has 32 bytes, not 31"):
        proof.write(nonce[1:])


_OTHER_PROGRAM = """
import ctypes, mmap, os, sys
path, address = sys.argv[1], int(sys.argv[2])
libc = ctypes.CDLL(None)
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, *[ctypes.c_size_t] * 5]
size = os.path.getsize(path)
shared, fixed = 1, 0x10
assert libc.mmap(address, size, 3, shared | fixed, os.open(path, os.O_RDWR), 0) == address
print("up", flush=True)
sys.stdin.read()
"""


def test_memory_of_a_program_executed_after_the_proof_is_not_touched(tmp_path, l1):
    """It has the process id, the pidfd and the addresses of what was proven, and may have more rights."""
    path = tmp_path / "memory"
    path.write_bytes(b"\1" * MIB)
    execs = (
        "import ctypes, mmap, os, sys\n"
        "from lmcache_client.memory.host import allow_tracer\n"
        "allow_tracer(int(sys.argv[2]))\n"
        "memory = mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 0)\n"
        "at = ctypes.addressof(ctypes.c_char.from_buffer(memory))\n"
        "print(at, flush=True)\n"
        "sys.stdin.readline()\n"
        "os.execv(sys.executable, [sys.executable, '-c', sys.argv[3], sys.argv[1], str(at)])\n"
    )
    command = [sys.executable, "-c", execs, str(path), str(os.getpid()), _OTHER_PROGRAM]
    with ChildProcess("executes", command, pipes=True) as child:
        address = int(child.stdout.readline())
        mapping = host.HostMapping(Memory(child.pid, ((address, MIB),), address))
        assert mapping.open() == [b"\1" * 32]
        whole = one_piece(l1.base_address, address, MIB)
        copy_all(mapping, whole, load=False)
        ctypes.memset(l1.base_address, 2, MIB)
        child.stdin.write(b"go\n")
        child.stdin.flush()
        assert child.stdout.readline() == b"up\n"
        assert host.read(child.pid, address, 1) == b"\1", "the kernel would let the server"
        for load in (True, False):
            with pytest.raises(CopyError, match="no longer has the memory that it registered"):
                copy_all(mapping, whole, load=load)
        mapping.close()
    assert path.read_bytes() == b"\1" * MIB
    assert ctypes.string_at(l1.base_address, MIB) == b"\2" * MIB


def test_the_server_does_not_open_its_own_memory():
    with pytest.raises(host.NoAccessError, match="the memory of the server itself"):
        host.HostMapping(Memory(os.getpid(), ((1 << 20, 1),), 1 << 20)).open()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_process_of_another_user_is_refused_whatever_rights_the_server_has(child):
    as_nobody = "import os, time; os.setresuid(65534, 65534, 65534); time.sleep(600)"
    other = subprocess.Popen([sys.executable, "-c", as_nobody])
    try:
        changed = lambda: os.stat(f"/proc/{other.pid}").st_uid == 65534  # noqa: E731
        wait_until(changed, what="the process is another user's")
        with pytest.raises(host.NoAccessError, match="run both as one user"):
            host.HostMapping(Memory(other.pid, ((child.address, 1),), child.address)).open()
    finally:
        other.kill()
        other.wait()
