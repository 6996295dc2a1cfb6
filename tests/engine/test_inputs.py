"""Inputs that are more than tokens: what shares a key, and a real engine that is given embeddings.

The judge of keys is vLLM itself: two requests may share a chunk exactly where their block hashes, which
are computed from real `Request` objects, are equal at its end.
"""

import itertools

import torch
from harness.engine import Engine
from harness.prompts import prompt
from harness.served import served
from harness.server import LMCacheServer
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from lmcache_client.connector.request import Tracked

BLOCK, CHUNK, CHUNKS = 8, 16, 4
LENGTH = CHUNK * CHUNKS + 3
IMAGE_TOKEN = 7


def request(
    images: list[tuple[str, int, int]] | None = None,
    embeds: int | None = None,
    tokens: bool = True,
    salt: str | None = None,
    lora: str | None = None,
    output: int = 0,
) -> Request:
    """`images` are (hash, offset, length); `embeds` is a seed, of which a change at token 40 is made when it
    is odd."""
    ids = [100 + i for i in range(LENGTH)]
    for _, offset, length in images or []:
        ids[offset : offset + length] = [IMAGE_TOKEN] * length
    tensor = None
    if embeds is not None:
        tensor = torch.randn(LENGTH, 4, generator=torch.Generator().manual_seed(embeds // 2))
        tensor = tensor.to(torch.bfloat16)
        tensor[40:] += embeds % 2
    made = Request(
        "request",
        ids if tokens or tensor is None else None,
        SamplingParams(max_tokens=8),
        None,
        prompt_embeds=tensor,
        mm_features=[
            MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset, length))
            for name, offset, length in images or []
        ],
        cache_salt=salt,
        lora_request=LoRARequest(lora, 1, f"/adapters/{lora}") if lora else None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )
    made.append_output_token_ids([output] * CHUNK)
    return made


def keys(of: Request, chunks: int = CHUNKS + 1) -> list[bytes]:
    tracked = Tracked(of)
    tracked.reset(1, CHUNK)
    # In two calls, as a prompt is looked up and its answer stored later.
    tracked.keys_of(2)
    return list(tracked.keys_of(chunks))


def shared(first: Request, second: Request) -> list[bool]:
    """Which chunks of both share a key; vLLM must say the same."""
    ours = [a == b for a, b in zip(keys(first), keys(second), strict=True)]
    hashes = zip(first.block_hashes, second.block_hashes, strict=True)
    theirs = [a == b for a, b in hashes][CHUNK // BLOCK - 1 :: CHUNK // BLOCK]
    assert ours == theirs[: len(ours)]
    return ours


@st.composite
def requests(draw: st.DrawFn) -> Request:
    images, offset = [], draw(st.integers(0, 20))
    for _ in range(draw(st.integers(0, 2))):
        # What is the same takes up the same room: vLLM does not tell lengths apart inside a block either.
        name = draw(st.sampled_from("abc"))
        length = {"a": 1, "b": 8, "c": 20}[name]
        images.append((name, offset, length))
        offset += length + draw(st.sampled_from([0, 5]))
    return request(
        images,
        draw(st.none() | st.integers(0, 3)),
        draw(st.booleans()),
        draw(st.sampled_from([None, "x", "y"])),
        draw(st.sampled_from([None, "m", "n"])),
        draw(st.integers(0, 1)),
    )


init_none_hash(sha256)


@settings(deadline=None, max_examples=300)
@given(requests(), requests())
def test_chunks_share_a_key_exactly_where_vllms_blocks_share_a_hash(first: Request, second: Request) -> None:
    shared(first, second)
    assert all(shared(first, first))


def test_images_are_told_apart_by_what_they_are_and_where() -> None:
    one = request([("a", 20, 8)])
    for images, same in (
        ([("a", 20, 8)], 5),
        ([("b", 20, 8)], 1),
        ([("a", 21, 8)], 1),
        ([("a", 20, 8), ("c", 50, 4)], 3),
    ):
        assert shared(one, request(images)) == [True] * same + [False] * (5 - same), images
    # Two images side by side of which the border moves, at the same tokens.
    first, second = request([("a", 4, 8), ("b", 12, 8)]), request([("a", 4, 4), ("b", 8, 12)])
    assert first.all_token_ids[:LENGTH] == second.all_token_ids[:LENGTH]
    assert shared(first, second) == [False] * 5


def test_embeddings_salts_and_adapters_are_told_apart() -> None:
    only = request(embeds=0, tokens=False)
    assert only.prompt_token_ids is None
    assert shared(only, request(embeds=0, tokens=False)) == [True] * 5
    assert shared(only, request(embeds=2, tokens=False)) == [False] * 5
    assert shared(only, request(embeds=1, tokens=False)) == [True, True, False, False, False]
    assert shared(only, request(embeds=0)) == [False] * 5, "the same embeddings beside tokens"
    # Placeholders for tokens are zeros: a prompt of real zeros is another prompt.
    zeros = Request("r", [0] * LENGTH, SamplingParams(max_tokens=8), None)
    assert not set(keys(zeros, CHUNKS)) & set(keys(only, CHUNKS))
    assert shared(only, request(embeds=0, tokens=False, output=1)) == [True] * 4 + [False]
    named = [request(**of) for of in ({}, {"salt": "x"}, {"salt": "y"}, {"lora": "m"}, {"lora": "n"})]
    for one, other in itertools.combinations(named, 2):
        assert shared(one, other) == [False] * 5


def test_an_engine_that_is_given_embeddings(server: LMCacheServer) -> None:
    """No token ids at all: equal embeddings are served, different ones and tokens are not."""
    tokens = prompt(700, 1)
    with Engine("gemma3", server=server, enable_prompt_embeds=True) as engine:
        cold = engine.run(tokens, embeds=1)
        assert served(engine, tokens, 512, embeds=1).output == cold.output
        for other in ({"embeds": 2}, {}):
            assert served(engine, tokens, 0, **other).output != cold.output
        served(engine, [0] * 700, 0)
