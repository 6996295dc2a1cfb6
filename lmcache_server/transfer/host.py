"""Copies between L1 and the memory of another process on this machine.

process_vm_readv and process_vm_writev move bytes straight between two address spaces, as MPI and UCX do
between the processes of a host. ctypes releases the GIL while they run.
"""

import ctypes
import errno
import os
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from lmcache_client.contract.messages import NONCE_BYTES, Memory
from lmcache_server.transfer.base import CopyError, NoAccessError
from lmcache_server.transfer.plan import U64, Pieces, merged

MAX_PIECES = 1024
"""IOV_MAX: pieces that the kernel takes on a side of one call."""
MIN_SHARE_BYTES = 1 << 20
"""Less is copied sooner than a second thread has woken up."""
MAX_CALL_BYTES = 1 << 30
"""The kernel silently stops short of 2 GiB."""

_libc = ctypes.CDLL(None, use_errno=True)
_ARGUMENTS: list[Any] = [ctypes.c_int, *[ctypes.c_void_p, ctypes.c_ulong] * 2, ctypes.c_ulong]
for _call in (_libc.process_vm_readv, _libc.process_vm_writev):
    _call.argtypes = _ARGUMENTS
    _call.restype = ctypes.c_ssize_t


def copy(pid: int, pieces: Pieces, *, load: bool) -> None:
    """Copy pieces of process `pid`: into it when `load`, else out of it. Raises CopyError."""
    if not len(pieces.length):
        return
    local, remote = merged(pieces.local, pieces.length), merged(pieces.remote, pieces.length)
    call = _libc.process_vm_writev if load else _libc.process_vm_readv
    total = int(pieces.length.sum())
    ends = [np.cumsum(length) for _, length in (local, remote)]
    done = 0
    while done < total:
        # Both sides of a call must end at the same byte: the nearer of where each may end.
        stop = min(total, done + MAX_CALL_BYTES, *(_reach(end, done) for end in ends))
        ours, theirs = (
            _vector(*side, end, done, stop) for side, end in zip((local, remote), ends, strict=True)
        )
        moved = call(pid, ours.ctypes.data, len(ours), theirs.ctypes.data, len(theirs), 0)
        if moved != stop - done:
            raise _error(pid, ctypes.get_errno() if moved < 0 else errno.EFAULT)
        done = stop


def _reach(ends: U64, done: int) -> int:
    """The last byte that MAX_PIECES pieces can reach from byte `done`."""
    first = int(np.searchsorted(ends, np.uint64(done), side="right"))
    return int(ends[min(first + MAX_PIECES, len(ends)) - 1])


def _vector(address: U64, length: U64, ends: U64, done: int, stop: int) -> U64:
    """The iovec of bytes [done, stop) of one side: rows of (address, length)."""
    first = int(np.searchsorted(ends, np.uint64(done), side="right"))
    last = int(np.searchsorted(ends, np.uint64(stop), side="left")) + 1
    vector = np.stack((address[first:last], length[first:last]), axis=1)
    skipped = np.uint64(done - int(ends[first] - length[first]))
    vector[0, 0] += skipped
    vector[0, 1] -= skipped
    vector[-1, 1] -= np.uint64(int(ends[last - 1]) - stop)
    return np.ascontiguousarray(vector)


def read(pid: int, address: int, num_bytes: int) -> bytes:
    """Bytes of another process's memory. Raises CopyError, or NoAccessError where it is not allowed."""
    buffer = ctypes.create_string_buffer(num_bytes)
    one = [np.array([value], dtype=np.uint64) for value in (ctypes.addressof(buffer), address, num_bytes)]
    copy(pid, Pieces(*one), load=False)
    return buffer.raw


class HostMapping:
    """The memory of another process; see `transfer.base.Mapping`. Its copies end before they return."""

    lost = False

    def __init__(self, memory: Memory) -> None:
        self.bases = [start for start, _ in memory.buffers]
        self._memory = memory
        self._second = ThreadPoolExecutor(1, "copy-second")

    def open(self) -> list[bytes]:
        """The nonce, once the first and the last byte of every buffer could be read. Raises CopyError."""
        pid = self._memory.pid
        found = read(pid, self._memory.proof_address, NONCE_BYTES)
        for start, size in self._memory.buffers:
            read(pid, start, 1)
            read(pid, start + size - 1, 1)
        return [found]

    def copy(self, pieces: Pieces, *, load: bool) -> None:
        """In two threads, where both have enough to do: an engine waits for its loads, and holds the blocks
        of its stores until they have ended."""
        half = int(np.searchsorted(np.cumsum(pieces.length), pieces.num_bytes // 2))
        if pieces.num_bytes < 2 * MIN_SHARE_BYTES or not half:
            copy(self._memory.pid, pieces, load=load)
            return
        first, second = (
            Pieces(*(each[part] for each in pieces)) for part in (slice(half), slice(half, None))
        )
        other = self._second.submit(copy, self._memory.pid, second, load=load)
        try:
            copy(self._memory.pid, first, load=load)
        finally:
            wait([other])
        other.result()

    def finish(self, *, load: bool) -> None:
        """Nothing is ever on its way."""

    def close(self) -> None:
        self._second.shutdown()


def _error(pid: int, number: int) -> CopyError:
    reason = os.strerror(number)
    if number in (errno.EPERM, errno.ENOSYS):
        return NoAccessError(
            f"the kernel does not let the server copy memory of process {pid} ({reason}): run the server as "
            "the user of vLLM; set kernel.yama.ptrace_scope to 0 or 1, or give the server CAP_SYS_PTRACE; in "
            "containers share the process namespace and allow process_vm_readv in the seccomp profile"
        )
    if number == errno.ESRCH:
        return NoAccessError(
            f"the server cannot see process {pid}: it has ended, or it is in another process namespace "
            "(containers: share the pid namespace)"
        )
    return CopyError(f"copying memory of process {pid} failed: {reason}")
