"""A model in torch computes on with restored pages, to the bit."""

import os
import sys

import pytest
from harness.processes import ChildProcess

pytest.importorskip("torch")

from torch_engine import CHUNK_SIZE, LAYERS, PAGE_BYTES, PROMPT, STORED, Served

STORED_BYTES = STORED // 16 * LAYERS * PAGE_BYTES


@pytest.fixture
def server(start_server):
    return start_server(chunk_size=CHUNK_SIZE)


@pytest.fixture
def served(server, stack):
    made = Served(server.address, "engine")
    stack.callback(made.hooks.close)
    return made


def test_logits_behind_restored_pages_are_those_that_were_computed(server, served):
    table, other = list(range(1, 8)), [9, 23, 12, 30, 8, 21, 17]
    engine = served.engine
    before = served.computed(table)
    assert engine.computed == len(PROMPT)
    with engine.on_stream:
        engine.cache[1:] = 9.0
    assert served.restored(other, other) == before
    assert engine.computed == len(PROMPT) + len(PROMPT) - STORED
    assert server.tokens() == STORED
    assert server.metrics()['lmcache_transfer_bytes_total{direction="load"}'] == STORED_BYTES
    # Anything else would have been seen: each block one place off, and one number of a block.
    assert served.restored(other, [*other[1:], other[0]]) != before
    for block in other[:-1]:
        assert served.restored(other, other) == before
        with engine.on_stream:
            engine.cache[block, LAYERS - 1, 1, 3, 0, 0] += 1
        assert served.bytes_of(engine.compute(PROMPT, STORED, other)) != before


def test_another_process_computes_the_same_logits_with_them(server, served):
    before = served.computed(list(range(1, 8)))
    program = f"import vllm_stub as it; it.install(); import torch_engine as it; it.main({server.address!r})"
    command = [sys.executable, "-c", program]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with ChildProcess("another", command, environment, pipes=True) as process:
        logits, computed = process.stdout.readline().split()
    assert bytes.fromhex(logits.decode()) == before
    assert int(computed) == len(PROMPT) - STORED
    assert server.tokens() == STORED
