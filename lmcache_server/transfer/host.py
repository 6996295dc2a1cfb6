"""Copies between L1 and the memory of another process on this machine.

process_vm_readv and process_vm_writev copy directly between two address spaces; MPI and UCX use them too.
ctypes releases the GIL while they run.
"""

import contextlib
import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial

import numpy as np

from lmcache_client.contract.messages import NONCE_BYTES, Memory
from lmcache_server.transfer.base import CopyError, NoAccessError
from lmcache_server.transfer.plan import U64, Pieces, adjacent, merged, slices

MAX_PIECES = 1024
"""The kernel's IOV_MAX: how many pieces each side of one call may have."""
SLICE_BYTES = 32 << 20
"""Between slices, loads overtake stores and the end of a process is noticed."""
MIN_SHARE_BYTES = 1 << 20
"""Less than this is copied before a second thread could wake up."""
MAX_CALL_BYTES = 1 << 30
"""The kernel silently stops just below 2 GiB."""

_libc = ctypes.CDLL(None, use_errno=True)
for _call in (_libc.process_vm_readv, _libc.process_vm_writev):
    _call.argtypes = (ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong)
    _call.restype = ctypes.c_ssize_t


def copy(pid: int, pieces: Pieces, *, load: bool) -> None:
    """Copies pieces into process `pid` if `load`, else out of it. Raises CopyError."""
    if not len(pieces.length):
        return
    sides = [merged(adjacent(at, pieces.length), pieces.length, at) for at in pieces[:2]]
    call = _libc.process_vm_writev if load else _libc.process_vm_readv
    total = pieces.num_bytes
    ends = [np.cumsum(length) for length, _ in sides]
    done = 0
    while done < total:
        # Both sides of a call must end at the same byte.
        stop = min(total, done + MAX_CALL_BYTES, *(_reach(end, done) for end in ends))
        ours, theirs = (_vector(side, end, done, stop) for side, end in zip(sides, ends, strict=True))
        moved = call(pid, ours.ctypes.data, len(ours), theirs.ctypes.data, len(theirs), 0)
        if moved != stop - done:
            raise copy_error(pid, ctypes.get_errno() if moved < 0 else errno.EFAULT)
        done = stop


def _reach(ends: U64, done: int) -> int:
    """The last byte that MAX_PIECES pieces can reach from byte `done`."""
    first = int(np.searchsorted(ends, np.uint64(done), side="right"))
    return int(ends[min(first + MAX_PIECES, len(ends)) - 1])


def _vector(side: tuple[U64, ...], ends: U64, done: int, stop: int) -> U64:
    """The iovec for bytes [done, stop) of one side, (lengths, addresses): rows of (address, length)."""
    length, address = side
    first = int(np.searchsorted(ends, np.uint64(done), side="right"))
    last = int(np.searchsorted(ends, np.uint64(stop), side="left")) + 1
    vector = np.stack((address[first:last], length[first:last]), axis=1)
    skipped = np.uint64(done - int(ends[first] - length[first]))
    vector[0, 0] += skipped
    vector[0, 1] -= skipped
    vector[-1, 1] -= np.uint64(int(ends[last - 1]) - stop)
    return np.ascontiguousarray(vector)


def read(pid: int, address: int, num_bytes: int) -> bytes:
    """Reads another process's memory. Raises CopyError, or NoAccessError if the server may not read it."""
    buffer = ctypes.create_string_buffer(num_bytes)
    one = [np.array([value], dtype=np.uint64) for value in (ctypes.addressof(buffer), address, num_bytes)]
    copy(pid, Pieces(*one), load=False)
    return buffer.raw


class HostMapping:
    """The memory of another process; see `transfer.base.Mapping`. Its copies have ended when they return."""

    lanes = ((True, False),)
    lost = may_pin = False

    def __init__(self, memory: Memory) -> None:
        self.bases = [start for start, _ in memory.buffers]
        self._memory = memory
        self._second = ThreadPoolExecutor(1, "copy-second")
        self._address_space = -1
        """A descriptor of /proc/<pid>/mem. It stays with the memory that was opened, even if the process
        executes another program."""

    def open(self) -> list[bytes]:
        """As in Mapping; also reads the first and the last byte of every buffer."""
        pid = self._memory.pid
        try:
            check_user(pid)
            self._address_space = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            same = {errno.ENOENT: errno.ESRCH, errno.EACCES: errno.EPERM}
            raise copy_error(pid, same.get(error.errno or 0, error.errno or 0)) from error
        self._nonce = read(pid, self._memory.proof_address, NONCE_BYTES)
        for start, size in self._memory.buffers:
            read(pid, start, 1)
            read(pid, start + size - 1, 1)
        return [self._nonce]

    def copies(self, whole: Pieces, *, load: bool) -> Iterator[tuple[int, Callable[[], object]]]:
        for first, last, num_bytes in slices(whole.length, SLICE_BYTES):
            yield num_bytes, partial(self._copy, Pieces(*(array[first:last] for array in whole)), load)

    def _copy(self, pieces: Pieces, load: bool) -> None:
        """Copies in two threads if there is enough for both, because an engine waits for its loads and cannot
        reuse the blocks of its stores until they have ended."""
        half, parts = int(np.searchsorted(np.cumsum(pieces.length), pieces.num_bytes // 2)), [pieces]
        if half and pieces.num_bytes >= 2 * MIN_SHARE_BYTES:
            parts = [Pieces(*(array[at] for array in pieces)) for at in (slice(half), slice(half, None))]
        others = [self._second.submit(self._copy_part, part, load) for part in parts[1:]]
        try:
            self._copy_part(parts[0], load)
        finally:
            wait(others)
        for other in others:
            other.result()
        # If the process executed another program meanwhile, these bytes may not be the client's.
        self._check_address_space()

    def _check_address_space(self) -> None:
        """A client that gives this server up takes its nonce back. It may use the memory otherwise."""
        if self._address_space >= 0:
            with contextlib.suppress(OSError):
                if os.pread(self._address_space, NONCE_BYTES, self._memory.proof_address) == self._nonce:
                    return
            raise CopyError(f"process {self._memory.pid} no longer has the memory that it registered")

    def _copy_part(self, part: Pieces, load: bool) -> None:
        self._check_address_space()
        copy(self._memory.pid, part, load=load)

    def begun(self, *, load: bool) -> Callable[[], object]:
        return lambda: None

    def close(self) -> None:
        self._second.shutdown()
        if self._address_space >= 0:
            os.close(self._address_space)


def check_user(pid: int) -> None:
    """Raises NoAccessError unless `pid` is another process of this user, and OSError if it is not visible."""
    if pid == os.getpid():
        raise NoAccessError("this is the memory of the server itself")
    uid = os.stat(f"/proc/{pid}").st_uid
    if uid != os.geteuid():
        raise NoAccessError(
            f"process {pid} belongs to user id {uid} and the server runs as user id {os.geteuid()}: run "
            "both as one user"
        )


def copy_error(pid: int, number: int) -> CopyError:
    reason = os.strerror(number)
    if number in (errno.EPERM, errno.ENOSYS):
        return NoAccessError(
            f"the kernel does not let the server copy memory of process {pid} ({reason}): run the server as "
            "the user of vLLM; set kernel.yama.ptrace_scope to 0 or 1; in "
            "containers, share the process namespace and allow process_vm_readv in the seccomp profile"
        )
    if number == errno.ESRCH:
        return NoAccessError(
            f"the server cannot see process {pid}: it has ended, or it is in another process namespace "
            "(containers: share the pid namespace)"
        )
    return CopyError(f"copying memory of process {pid} failed: {reason}")
