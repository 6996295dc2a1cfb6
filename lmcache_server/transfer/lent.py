"""File descriptors of other processes, by which they share GPU memory of CUDA's virtual memory API.

A process lends them over a Unix socket. If the server has another runtime directory, the kernel copies them.
"""

import contextlib
import ctypes
import errno
import os
import socket
from collections.abc import Iterator

from lmcache_client.contract.endpoint import LENT_BYTES, lending_path
from lmcache_server.transfer.base import NoAccessError
from lmcache_server.transfer.host import check_user, copy_error

_PIDFD_GETFD = 438
"""The number of the system call on every processor; Linux 5.6."""
PATIENCE_S = 2.0
_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def lent(pid: int, descriptor: int) -> Iterator[int]:
    """A copy of file descriptor number `descriptor` of process `pid`, open as long as the context. Whatever
    it is, nothing is read from it or written to it. Raises NoAccessError."""
    try:
        check_user(pid)
        loan = borrowed(pid, descriptor)
        copy = _copied(pid, descriptor) if loan is None else loan
    except OSError as error:
        raise NoAccessError(_sentence(pid, error)) from error
    try:
        yield copy
    finally:
        os.close(copy)


def borrowed(pid: int, descriptor: int) -> int | None:
    """A copy of this descriptor of process `pid`, for the caller to close; None if it lends none."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(PATIENCE_S)
        asking.connect(str(lending_path(pid)))
        asking.sendall(descriptor.to_bytes(LENT_BYTES, "little"))
        for copy in socket.recv_fds(asking, 1, 1)[1]:
            os.set_inheritable(copy, False)
            return copy
    return None


def _copied(pid: int, descriptor: int) -> int:
    process = os.pidfd_open(pid)
    try:
        number = int(_libc.syscall(_PIDFD_GETFD, process, descriptor, 0))
        if number < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return number
    finally:
        os.close(process)


def _sentence(pid: int, error: OSError) -> str:
    reason = error.strerror
    if error.errno in (errno.EPERM, errno.ENOSYS):
        return (
            f"the kernel does not let the server share the GPU memory of process {pid} ({reason}): run the "
            "server as the user of vLLM, with the same LMCACHE_RUNTIME_DIR (containers: as a shared volume); "
            "or start vLLM without --enable-sleep-mode and --enable-cumem-allocator"
        )
    if error.errno in (errno.ESRCH, errno.ENOENT):
        return str(copy_error(pid, errno.ESRCH))
    if error.errno == errno.EBADF:
        return f"process {pid} has no such file descriptor"
    return f"the server cannot share the GPU memory of process {pid}: {reason}"
