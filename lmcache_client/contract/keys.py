"""Chunk keys and namespaces, which must match before two engines may share bytes.

Both are SHA-256 digests of an encoding that gives every value its type and length, so two different inputs
never encode to the same bytes. Nothing depends on the process, the machine, the Python version or
PYTHONHASHSEED; the tests pin expected digests.
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
MAX_CHUNKS = 1 << 16
Keys = Annotated[tuple[Key, ...], Meta(max_length=MAX_CHUNKS)]
TENANT_BYTES = 16
TenantId = Annotated[bytes, Meta(max_length=TENANT_BYTES)]
"""The result of `tenant_id`."""
Detail = Annotated[str, Meta(max_length=4096)]
"""The name of a model, or the name or value of one of its details."""
MAX_DETAILS = 512
SCHEMA = 2
"""Changes whenever keys, namespaces or the order of bytes in an object change."""


def encode(value: object) -> bytes:
    """Encodes None, bool, int, float, str, bytes, and tuples and lists of these, as canonical bytes.

    Raises TypeError for anything else. The caller must not cache such a value.
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
    """The key of a chunk: KEY_BYTES bytes.

    `parent` is the key of the previous chunk, or ROOT_KEY. `tokens` are hashed as little-endian uint32.
    `extra_keys` come from vLLM (LoRA, cache salt, multi-modal items, prompt embeddings) or are None.
    """
    words = array("I", tokens)
    if sys.byteorder == "big":
        words.byteswap()
    return hashlib.sha256(parent + _sized(b"W", words.tobytes()) + encode(extra_keys)).digest()


def chunk_keys(chunks: Iterable[tuple[Sequence[int], object]], parent: bytes = ROOT_KEY) -> Iterator[bytes]:
    """The keys of consecutive chunks, each given as (tokens, extra keys); `parent` is the key of the chunk
    before the first one."""
    for tokens, extra_keys in chunks:
        parent = chunk_key(parent, tokens, extra_keys)
        yield parent


def tenant_id(salt: str | None) -> bytes:
    """Stands for a `cache_salt`: the first TENANT_BYTES bytes of its SHA-256; empty without a salt."""
    return hashlib.sha256(salt.encode("utf-8", "surrogatepass")).digest()[:TENANT_BYTES] if salt else b""


Details = tuple[tuple[Detail, Detail], ...]


class ModelTag(Wire, frozen=True):
    """An engine's description of its model. Every field but `model`, a name for people, is part of the
    namespace.

    `details` holds the (name, value) pairs that the connector considers relevant (dtypes, quantisation,
    digests of configuration and weights, …). The detail `ranks` ("4-7") says which ranks the server has.
    """

    model: Detail
    details: Annotated[Details, Meta(max_length=MAX_DETAILS)]
    tensor_parallel_size: Natural
    pipeline_parallel_size: Natural

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks(self) -> range:
        """The ranks whose workers register at one server: all of them, unless the engine has several."""
        first, _, last = dict(self.details).get("ranks", "").partition("-")
        if all(each.isascii() and each.isdecimal() and len(each) < 6 for each in (first, last)):
            return range(int(first), min(int(last) + 1, self.world_size))
        return range(self.world_size)


def namespace_id(model: ModelTag, shards: Sequence[Geometry], ephemeral: bool = False) -> bytes:
    """Derives the namespace of an engine from its model and the geometry of each shard, in rank order."""
    fields = tuple(namespace_fields(model, shards, ephemeral).items())
    return hashlib.sha256(encode(("lmcache-mp namespace", SCHEMA, fields))).digest()


def namespace_fields(model: ModelTag, shards: Sequence[Geometry], ephemeral: bool) -> dict[str, object]:
    """All that a namespace is made of, by name.

    Offsets, strides and block counts are left out: they say where pages are, not what they contain.
    """
    fields: dict[str, object] = {f"detail {name}": value for name, value in model.details}
    fields |= {
        "tensor parallel size": model.tensor_parallel_size,
        "pipeline parallel size": model.pipeline_parallel_size,
        "ranks": len(shards),
        "ephemeral": ephemeral,
    }
    for rank, shard in enumerate(shards):
        for index, group in enumerate(shard.groups):
            name = f"rank {rank} group {index}"
            fields[f"{name} kind"] = "replicated " * group.replicated + group.kind
            fields[f"{name} block size, window"] = (group.block_size, group.window)
            fields[f"{name} layout"] = group.tag
            fields[f"{name} page bytes"] = [region.page_bytes for region in group.regions]
    return fields
