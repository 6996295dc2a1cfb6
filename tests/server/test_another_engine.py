"""A second engine, without vLLM: a model of transformers, whose pages the server stores and restores.

Its client is this file. It uses what every engine's client uses (of `lmcache_client/`: `engine.py`,
`server_channel.py`, `contract/` and `memory/`), and nothing of the product knows of it.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from harness.server import LMCacheServer
from harness.waiting import PATIENCE_S
from numpy.typing import NDArray
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from lmcache_client.contract.geometry import FULL, Geometry, GroupSpec, Region
from lmcache_client.contract.keys import ModelTag, chunk_keys
from lmcache_client.contract.messages import Done, Found, Lookup, Release, Store, Stored
from lmcache_client.engine import Worker, chunk_object, expect, join, load_message
from lmcache_client.memory.host import HostExport
from lmcache_client.server_channel import Channel

BLOCK, BLOCKS, LAYERS, HEADS, SIZE = 16, 64, 3, 2, 32
PROMPT, ANSWER = [7 * number % 251 for number in range(6 * BLOCK + 5)], 12


class Engine:
    """Computes with transformers, and keeps the KV cache of whole blocks in pages of its own."""

    def __init__(self, server: LMCacheServer, name: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=256, hidden_size=HEADS * SIZE, intermediate_size=96, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=HEADS,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config).eval()
        # Of each layer and block: keys and values, of each head and token.
        self.pages = np.zeros((LAYERS, BLOCKS, 2, HEADS, BLOCK, SIZE), np.float32)
        page_bytes = self.pages[0, 0].nbytes
        regions = tuple(Region(0, n * self.pages[n].nbytes, page_bytes, page_bytes) for n in range(LAYERS))
        self.groups = (GroupSpec(FULL, BLOCK, 0, "float32", regions),)
        weights = hashlib.sha256(
            b"".join(each.numpy().tobytes() for each in self.model.state_dict().values())
        )
        tag = ModelTag("tiny", (("engine", "transformers"), ("weights", weights.hexdigest())), 1, 1)
        export = HostExport(((self.pages.ctypes.data, self.pages.nbytes),))
        # A server that is started again is told again.
        channel = Channel(server.address, lambda _: self.register())
        self.worker = Worker(channel, name, 0, tag, Geometry(self.groups, BLOCKS), export)
        self.scheduler = Channel(server.address, lambda own: join(own, name))
        for each in (channel, self.scheduler):
            each.start(PATIENCE_S, PATIENCE_S)
            assert each.ready

    def register(self) -> None:
        self.chunk_size = self.worker.register().chunk_size

    def close(self) -> None:
        for each in (self.scheduler, self.worker.channel):
            each.close()

    def keys(self, tokens: Sequence[int]) -> list[bytes]:
        whole = (len(tokens) - 1) // self.chunk_size * self.chunk_size
        chunks = (tokens[start : start + self.chunk_size] for start in range(0, whole, self.chunk_size))
        return list(chunk_keys((chunk, None) for chunk in chunks))

    def answer(self, tokens: list[int], table: Sequence[int]) -> tuple[list[int], int]:
        """The tokens that follow, and how many of the prompt came from the server. `table` has the block of
        each position."""
        keys = self.keys(tokens)
        limit = len(keys) * self.chunk_size
        question = Lookup("request", tuple(keys), 0, limit, len(tokens))
        found = expect(self.scheduler.call(question, PATIENCE_S), Found)
        loaded, cache = found.resume_tokens, DynamicCache()
        if loaded:
            key = keys[loaded // self.chunk_size - 1]
            message = load_message("request", found, key, 0, self.groups, [table])
            expect(self.worker.channel.call(message, PATIENCE_S), Done)
            blocks = self.pages[:, table[: loaded // BLOCK]]
            for layer in range(LAYERS):
                pair = torch.from_numpy(np.concatenate(list(blocks[layer]), axis=2))
                cache.update(pair[0][None], pair[1][None], layer)
        told, rest = list[int](), tokens[loaded:]
        with torch.inference_mode():
            for _ in range(ANSWER):
                logits = self.model(torch.tensor([rest]), past_key_values=cache).logits[0, -1]
                rest = [int(logits.argmax())]
                told += rest
        self.store(keys, cache, table)
        leases = (found.lease_id,) if found.lease_id else ()
        expect(self.scheduler.call(Release(leases, tuple(keys), "request"), PATIENCE_S), Done)
        return told, loaded

    def store(self, keys: list[bytes], cache: DynamicCache, table: Sequence[int]) -> None:
        for layer, (keys_of, values_of, *_) in enumerate(cache):
            for position, block in enumerate(table[: len(keys) * self.chunk_size // BLOCK]):
                span = slice(position * BLOCK, (position + 1) * BLOCK)
                self.pages[layer, block] = torch.stack([keys_of[0][:, span], values_of[0][:, span]])
        per_chunk = self.chunk_size // BLOCK
        objects = [
            chunk_object(keys, chunk, 0, table[chunk * per_chunk : (chunk + 1) * per_chunk])
            for chunk in range(len(keys))
        ]
        expect(self.worker.channel.call(Store(tuple(objects)), PATIENCE_S), Stored)


def pages_of(engine: Engine, table: Sequence[int]) -> NDArray[np.float32]:
    return engine.pages[:, list(table[: len(PROMPT) // BLOCK])].copy()


def test_an_engine_without_vllm_resumes_where_another_has_been() -> None:
    one_way, back = list(range(1, 20)), list(range(40, 20, -1))
    with LMCacheServer(l1_size_gb=0.05, chunk_size=BLOCK) as server:
        first = Engine(server, "first")
        cold, hit = first.answer(PROMPT, one_way)
        assert hit == 0
        stored = pages_of(first, one_way)
        first.close()

        second = Engine(server, "second")
        warm, hit = second.answer(PROMPT, back)
        assert hit == len(PROMPT) // BLOCK * BLOCK, "what was computed elsewhere is served"
        assert np.array_equal(pages_of(second, back), stored), "each page is where it belongs"
        assert warm == cold
        second.close()

        other = Engine(server, "other weights", seed=1)
        told, hit = other.answer(PROMPT, one_way)
        assert hit == 0, "other weights, other pages"
        assert told != cold
        other.close()
