"""The processes of the soak's clients: started, stopped, killed and counted."""

import contextlib
import ctypes
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing.context import ForkProcess

from harness.exercise import WRONG_BYTE

from soak.clients import KINDS, Life

CLIENTS = 6
LIFE_S = (1.0, 8.0)
KILLED = 0.4
"""Part of the clients that SIGKILL ends, half of those while they are stopped; others kill themselves."""
LATE_S = 30.0
REST_WITHIN_S = 3.0
_PR_SET_PDEATHSIG = 1
_fork = multiprocessing.get_context("fork")


def _live(life: Life, address: str, http_port: int, seed: int, life_s: float) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    life(address, http_port, random.Random(seed), life_s)
    # Threads and sockets that are still there end with the process, as those of a program that crashes.
    os._exit(0)


@dataclass
class _Client:
    process: ForkProcess
    kind: str
    killed_s: float
    """When SIGKILL ends it."""
    late_s: float
    stops: bool
    stopped: bool = False


class Crew:
    """Keeps CLIENTS clients at work. Not a thread: `turn` does what is due."""

    def __init__(self, address: str, http_port: int, seed: int) -> None:
        self._where = address, http_port
        self._draw = random.Random(seed)
        self._clients: list[_Client] = []
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []

    def turn(self) -> None:
        self._reap()
        if len(self._clients) < CLIENTS:
            self._start()
        now_s = time.monotonic()
        for each in self._clients:
            if each.stops and not each.stopped and now_s > each.killed_s - 1.0:
                self._signal(each, signal.SIGSTOP, "stopped")
                each.stopped = True
            elif now_s > each.killed_s:
                self._signal(each, signal.SIGKILL, "killed")
            elif now_s > each.late_s:
                self.faults.append(f"a client ({each.kind}) hung")
                self._signal(each, signal.SIGKILL, "hung")

    def rest(self) -> None:
        """Ends all clients: those that end by themselves soon, and then the others."""
        ends_s = time.monotonic() + REST_WITHIN_S
        while self._clients:
            for each in self._clients:
                if each.stopped or time.monotonic() > min(each.killed_s, ends_s):
                    self._signal(each, signal.SIGKILL, "killed")
            self._reap()
            time.sleep(0.05)

    def close(self) -> None:
        for each in self._clients:
            each.process.kill()
            each.process.join()

    def _start(self) -> None:
        draw, now_s = self._draw, time.monotonic()
        life, life_s = draw.choice(KINDS), draw.uniform(*LIFE_S)
        arguments = (life, *self._where, draw.randrange(1 << 30), life_s)
        process = _fork.Process(target=_live, args=arguments, daemon=True)
        process.start()
        dies = draw.random() < KILLED
        killed_s = now_s + draw.random() * life_s if dies else float("inf")
        self._clients.append(
            _Client(process, life.__name__, killed_s, now_s + life_s + LATE_S, dies and draw.random() < 0.5)
        )
        self.counts[life.__name__] += 1

    def _signal(self, client: _Client, number: signal.Signals, what: str) -> None:
        if client.process.pid is not None and client.process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(client.process.pid, number)
            self.counts[what] += 1

    def _reap(self) -> None:
        for each in [each for each in self._clients if each.process.exitcode is not None]:
            self._clients.remove(each)
            code = each.process.exitcode
            each.process.close()
            if code == WRONG_BYTE:
                self.faults.append(f"a client ({each.kind}) loaded a wrong byte")
            elif code not in (0, -signal.SIGKILL):
                self.faults.append(f"a client ({each.kind}) ended with code {code}")
