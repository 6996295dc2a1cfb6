"""A world with one clock, one source of chance and no threads of its own.

Everything happens in events at virtual times. Code that waits runs in a task, a greenlet that hands control
back whenever it sleeps. The same seed gives the same history, event by event.
"""

import hashlib
import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet


class Process:
    """A process of this world. `killed` from the moment it runs no more code, `exited` once the system
    has torn it down; in between its connections break, one by one."""

    def __init__(self, world: "World", pid: int, name: str) -> None:
        self.world = world
        self.pid = pid
        self.name = name
        self.killed = self.exited = False
        self.at_kill: list[Callable[[], None]] = []
        self.at_exit: list[Callable[[], None]] = []

    def kill(self) -> None:
        if self.killed:
            return
        self.world.note(f"kill {self.name}")
        self.killed = True
        for function in self.at_kill:
            function()
        self.world.after(
            self.world.random.uniform(0, self.world.random.choice((0.03, 0.03, 1.5))), self._exit
        )

    def _exit(self) -> None:
        self.exited = True
        for function in list(self.at_exit):
            function()


class World:
    """See the module. `now_s` is the monotonic clock of every process."""

    def __init__(self, seed: int) -> None:
        self.seed, self.random = seed, random.Random(seed)
        self.now_s = self.random.uniform(1, 1e6)
        self.jumped_s = 0.0
        self.is_over = False
        self.processes: dict[int, Process] = {}
        """By process id; an id may be given again once its process has exited."""
        self.counts: dict[str, int] = {}
        self._events: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._sequence = itertools.count()
        self._hub = getcurrent()
        self._digest = hashlib.sha256()
        self.trace: list[str] | None = None

    # -- history ----------------------------------------------------------------------------------

    def note(self, what: str) -> None:
        """Part of the history: two runs of a seed must note the same."""
        line = f"{self.now_s:.6f} {what}"
        self._digest.update(line.encode())
        if self.trace is not None:
            self.trace.append(line)

    def count(self, what: str, amount: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + amount

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    # -- time -------------------------------------------------------------------------------------

    def after(self, delay_s: float, function: Callable[..., object], *arguments: Any) -> None:
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._sequence), function, arguments))

    def run(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Let events happen until `until` holds; False when it does not within `limit_s`."""
        end_s = self.now_s + limit_s
        while not until():
            if not self._events or self._events[0][0] > end_s:
                self.now_s = max(self.now_s, end_s)
                return False
            at_s, _, function, arguments = heapq.heappop(self._events)
            self.now_s = max(self.now_s, at_s)
            function(*arguments)
        return True

    def jump(self, seconds: float) -> None:
        """The machine was suspended: the clock is later, and everything that was due is late."""
        self.now_s += seconds
        self.jumped_s += seconds

    # -- tasks ------------------------------------------------------------------------------------

    def spawn(self, target: Callable[[], object], process: Process) -> "Task":
        task = Task(self, target, process)
        self.after(0.0, task.resume)
        return task

    def sleep(self, seconds: float) -> None:
        """In a task: let others go on for so long. A task of a killed process never returns."""
        task = getcurrent()
        assert isinstance(task, Task), "only tasks wait"
        self.after(seconds, task.resume)
        self._hub.switch()
        if task.process.killed:
            raise GreenletExit


class Task(greenlet):
    """A thread of control of a process."""

    def __init__(self, world: World, target: Callable[[], object], process: Process) -> None:
        super().__init__(target, world._hub)
        self._world = world
        self.process = process

    def resume(self) -> None:
        if not self.dead:
            self.switch()

    def join(self, timeout: float) -> None:
        limit_s = self._world.now_s + timeout
        while not self.dead and self._world.now_s < limit_s:
            self._world.sleep(0.01)

    def is_alive(self) -> bool:
        return not self.dead


class Lock:
    """A lock that the same task may take again."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._owner: Any = None
        self._depth = 0

    def __enter__(self) -> None:
        current = getcurrent()
        while self._depth and self._owner is not current:
            self._world.sleep(0.0001)
        self._owner = current
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1


class Event:
    def __init__(self, world: World) -> None:
        self._world = world
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True

    def wait(self, timeout: float) -> bool:
        limit_s = self._world.now_s + timeout
        while not self._is_set and self._world.now_s < limit_s:
            self._world.sleep(max(min(0.05, limit_s - self._world.now_s), 1e-6))
        return self._is_set
