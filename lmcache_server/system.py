"""What the server asks of the operating system: time, its clients' processes and their memory.

The simulation in the tests replaces this as a whole; everything else of the server runs there as it is.
"""

import asyncio
import errno
import functools
import os
import select
import time
from collections.abc import Callable

from lmcache_server import descriptors
from lmcache_server.transfer import host
from lmcache_server.transfer.base import CopyWorker


class ScarceError(Exception):
    """There is no file descriptor to spare."""


class Process:
    """A process of this machine, by a descriptor that stays its own when its id is given to another."""

    def __init__(self, descriptor: int, loop: asyncio.AbstractEventLoop) -> None:
        self._descriptor = descriptor
        self._loop = loop

    def alive(self) -> bool:
        """May be asked in any thread until `close`, in the owner's even after."""
        if self._descriptor < 0:
            return False
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return not poll.poll(0)

    def when_ended(self, function: Callable[..., object], *arguments: object) -> None:
        """Call `function` once it has ended; at most one for each descriptor, none after `close`."""
        self._loop.add_reader(self._descriptor, function, *arguments)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            self._loop.remove_reader(descriptor)
            os.close(descriptor)


class System:
    """See the module."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.pid = os.getpid()

    def now_s(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def random_bytes(self, count: int) -> bytes:
        return os.urandom(count)

    def call_soon(self, function: Callable[..., object], *arguments: object) -> None:
        """Run `function` on the event loop, soon."""
        self._loop.call_soon(function, *arguments)

    def open_process(self, pid: int) -> Process | None:
        """None where the id means nothing here: another process namespace, or the process has ended.
        Raises ScarceError."""
        try:
            descriptor = os.pidfd_open(pid)
        except OverflowError:
            return None
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise ScarceError from error
            return None
        if descriptor >= descriptors.usable():
            os.close(descriptor)
            raise ScarceError
        return Process(descriptor, self._loop)

    def read(self, pid: int, address: int, num_bytes: int) -> bytes:
        """Bytes of a process's memory; raises CopyError."""
        return host.read(pid, address, num_bytes)

    def check_access(self, pid: int, address: int, num_bytes: int) -> None:
        """Raises CopyError unless the first and the last of these bytes can be read."""
        host.check_access(pid, address, num_bytes)

    def copier(self, name: str, pid: int, alive: Callable[[], bool]) -> CopyWorker:
        """The thread that copies to and from the memory of process `pid`."""
        copy = functools.partial(host.copy, pid)
        return CopyWorker(name, copy, alive, self._loop.call_soon_threadsafe)
