"""A worker in a process of its own, to be killed: registers, stores a prompt, then stores for ever."""

import itertools
import sys

from gpu_engine import GpuEngine, fused
from harness.rawclient import chain

CHUNK_SIZE, PAGE_BYTES, BLOCKS = 16, 1 << 20, 40


def main() -> None:
    engine = GpuEngine(sys.argv[1], fused(PAGE_BYTES, BLOCKS), BLOCKS, sys.argv[2]).start()
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
