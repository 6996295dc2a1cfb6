"""An engine that computes: a small model in torch, whose paged KV cache the server copies from and to.

Its forward pass takes one token, in fixed tensors. On a GPU it is a CUDA graph; on the stand-in it runs on
the CPU, in the same memory.
"""

import ctypes
from collections.abc import Callable

import torch
from gpu_engine import BLOCK_SIZE, OFFSET, GpuEngine, cross_layer
from harness.rawclient import chain
from harness.waiting import wait_until
from hooks import TIMEOUT_S, Hooks

from lmcache_client.connector.metadata import LoadJob, StepMetadata, StoreJob
from lmcache_client.contract.messages import Store
from lmcache_client.engine import chunk_object, load_message

VOCABULARY, WIDTH, HEADS, LAYERS = 128, 64, 4, 3
NUM_BLOCKS, CONTEXT = 40, 8 * BLOCK_SIZE
PER_CHUNK = 2
CHUNK_SIZE = PER_CHUNK * BLOCK_SIZE
PAGE_BYTES = 2 * BLOCK_SIZE * WIDTH * 4
PROMPT = [(7 * index * index + 3) % VOCABULARY for index in range(3 * CHUNK_SIZE + 5)]
STORED = 3 * CHUNK_SIZE
KEYS = chain(PROMPT, CHUNK_SIZE)


class TorchEngine(GpuEngine):
    def __init__(self, address: str, engine_id: str) -> None:
        super().__init__(address, cross_layer(PAGE_BYTES, NUM_BLOCKS, LAYERS), NUM_BLOCKS, engine_id)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        if self.device == "cuda":
            memory = self._keeper[OFFSET:]
            self.on_stream = torch.cuda.stream(torch.cuda.ExternalStream(self.stream))
        else:
            place = (ctypes.c_ubyte * self._num_bytes).from_address(self.address)
            memory = torch.frombuffer(place, dtype=torch.uint8)
            self.on_stream = torch.no_grad()
        shape = (NUM_BLOCKS, LAYERS, 2, BLOCK_SIZE, HEADS, WIDTH // HEADS)
        self.cache = memory[: self._num_bytes].view(torch.float32).view(shape)
        self.computed = 0
        self._allocate()
        self._graph = self._captured() if self.device == "cuda" else None

    def _allocate(self) -> None:
        """Weights, the same in each process, and the places of what goes in and out."""
        generator = torch.Generator().manual_seed(1)
        sizes = [(VOCABULARY, WIDTH), (CONTEXT, WIDTH), (WIDTH, VOCABULARY)]
        sizes += LAYERS * [(WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)]
        made = [torch.randn(size, generator=generator) / size[0] ** 0.5 for size in sizes]
        self._embedding, self._places, self._head, *layers = (each.to(self.device) for each in made)
        self._layers = [layers[first : first + 4] for first in range(0, len(layers), 4)]
        self._token = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._position = torch.zeros_like(self._token)
        self._table = torch.zeros(CONTEXT // BLOCK_SIZE, dtype=torch.int64, device=self.device)
        self._all_positions = torch.arange(CONTEXT, device=self.device)
        self._logits = torch.zeros(VOCABULARY, device=self.device)
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _forward(self) -> None:
        head_width = WIDTH // HEADS
        block, offset = self._table[self._position // BLOCK_SIZE], self._position % BLOCK_SIZE
        behind = self._all_positions > self._position
        x = 3 * self._embedding[self._token] + 3 * self._places[self._position]
        for layer, (into, out, up, down) in enumerate(self._layers):
            normed = torch.nn.functional.layer_norm(x, (WIDTH,))
            query, key, value = (normed @ into).view(3, HEADS, head_width)
            pages = self.cache[:, layer]
            pages[block, 0, offset], pages[block, 1, offset] = key, value
            keys, values = pages[self._table].transpose(0, 1).reshape(2, CONTEXT, HEADS, head_width)
            scores = torch.einsum("hw,chw->hc", query, keys).masked_fill(behind, float("-inf"))
            attended = torch.einsum("hc,chw->hw", torch.softmax(scores, 1), values)
            x = x + attended.reshape(1, WIDTH) @ out
            x = x + torch.relu(torch.nn.functional.layer_norm(x, (WIDTH,)) @ up) @ down
        self._logits.copy_((torch.nn.functional.layer_norm(x, (WIDTH,)) @ self._head)[0])

    def _captured(self) -> "torch.cuda.CUDAGraph":
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), self.on_stream:
            for _ in range(3):
                self._forward()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                self._forward()
        return graph

    def compute(self, tokens: list[int], first: int, table: list[int]) -> torch.Tensor:
        """The logits of the tokens from position `first` on, whose pages go into the blocks of `table`. On a
        GPU they are submitted, and not computed yet."""
        logits = []
        with torch.no_grad(), self.on_stream:
            self._table.copy_(torch.tensor(table + [0] * (CONTEXT // BLOCK_SIZE - len(table))))
            for position in range(first, len(tokens)):
                self._token.fill_(tokens[position])
                self._position.fill_(position)
                (self._forward if self._graph is None else self._graph.replay)()
                logits.append(self._logits.clone())
                self.computed += 1
            return torch.stack(logits)


class Served:
    """Such an engine behind the connector, at a real server."""

    def __init__(self, address: str, engine_id: str) -> None:
        self.engine = TorchEngine(address, engine_id)
        self.hooks = Hooks(self.engine, address, CHUNK_SIZE)

    def bytes_of(self, logits: torch.Tensor) -> bytes:
        self.engine.driver.synchronize(self.engine.stream)
        return bytes(logits.cpu().numpy().tobytes())

    def run(self, number: int, metadata: StepMetadata, forward: Callable[[], None] = lambda: None) -> None:
        """A step with one job."""
        self.hooks.settled.clear()
        self.hooks.step(metadata, forward)
        what = "the job has ended"
        wait_until(lambda: (self.hooks.collect(), number in self.hooks.settled)[1], TIMEOUT_S, what)

    def computed(self, table: list[int]) -> bytes:
        """Computes the prompt, and stores its chunks behind that; the logits behind the last chunk."""
        blocks = [
            tuple(table[first : first + PER_CHUNK]) for first in range(0, len(KEYS) * PER_CHUNK, PER_CHUNK)
        ]
        objects = tuple(chunk_object(KEYS, chunk, 0, ids) for chunk, ids in enumerate(blocks))
        made: list[torch.Tensor] = []
        stores = StepMetadata(stores=[StoreJob(1, Store(objects))])
        self.run(1, stores, lambda: made.append(self.engine.compute(PROMPT, 0, table)))
        return self.bytes_of(made[0][STORED:])

    def restored(self, table: list[int], blocks: list[int]) -> bytes:
        """Loads the chunks into `blocks`, and computes what is behind them with the blocks of `table`."""
        found = self.engine.lookup(KEYS)
        assert found.resume_tokens == STORED, "served by the server"
        message = load_message("request", found, KEYS[-1], 0, self.engine.groups, [blocks])
        self.run(2, StepMetadata([LoadJob(2, "request", message)]))
        assert self.hooks.loaded == {"request"}
        self.engine.end(found)
        return self.bytes_of(self.engine.compute(PROMPT, STORED, table))


def main(address: str) -> None:
    """In another process: prints the logits behind what the server restores."""
    served = Served(address, "another")
    table = list(range(30, 30 - 7, -1))
    print(served.restored(table, table).hex(), served.engine.computed, flush=True)
    served.hooks.close()
