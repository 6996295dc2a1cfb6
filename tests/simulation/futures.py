"""What coroutines of the simulated server wait for: as asyncio's, without a loop of its own."""

from collections import deque
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulation.machine import SimulatedServer


class Future:
    def __init__(self, server: "SimulatedServer") -> None:
        self._server = server
        self._result: tuple[Any, ...] = ()
        self._error: Exception | None = None
        self._at_end: list[Any] = []

    def done(self) -> bool:
        return bool(self._result)

    def exception(self) -> Exception | None:
        return self._error

    def set_result(self, result: Any) -> None:
        if not self._result:
            self._result = (result,)
            for function, *arguments in self._at_end:
                self._server.run_soon(function, *arguments)

    def set_exception(self, error: Exception) -> None:
        if not self._result:
            self._error = error
            self.set_result(None)

    def when_done(self, function: Any, *arguments: Any) -> None:
        """Has the server call this soon after the end."""
        self._at_end.append((function, *arguments))

    def __await__(self) -> Generator["Future", None, Any]:
        if not self._result:
            yield self
        if self._error is not None:
            raise self._error
        return self._result[0]


class Semaphore:
    def __init__(self, server: "SimulatedServer", count: int) -> None:
        self._server = server
        self._left = count
        self._waiting: deque[Future] = deque()

    async def acquire(self) -> None:
        if self._left:
            self._left -= 1
            return
        self._waiting.append(Future(self._server))
        await self._waiting[-1]

    def release(self) -> None:
        if self._waiting:
            self._waiting.popleft().set_result(None)
        else:
            self._left += 1
