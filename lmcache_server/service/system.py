"""What the server asks of the operating system: time, its clients' processes and their memory.

The simulation in the tests replaces this as a whole; everything else of the server runs there as it is.
"""

import asyncio
import errno
import os
import select
import time
from collections.abc import Callable, Coroutine
from typing import Any

from lmcache_client.contract.messages import Memory
from lmcache_server.host import descriptors
from lmcache_server.transfer.cuda import CudaMapping
from lmcache_server.transfer.gpus import Gpus
from lmcache_server.transfer.host import HostMapping
from lmcache_server.transfer.pins import Pins
from lmcache_server.transfer.worker import CopyWorker


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

    def __init__(self, loop: asyncio.AbstractEventLoop, gpus: Gpus, pins: Pins) -> None:
        self._loop = loop
        self._gpus = gpus
        self._pins = pins
        self._tasks: set[asyncio.Task[None]] = set()
        self.pid = os.getpid()

    def now_s(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def random_bytes(self, count: int) -> bytes:
        return os.urandom(count)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine on the event loop. It handles its own errors: one that it does not is logged."""
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def all_ended(self, timeout_s: float) -> bool:
        """Wait for everything that was spawned; False if something still waits after `timeout_s`."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        return not self._tasks

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

    def copier(self, name: str, memory: Memory, alive: Callable[[], bool]) -> CopyWorker:
        """The thread that copies to and from a worker's memory."""
        mapping = CudaMapping(memory, self._gpus, self._pins) if memory.device else HostMapping(memory)
        return CopyWorker(name, mapping, alive, self._loop)
