"""A worker in a process of its own, to be killed: registers, stores a prompt, then stores for ever.

Arguments: the server's address, the engine id and, for memory of the virtual memory API, "virtual"."""

import itertools
import sys

import virtual_memory
from gpu_engine import GpuEngine, allocate, fused
from harness.rawclient import chain

CHUNK_SIZE, PAGE_BYTES, BLOCKS = 16, 1 << 20, 40


def main() -> None:
    kind = virtual_memory.allocate if sys.argv[3:] == ["virtual"] else allocate
    engine = GpuEngine(sys.argv[1], fused(PAGE_BYTES, BLOCKS), BLOCKS, sys.argv[2], kind).start()
    assert engine.worker.ready, engine.states
    for number in itertools.count():
        keys = chain(range(number, number + CHUNK_SIZE * 16), CHUNK_SIZE)
        if number == 0:
            for block in range(1, 17):
                engine.fill(0, block, block)
        engine.store_prompt(keys, [list(range(1, 17))])
        if number == 0:
            print("stored", flush=True)


if __name__ == "__main__":
    main()
