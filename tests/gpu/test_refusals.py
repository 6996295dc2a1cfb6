"""What cannot be served is refused with a sentence that says what to change, and costs nobody else."""

import ctypes
import os
from types import SimpleNamespace

import pytest
from gpu_engine import GpuEngine, fused
from harness.rawclient import start_all
from harness.server import LMCacheServer
from harness.waiting import wait_until
from msgspec import structs
from test_round_trips import CHUNK_SIZE, restored, stored_prompt, tables

from lmcache_client.contract.messages import Memory
from lmcache_client.memory.cuda import CudaExport, ExportError
from lmcache_client.server_channel import RefusedError
from lmcache_kernels.driver import CudaError
from lmcache_server.transfer.base import HandleError, NoAccessError
from lmcache_server.transfer.cuda import CudaMapping

PAGE_BYTES, BLOCKS = 64 << 10, 32


def test_memory_that_has_no_handle_is_refused_with_the_settings(driver):
    """Sleep mode and expandable segments give memory of the same kind as this pool: no legacy handle."""
    allocate, address = driver._library.cuMemAllocAsync, ctypes.c_ulonglong()
    allocate.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    assert allocate(ctypes.byref(address), 4 << 20, None) == 0
    with pytest.raises(ExportError, match=r"expandable_segments.*--enable-sleep-mode"):
        CudaExport(((address.value, 4 << 20),), lambda: 0)


def refused(server, change) -> RefusedError:
    """An engine whose memory is described as `change` makes it."""
    engine = GpuEngine(server.address, fused(PAGE_BYTES, BLOCKS), BLOCKS)
    try:
        honest = engine.own_memory()
        engine.export.memory = lambda _pid: change(honest)  # type: ignore[method-assign]
        start_all([engine.worker])
        refusal = engine.worker.refusal
        assert refusal is not None
        return refusal
    finally:
        engine.close()


@pytest.mark.skipif("CUDA_STANDIN_DIR" not in os.environ, reason="no driver says no at will")
def test_a_driver_that_does_not_tell_the_range_of_opened_memory_still_checks_it(stack, start_engine):
    server = LMCacheServer(chunk_size=CHUNK_SIZE)
    server.environment["CUDA_STANDIN_NO_RANGE"] = "1"
    stack.enter_context(server)
    engine = start_engine(server, fused(PAGE_BYTES, BLOCKS), BLOCKS, "honest")
    for size in (16 << 20, 1 << 45):
        lie = lambda honest, size=size: structs.replace(honest, buffers=((honest.buffers[0][0], size),))  # noqa: E731
        sentence = str(refused(server, lie))
        assert "beyond the allocation" in sentence or "cannot use the worker's GPU" in sentence
    keys, pages = stored_prompt(engine, 3, list(range(1, 16)), 1)
    assert restored(engine, keys, pages, tables(engine, 3, list(range(16, 32)))) == 6


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (2, "--gpu-memory-utilization"),
        (46, "nvidia-smi -c 0"),
    ],
)
@pytest.mark.parametrize("step", ["find", "open_handle", "create_stream"])
def test_each_step_of_opening_names_what_mends_it(code, remedy, step):
    sentence = sentence_of(step, code)
    assert remedy in sentence
    assert f"{step}: no (CUDA error {code})" in sentence
    assert "--pid=host" not in sentence


@pytest.mark.parametrize("code", [1, 201, 205, 400])
def test_only_a_handle_that_is_refused_depends_on_the_user_and_the_namespace(code):
    assert "cannot open the worker's GPU memory" in sentence_of("open_handle", code, HandleError)
    for step in ("find", "create_stream", "read"):
        assert "cannot use the worker's GPU" in sentence_of(step, code)


def sentence_of(step: str, code: int, error: type[Exception] = NoAccessError) -> str:
    """How the server refuses a worker if one step of opening its memory fails with this code of CUDA."""

    def fail(*_: object) -> None:
        raise CudaError(step, code, "no")

    driver = SimpleNamespace(
        open_handle=lambda _: 1 << 20,
        allocation=lambda _: (1 << 20, 1 << 20),
        create_event=lambda: 1,
        create_stream=lambda: 1,
        read=lambda *_: b"",
    )
    nothing = lambda: None  # noqa: E731
    gpu = SimpleNamespace(driver=driver, lost="", enter=nothing, stay_near=nothing, kernel=lambda: 0)
    gpus = SimpleNamespace(find=lambda _: gpu)
    setattr(gpus if step == "find" else driver, step, fail)
    mapping = CudaMapping(Memory(1, ((0, 1 << 20),), 0, b"\xee" * 16, (b"\xee" * 64,)), gpus, None)
    with pytest.raises(NoAccessError) as refusal:
        mapping.open()
    assert type(refusal.value) is error
    return str(refusal.value)


def warned(server: LMCacheServer, sentence: str) -> bool:
    return any("WARNING" in line and sentence in line for line in server.log.read_text().splitlines())


def test_what_a_worker_says_of_its_memory_is_checked(start_server, start_engine, counters):
    server = start_server(chunk_size=CHUNK_SIZE)
    size = fused(PAGE_BYTES, BLOCKS).num_bytes
    wrong = {
        "does not see the engine's GPU": lambda honest: structs.replace(honest, device=b"\xee" * 16),
        "user and process namespace are the same": lambda honest: structs.replace(
            honest, handles=(b"\xee" * 64,)
        ),
        "beyond the allocation": lambda honest: structs.replace(honest, buffers=((1 << 40, size),)),
        "the nonce is not in the memory": lambda honest: structs.replace(
            honest, buffers=(*honest.buffers, (0, PAGE_BYTES)), handles=honest.handles * 2
        ),
    }
    for sentence, change in wrong.items():
        assert sentence in str(refused(server, change))
        wait_until(lambda sentence=sentence: warned(server, sentence))
    server.wait_at_rest()
    # The copy thread unmaps after the session has ended.
    wait_until(lambda: (counted := counters(server)) is None or counted.mappings == 0)
    engine = start_engine(server, fused(PAGE_BYTES, BLOCKS), BLOCKS)
    keys, pages = stored_prompt(engine, 3, list(range(1, 16)), 1)
    assert restored(engine, keys, pages, tables(engine, 3, list(range(16, 32)))) == 6
