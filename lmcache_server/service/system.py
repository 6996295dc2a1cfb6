"""The server's view of the operating system: time, the processes of its clients and their memory.

The simulation in the tests replaces System; the rest of the server runs there unchanged.
"""

import asyncio
import errno
import os
import select
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from lmcache_client.contract.messages import Memory
from lmcache_server.host import descriptors
from lmcache_server.transfer.copy_queue import CopyWorker
from lmcache_server.transfer.cuda import CudaMapping
from lmcache_server.transfer.gpus import Gpus
from lmcache_server.transfer.host import HostMapping
from lmcache_server.transfer.locked_memory import LockedMemory


class ScarceError(Exception):
    """No file descriptor is left."""


class Process:
    """A process of this machine, held by a descriptor: that stays valid when the process id is reused."""

    def __init__(self, descriptor: int, loop: asyncio.AbstractEventLoop) -> None:
        self._descriptor = descriptor
        self._loop = loop

    def alive(self) -> bool:
        """Whether it runs. Any thread may ask until `close`, the owner's thread even afterwards."""
        if self._descriptor < 0:
            return False
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return not poll.poll(0)

    def when_ended(self, function: Callable[..., object], *arguments: object) -> None:
        """Calls `function` once the process has ended, unless `close` comes first. Only one may be set."""
        self._loop.add_reader(self._descriptor, function, *arguments)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            self._loop.remove_reader(descriptor)
            os.close(descriptor)


class System:
    def __init__(self, loop: asyncio.AbstractEventLoop, gpus: Gpus, locked: LockedMemory) -> None:
        self._loop = loop
        self._gpus = gpus
        self._locked = locked
        self._tasks: set[asyncio.Task[None]] = set()
        self.pid = os.getpid()

    def now_s(self) -> float:
        """The monotonic time in seconds."""
        return time.monotonic()

    def random_bytes(self, count: int) -> bytes:
        return os.urandom(count)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> "asyncio.Future[None]":
        """Runs a coroutine, which must handle its own errors. Returns a future that is done at its end."""
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def future(self) -> "asyncio.Future[None]":
        return self._loop.create_future()

    async def wait(self, futures: Sequence["asyncio.Future[Any]"], timeout_s: float | None) -> None:
        """Returns when all are done, or after `timeout_s`."""
        await asyncio.wait(futures, timeout=timeout_s)

    async def all_ended(self, timeout_s: float) -> bool:
        """Waits for everything that was spawned; returns False if some of it still runs after `timeout_s`."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        return not self._tasks

    def open_process(self, pid: int) -> Process | None:
        """Opens a process; None if it has ended or is in another process namespace. Raises ScarceError."""
        try:
            descriptor = os.pidfd_open(pid)
        except (OSError, OverflowError) as error:
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise ScarceError from error
            return None
        if descriptor >= descriptors.usable():
            os.close(descriptor)
            raise ScarceError
        return Process(descriptor, self._loop)

    def copier(self, name: str, memory: Memory, alive: Callable[[], bool]) -> CopyWorker:
        """Starts the thread that copies to and from a worker's memory."""
        mapping = CudaMapping(memory, self._gpus, self._locked) if memory.device else HostMapping(memory)
        return CopyWorker(name, mapping, alive, self._loop)
