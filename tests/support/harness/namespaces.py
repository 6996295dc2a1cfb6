"""A network namespace for the tests of programs that listen at every address."""

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1


@contextlib.contextmanager
def only_a_loopback() -> Iterator[None]:
    """This thread, and the processes that it starts, have no network but a loopback of their own. Sockets of
    files still reach everybody. Skips the test where the kernel does not allow that."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/proc/thread-self/ns/net").open() as before:
        if libc.unshare(_CLONE_NEWNET):
            reason = os.strerror(ctypes.get_errno())
            pytest.skip(f"needs a network namespace, and the kernel allows none ({reason}): run it as root")
        try:
            with socket.socket() as any_socket:
                fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP))
            yield
        finally:
            if libc.setns(before.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "cannot return to the network")
