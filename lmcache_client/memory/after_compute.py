"""Calls what must wait until the engine's GPU has computed what it was given."""

import queue
import threading
from collections.abc import Callable

from lmcache_kernels.driver import CudaError, Driver


class Fence:
    """Waits for points in a stream, in a thread of its own. The GPU never waits for another process, so the
    death of a process cannot stall it. After a failure, the thread calls nothing more. It sets `failure`
    last."""

    def __init__(self, driver: Driver, context: int, current_stream: Callable[[], int]) -> None:
        self._driver, self._context, self._current_stream = driver, context, current_stream
        self._free: list[int] = []
        self._waiting = queue.SimpleQueue[tuple[int | CudaError, Callable[[], None]] | None]()
        self.failure, self._closed = "", False
        self._thread = threading.Thread(target=self._work, name="lmcache-fence", daemon=True)
        self._thread.start()

    def after(self, function: Callable[[], None]) -> None:
        point: int | CudaError
        try:
            point = self._free.pop() if self._free else self._driver.create_event()
            self._driver.record(point, self._current_stream())
        except CudaError as error:  # for the thread, which has earlier functions to call
            point = error
        self._waiting.put((point, function))

    def close(self) -> None:
        self._closed = True
        self._waiting.put(None)
        self._thread.join()

    def _work(self) -> None:
        try:
            self._driver.enter(self._context)
            while (item := self._waiting.get()) is not None:
                point, function = item
                if isinstance(point, CudaError):
                    raise point
                self._driver.wait_for(point)
                self._free.append(point)
                if not self._closed:
                    function()
            while self._free:
                self._driver.destroy_event(self._free.pop())
        except Exception as error:  # whatever it is, the worker must hear of it
            self.failure = f"waiting for the GPU failed: {error}"
