"""L1: usable at once, populated without changing a byte, and never more than there is."""

import ctypes
import mmap
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness.waiting import PATIENCE_S, wait_until

from lmcache_server.core.pool import FRAME_BYTES
from lmcache_server.errors import StartError
from lmcache_server.host import machine
from lmcache_server.host.units import GB_BYTES
from lmcache_server.l1 import memory as l1_memory
from lmcache_server.l1.memory import L1Memory

MIB = 1 << 20


@pytest.fixture
def open_l1():
    memories = []

    def build(*arguments, populate=True, **options):
        memories.append(L1Memory(*arguments, **options))
        if populate:
            memories[-1].fill()
        return memories[-1]

    yield build
    for memory in memories:
        memory.close()


def join(memory):
    """Waits until the threads that populate it have ended."""
    for thread in memory._threads:
        thread.join()


def pins(prepare=lambda _unit: True, pin_unit=lambda _unit: ""):
    return SimpleNamespace(prepare=prepare, pin_unit=pin_unit, pin_rest=lambda: True)


def test_it_has_whole_frames_and_the_last_byte_can_be_used_before_it_is_populated(open_l1):
    with pytest.raises(StartError, match="--l1-size-gb must give at least one frame of 65536 bytes"):
        L1Memory(FRAME_BYTES - 1)
    memory = open_l1(1024 * FRAME_BYTES + 17, populate=False)
    assert (memory.num_frames, memory.num_bytes) == (1024, 1024 * FRAME_BYTES)
    assert memory.populated_bytes == 0
    ctypes.memset(memory.base_address + memory.num_bytes - 1, 7, 1)
    assert ctypes.string_at(memory.base_address + memory.num_bytes - 2, 2) == b"\x00\x07"


@pytest.mark.parametrize("advice", [l1_memory._MADV_POPULATE_WRITE, 9999])
def test_populating_leaves_what_was_written(open_l1, monkeypatch, advice):
    """9999 is no advice: that is how a kernel before 5.14 answers to MADV_POPULATE_WRITE."""
    monkeypatch.setattr(l1_memory, "_MADV_POPULATE_WRITE", advice)
    monkeypatch.setattr(l1_memory, "PIECE_BYTES", MIB)
    memory = open_l1(40 * MIB + FRAME_BYTES)
    for offset in range(0, memory.num_bytes, FRAME_BYTES):
        ctypes.memset(memory.base_address + offset, 1 + offset // FRAME_BYTES % 255, FRAME_BYTES)
    if advice == 9999 and not _may_lock():
        pytest.skip("this process may not lock memory")
    wait_until(lambda: memory.populated_bytes == memory.num_bytes, what="all of L1 is populated")
    for offset in range(0, memory.num_bytes, FRAME_BYTES):
        value = 1 + offset // FRAME_BYTES % 255
        assert ctypes.string_at(memory.base_address + offset, FRAME_BYTES) == bytes([value]) * FRAME_BYTES


def _may_lock():
    page = mmap.mmap(-1, 2 * MIB)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    allowed = l1_memory._libc.mlock(address, 2 * MIB) == 0
    page.close()
    return allowed


def test_what_cannot_be_populated_is_said_and_still_works(open_l1, monkeypatch, caplog):
    monkeypatch.setattr(l1_memory, "_populate_piece", lambda _address, _size_bytes: 12)
    memory = open_l1(4 * MIB)
    join(memory)
    assert "L1 is populated on first use, not in advance: Cannot allocate memory" in caplog.text
    assert memory.populated_bytes == 0
    ctypes.memset(memory.base_address, 1, memory.num_bytes)


def test_closing_goes_on_without_a_thread_that_hangs_and_leaves_it_its_memory(monkeypatch):
    """As in a call of a GPU's driver that does not return."""
    monkeypatch.setattr(l1_memory, "STOP_S", 0.5)
    memory, reached, go_on = L1Memory(4 * MIB), threading.Event(), threading.Event()
    memory.fill(locked=pins(pin_unit=lambda _unit: (reached.set(), go_on.wait(PATIENCE_S))))
    assert reached.wait(PATIENCE_S)
    assert not memory.stop()
    memory.close()
    ctypes.memset(memory.base_address, 1, memory.num_bytes)
    go_on.set()
    wait_until(memory.stop, what="the thread has ended")
    memory.close()
    assert memory._mapping.closed


def test_a_thread_moves_near_a_gpu_before_it_populates_a_unit_and_pins_it_there(open_l1, monkeypatch):
    monkeypatch.setattr(l1_memory, "UNIT_BYTES", 4 * MIB)
    monkeypatch.setattr(l1_memory, "PIECE_BYTES", 2 * MIB)
    calls, lock, prepare = [], threading.Lock(), l1_memory._populate_piece

    def note(what: str, unit: int) -> bool:
        with lock:
            calls.append((threading.get_ident(), what, unit))
        return True

    memory = open_l1(16 * MIB, populate=False)

    def populating(address: int, num_bytes: int) -> int:
        note("populate", (address - memory.base_address) // (4 * MIB))
        return prepare(address, num_bytes)

    monkeypatch.setattr(l1_memory, "_populate_piece", populating)
    memory.fill(locked=pins(lambda unit: note("prepare", unit), lambda unit: note("pin", unit)))
    join(memory)
    for unit in range(4):
        own = [(thread, what) for thread, what, number in calls if number == unit]
        assert [what for _, what in own] == ["prepare", "populate", "populate", "pin"]
        assert len({thread for thread, _ in own}) == 1


def flags_at(address):
    """The kernel's flags of the mapping that begins there."""
    maps = Path("/proc/self/smaps").read_text()
    own = maps[maps.index(f"{address:x}-") :]
    return next(line for line in own.splitlines() if line.startswith("VmFlags:")).split()


def test_no_process_that_is_started_copies_it_and_no_core_dump_has_it(open_l1, monkeypatch):
    """Not even its page tables: of 100 GB that would stop the event loop for seconds."""
    assert {"dc", "dd"} <= {*flags_at(open_l1(GB_BYTES // 1024).base_address)}
    # A machine of the tests has no huge pages.
    plain = lambda num_bytes, _flags, _shared: (-1, mmap.mmap(-1, num_bytes))  # noqa: E731
    monkeypatch.setattr(l1_memory, "_allocate", plain)
    assert "dd" in flags_at(open_l1(MIB, hugetlb=True).base_address)


def test_more_than_there_is_is_refused(monkeypatch):
    """The sentences are in unit/test_doctor.py."""
    for asked_bytes, available_bytes, sentence in (
        (
            100 * GB_BYTES,
            GB_BYTES,
            r"--l1-size-gb asks for 100.00 GB, but 1.00 GB are available \(a test\): ",
        ),
        (1 << 60, 1 << 62, "the system refuses a mapping of .* GB .*: ask for less"),
    ):
        monkeypatch.setattr(l1_memory, "available_bytes", lambda found=available_bytes: (found, "a test"))
        with pytest.raises(StartError, match=sentence):
            L1Memory(asked_bytes)
    info = machine.memory_info()
    needed = info["HugePages_Free"] - info["HugePages_Rsvd"] + 5
    with pytest.raises(StartError, match=f"^--l1-hugetlb needs {needed} huge pages .* vm.nr_hugepages="):
        L1Memory(needed * info["Hugepagesize"], hugetlb=True)
