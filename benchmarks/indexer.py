"""How many block events a router's index takes: `PYTHONPATH=tests/support python benchmarks/indexer.py`.

Publishes events of stored chunks, of 32 blocks of 16 tokens each, as vLLM's engines do, to Dynamo's indexer, faster
than it takes them. Waits until it finds the last one, and prints the blocks per second. One process of it, one engine.
Needs the routers that `make test` installs.
"""

import random
import time

import msgspec
import zmq
from harness.processes import free_port
from harness.routers import DynamoIndexer
from harness.waiting import wait_until
from vllm.distributed.kv_events import BlockStored, EventBatch

CHAINS, CHUNKS, BLOCKS, BLOCK = 400, 40, 32, 16
"""Prompts, their chunks, the blocks of a chunk, the tokens of a block."""


def main() -> None:
    draw, port = random.Random(0), free_port()
    batches, last = [], []
    for _ in range(CHAINS):
        events, parent, last = [], None, []
        for _ in range(CHUNKS):
            hashes = [draw.getrandbits(63) for _ in range(BLOCKS)]
            tokens = [draw.randrange(50_000) for _ in range(BLOCKS * BLOCK)]
            events.append(BlockStored(hashes, parent, tokens, BLOCK, None, "CPU", None))
            parent = hashes[-1]
            last += tokens
        batches.append(msgspec.msgpack.encode(EventBatch(time.time(), events)))
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.bind(f"tcp://*:{port}")
        with DynamoIndexer(port, BLOCK) as indexer:
            time.sleep(3)
            start_s = time.monotonic()
            for number, batch in enumerate(batches):
                socket.send_multipart((b"", number.to_bytes(8, "big"), batch))
            wait_until(lambda: indexer.tokens(last) == (0, len(last)), 120, interval_s=0.05)
            seconds = time.monotonic() - start_s
    blocks = CHAINS * CHUNKS * BLOCKS
    print(f"{blocks:,} blocks in {seconds:.1f} s: {blocks / seconds:,.0f} a second")


if __name__ == "__main__":
    main()
