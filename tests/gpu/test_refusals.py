"""What cannot be served is refused with a sentence that says what to change, and costs nobody else."""

import ctypes

import pytest
from gpu_engine import GpuEngine, fused
from msgspec import structs
from test_round_trips import CHUNK_SIZE, restored, stored_prompt, tables

from lmcache_client.channel import RefusedError
from lmcache_client.memory.cuda import CudaExport, ExportError

PAGE_BYTES, BLOCKS = 64 << 10, 32


def test_memory_that_has_no_handle_is_refused_with_the_settings(driver):
    """Sleep mode and expandable segments give memory of the same kind as this pool: no legacy handle."""
    allocate, address = driver._library.cuMemAllocAsync, ctypes.c_ulonglong()
    allocate.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    assert allocate(ctypes.byref(address), 4 << 20, None) == 0
    with pytest.raises(ExportError, match=r"--enable-sleep-mode.*expandable_segments"):
        CudaExport(((address.value, 4 << 20),), lambda: 0)


def refused(server, change) -> RefusedError:
    """An engine whose memory is described as `change` makes it."""
    engine = GpuEngine(server.address, fused(PAGE_BYTES, BLOCKS), BLOCKS)
    try:
        honest = engine.own_memory()
        engine.export.memory = lambda _pid: change(honest)  # type: ignore[method-assign]
        engine.worker.start(5, 5)
        refusal = engine.worker.refusal
        assert refusal is not None
        return refusal
    finally:
        engine.close()


def test_what_a_worker_says_of_its_memory_is_checked(start_server, start_engine, counters):
    server = start_server(chunk_size=CHUNK_SIZE)
    size = fused(PAGE_BYTES, BLOCKS).num_bytes
    wrong = {
        "does not see the engine's GPU": lambda honest: structs.replace(honest, device=b"\xee" * 16),
        "cannot open the worker's GPU memory": lambda honest: structs.replace(
            honest, handles=(b"\xee" * 64,)
        ),
        "beyond the allocation": lambda honest: structs.replace(honest, buffers=((64 << 20, size),)),
        "the nonce is not in the memory": lambda honest: structs.replace(
            honest, buffers=(*honest.buffers, (0, PAGE_BYTES)), handles=honest.handles * 2
        ),
    }
    for sentence, change in wrong.items():
        assert sentence in str(refused(server, change))
    server.wait_at_rest()
    if (counted := counters(server)) is not None:
        assert counted.mappings == 0
    engine = start_engine(server, fused(PAGE_BYTES, BLOCKS), BLOCKS)
    keys, pages = stored_prompt(engine, 3, list(range(1, 16)), 1)
    assert restored(engine, keys, pages, tables(engine, 3, list(range(16, 32)))) == 6
