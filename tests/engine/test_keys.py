"""What is part of a key, by vLLM's own requests: equal inputs share, different ones never do."""

from collections.abc import Callable

import pytest
import torch
from harness.engine import Engine
from harness.prompts import prompt
from harness.server import LMCacheServer
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import Request

from lmcache_client.connector.tracked import Tracked

CHUNK = 64
TOKENS = [7] * (5 * CHUNK)


def request(tokens: list[int] | None = TOKENS, **inputs: object) -> Request:
    return Request("name", tokens, SamplingParams(max_tokens=1), None, **inputs)  # type: ignore[arg-type]


def keys(of: Request) -> list[bytes]:
    return list(Tracked(of, chunk_size=CHUNK).keys_of(5))


def image(content: str, offset: int = CHUNK + 10, length: int = 100) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(None, "image", content, PlaceholderRange(offset, length))


def embeds(seed: int, changed: int | None = None) -> torch.Tensor:
    made = torch.randn(len(TOKENS), 16, generator=torch.Generator().manual_seed(seed))
    if changed is not None:
        made[changed, 3] += 1
    return made


def shared(one: Request, other: Request) -> int:
    """How many chunks from the start on two requests share; none after the first that they do not."""
    equal = [a == b for a, b in zip(keys(one), keys(other), strict=True)]
    count = equal.index(False) if False in equal else len(equal)
    assert not any(equal[count:])
    return count


@pytest.mark.parametrize(
    ("one", "other", "chunks"),
    [
        (lambda: request(mm_features=[image("a")]), lambda: request(mm_features=[image("a")]), 5),
        (lambda: request(mm_features=[image("a")]), lambda: request(mm_features=[image("b")]), 1),
        (lambda: request(mm_features=[image("a")]), lambda: request(), 1),
        (lambda: request(mm_features=[image("a")]), lambda: request(mm_features=[image("a", CHUNK + 11)]), 1),
        (
            lambda: request(mm_features=[image("a"), image("b", 3 * CHUNK + 1, 20)]),
            lambda: request(mm_features=[image("a"), image("c", 3 * CHUNK + 1, 20)]),
            3,
        ),
        (lambda: request(None, prompt_embeds=embeds(1)), lambda: request(None, prompt_embeds=embeds(1)), 5),
        (lambda: request(None, prompt_embeds=embeds(1)), lambda: request(None, prompt_embeds=embeds(2)), 0),
        (
            lambda: request(None, prompt_embeds=embeds(1)),
            lambda: request(None, prompt_embeds=embeds(1, changed=2 * CHUNK)),
            2,
        ),
        # Embeddings have no token ids: vLLM puts zeros there.
        (lambda: request(None, prompt_embeds=embeds(1)), lambda: request([0] * len(TOKENS)), 0),
        (lambda: request(cache_salt="a"), lambda: request(cache_salt="a"), 5),
        (lambda: request(cache_salt="a"), lambda: request(cache_salt="b"), 0),
        (lambda: request(cache_salt="a"), lambda: request(), 0),
        (
            lambda: request(lora_request=LoRARequest("a", 1, "/a")),
            lambda: request(lora_request=LoRARequest("a", 2, "/a")),
            5,
        ),
        (
            lambda: request(lora_request=LoRARequest("a", 1, "/a")),
            lambda: request(lora_request=LoRARequest("b", 1, "/b")),
            0,
        ),
        (lambda: request(lora_request=LoRARequest("a", 1, "/a")), lambda: request(), 0),
        # A salt is no adapter of the same name.
        (lambda: request(lora_request=LoRARequest("a", 1, "/a")), lambda: request(cache_salt="a"), 0),
    ],
)
def test_what_is_shared(one: Callable[[], Request], other: Callable[[], Request], chunks: int) -> None:
    assert shared(one(), other()) == chunks


def test_keys_are_the_same_chunk_by_chunk() -> None:
    features = [image("a"), image("b", 3 * CHUNK - 5, 30), image("c", 4 * CHUNK + 9, 20)]
    tracked = Tracked(request(mm_features=features), chunk_size=CHUNK)
    for chunks in range(6):
        tracked.keys_of(chunks)
    assert list(tracked.keys_of(5)) == keys(request(mm_features=features))


def test_prompt_embeddings_are_cached_by_their_content(server: LMCacheServer) -> None:
    length = len(prompt(700, 1))
    with Engine("llama", server=server, enable_prompt_embeds=True) as engine:
        cold = engine.run_embeds(length, seed=1)
        assert engine.reset_prefix_cache()
        other = engine.run_embeds(length, seed=2)
        assert other.external_tokens == 0
        assert other.output != cold.output
        assert engine.reset_prefix_cache()
        restored = engine.run_embeds(length, seed=1)
        assert restored.external_tokens == 512
        assert restored.output == cold.output
        assert engine.reset_prefix_cache()
        assert engine.run([0] * length).external_tokens == 0
