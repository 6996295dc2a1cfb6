"""The thread that waits for the GPU dies: loads fail, stores are dropped, and nobody waits for ever.

Here the thread, the connector and the channel are real. CUDA is not: `Events` stands for the driver's events,
because this machine may have no GPU. What a real driver does when an event fails was not run.
"""

import pytest
from harness.hostile import HostileServer
from harness.waiting import wait_until
from test_hostile_server import PATIENCE_S, Steps, hostile, short_deadlines, steps

from lmcache_client.contract.messages import Load, Store
from lmcache_client.memory.cuda import CudaExport, _Fence, _Shared
from lmcache_client.memory.host import HostExport
from lmcache_kernels.driver import CudaError

__all__ = ["hostile", "short_deadlines", "steps"]


class Events:
    """Events that have passed at once, except that `record` or `wait_for` fail on demand."""

    def __init__(self) -> None:
        self.broken = ""

    def enter(self, context: int) -> None:
        pass

    def create_event(self) -> int:
        return 1

    def create_stream(self) -> int:
        return 2

    def destroy_stream(self, stream: int) -> None:
        assert stream == 2

    def record(self, event: int, stream: int) -> None:
        self._fail("record")

    def wait_for(self, event: int) -> None:
        self._fail("wait_for")

    def _fail(self, name: str) -> None:
        if self.broken == name:
            raise CudaError(name, 700, "an illegal memory access")


class FencedExport(HostExport):
    """Host memory, behind the fence of a GPU's memory."""

    def __init__(self, inner: HostExport, events: Events) -> None:
        super().__init__(inner._buffers)
        self._fence = _Fence(events, 0, lambda: 0)  # type: ignore[arg-type]
        self._shared = _Shared(events, (), False)  # type: ignore[arg-type]
        self._stream, self._driver = events.create_stream(), events

    failure = CudaExport.failure  # type: ignore[assignment]
    after_compute = CudaExport.after_compute  # type: ignore[assignment]
    close = CudaExport.close  # type: ignore[assignment]


@pytest.mark.parametrize("where", ["record", "wait_for"])
def test_a_fence_that_dies_fails_loads_and_drops_stores(
    hostile: HostileServer, steps: Steps, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    events = Events()
    inner = steps.worker.client.export
    assert isinstance(inner, HostExport)
    steps.worker.client.export = FencedExport(inner, events)
    assert steps.is_served(), "as long as the fence works"
    wait_until(steps.is_whole, PATIENCE_S, "its stores have ended, too")
    events.broken = where
    asked = hostile.asked[Load], hostile.asked.get(Store, 0)
    for _ in range(3):
        offered, loaded = steps.request()
        assert offered
        assert not loaded
    assert (hostile.asked[Load], hostile.asked.get(Store, 0)) == asked, "nothing was sent"
    wait_until(steps.is_whole, PATIENCE_S, "no block is held any more")
    said = f"waiting for the GPU failed: {where}: an illegal memory access (CUDA error 700): this worker"
    assert caplog.text.count(said) == 1
    steps.worker.close()
