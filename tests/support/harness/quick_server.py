"""The real server, killed and there again within milliseconds, hundreds of times."""

import contextlib
import os
import signal
import sys
from typing import Any

from harness.processes import ChildProcess
from harness.server import START_TIMEOUT_S, LMCacheServer

# Has everything imported, on which `lmcache server` spends most of its start, and forks it again and again.
_NURSERY = """
import ctypes, os, signal, sys
import lmcache_server.app
from lmcache_server.commands.cli import main
for _ in sys.stdin:
    pid = os.fork()
    if not pid:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        os.dup2(2, 1)
        main(sys.argv[1:])
    print(pid, flush=True)
    os.waitpid(pid, 0)
    print("gone", flush=True)
"""


class QuickServer(LMCacheServer):
    """A server whose `start` and `kill` take milliseconds."""

    def __init__(self, **flags: Any) -> None:
        super().__init__(**flags)
        command = [sys.executable, "-c", _NURSERY, "server", *self._options()]
        variables = {**self.environment, "PYTHONPATH": os.pathsep.join(sys.path)}
        self._nursery = ChildProcess("the nursery", command, variables, self.log, pipes=True)
        self._pid = 0

    @property
    def pid(self) -> int:
        assert self._pid, "the server is not running"
        return self._pid

    def start(self) -> None:
        self.spawn()
        self._nursery.wait_until_ready(self._is_ready, START_TIMEOUT_S, interval_s=0.001)

    def spawn(self) -> None:
        """Start it, and do not wait until it is ready."""
        assert not self._pid, "the server is running"
        self._nursery.say("")
        self._pid = int(self._nursery.stdout.readline())

    def kill(self) -> None:
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            assert self._nursery.stdout.readline() == b"gone\n"
            self._pid = 0

    def _remove(self) -> None:
        super()._remove()
        self._nursery.kill()
