"""Chunk keys and the namespace: what must be equal before bytes may be shared.

Both are SHA-256 over an encoding in which every value carries its type and its length, so that two
different inputs never encode to the same bytes. Nothing depends on the process, the machine, the Python
version or PYTHONHASHSEED; tests pin vectors.
"""

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

from msgspec import Meta

from lmcache_client.contract.codec import Natural, Wire
from lmcache_client.contract.geometry import Geometry

KEY_BYTES = 32
Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Detail = Annotated[str, Meta(max_length=4096)]
"""A model's name, or a name or a value that an engine says of it."""
MAX_DETAILS = 64
SCHEMA = 1
"""Changes whenever keys, namespaces or the order of bytes in an object change."""


def encode(value: object) -> bytes:
    """Canonical bytes of a value made of None, bool, int, float, str, bytes, tuples and lists.

    Raises TypeError for anything else: what cannot be encoded must not be cached.
    """
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"T" if value else b"F"
    if isinstance(value, int):
        return _sized(b"I", b"%d" % value)
    if isinstance(value, float):
        return b"D" + struct.pack("<d", value)
    if isinstance(value, str):
        return _sized(b"S", value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes):
        return _sized(b"B", value)
    if isinstance(value, (tuple, list)):
        return _sized(b"L", b"".join(map(encode, value)))
    raise TypeError(f"a {type(value).__name__} cannot be part of a key")


def _sized(tag: bytes, body: bytes) -> bytes:
    return tag + struct.pack("<Q", len(body)) + body


ROOT_KEY = hashlib.sha256(encode(("lmcache-mp chunk key", SCHEMA))).digest()
"""The parent of every first chunk."""


def chunk_key(parent: bytes, tokens: Sequence[int], extra_keys: object) -> bytes:
    """The key of a chunk: 32 bytes.

    `parent` is the key of the chunk before, ROOT_KEY for the first. `tokens` are hashed as little-endian
    uint32. `extra_keys` are vLLM's own (LoRA, cache salt, multi-modal items, prompt embeddings) or None.
    """
    words = array("I", tokens)
    if sys.byteorder == "big":
        words.byteswap()
    return hashlib.sha256(parent + _sized(b"W", words.tobytes()) + encode(extra_keys)).digest()


def chunk_keys(chunks: Iterable[tuple[Sequence[int], object]], parent: bytes = ROOT_KEY) -> Iterator[bytes]:
    """The keys of chunks that follow each other, each given as (tokens, extra keys); `parent` is the key of
    the chunk before the first of them."""
    for tokens, extra_keys in chunks:
        parent = chunk_key(parent, tokens, extra_keys)
        yield parent


class ModelTag(Wire, frozen=True):
    """What an engine says of its model; every field is part of the namespace.

    `details` holds (name, value) pairs that the connector found relevant (revision, dtypes,
    quantisation, configuration digest, …); they are compared, never parsed.
    """

    model: Detail
    details: Annotated[tuple[tuple[Detail, Detail], ...], Meta(max_length=MAX_DETAILS)]
    tensor_parallel_size: Natural
    pipeline_parallel_size: Natural

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size


def namespace_id(model: ModelTag, shards: Sequence[Geometry], ephemeral: bool = False) -> bytes:
    """The namespace of an engine from its model and the geometry of each of its shards, in rank order.

    Offsets, strides and numbers of blocks are left out: they say where pages are, not what is in them.
    """
    return hashlib.sha256(
        encode(
            (
                "lmcache-mp namespace",
                SCHEMA,
                model.model,
                model.details,
                model.tensor_parallel_size,
                model.pipeline_parallel_size,
                [_shape(geometry) for geometry in shards],
                *(["ephemeral"] if ephemeral else []),
            )
        )
    ).digest()


def _shape(geometry: Geometry) -> list[object]:
    return [
        [
            group.kind,
            group.block_size,
            group.window,
            group.tag,
            [region.page_bytes for region in group.regions],
            *(["replicated"] if group.replicated else []),
        ]
        for group in geometry.groups
    ]
