"""A real process whose memory is copied from and to; what it holds is seen through a shared file, on a way
that does not use the copies under test."""

import mmap
import sys
from pathlib import Path

from harness.processes import ChildProcess

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
    """`num_bytes` of the memory of process `pid`, at `address` there; `view` shows them here."""

    def __init__(self, path: Path, num_bytes: int, tracer_pid: int) -> None:
        path.write_bytes(bytes(num_bytes))
        with path.open("r+b") as file:
            self.view = mmap.mmap(file.fileno(), 0)
        command = [sys.executable, "-c", _CHILD, str(path), str(tracer_pid)]
        self._process = ChildProcess("memory", command, pipes=True)
        self.pid = self._process.pid
        self.address = int(self._process.stdout.readline())

    def end(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self.end()
        self.view.close()
