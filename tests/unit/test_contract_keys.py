"""Keys and namespaces: pinned, the same in every process, and different whenever anything differs."""

import hashlib
import os
import struct
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from lmcache_client.contract.geometry import FULL, SLIDING_WINDOW, Geometry, GroupSpec, Region
from lmcache_client.contract.keys import KEY_BYTES, ROOT_KEY, ModelTag, chunk_key, encode, namespace_id

# Whoever changes one of these has to change keys.SCHEMA: engines of both versions would not share bytes.
PINNED_ROOT = "25127bfc308ee553c84fe8a29f5877029e809c82f21c45b5c8a348a63223e11e"
PINNED_FIRST = "0fe2e7cc46750826fbaca3b5f53855d11283b8168857f1c9647f595599c070d6"
PINNED_SECOND = "4340dba787f954ec803efd0beb08a2ccc623760378cb78aa329ec2f344b3abf8"
PINNED_NAMESPACE = "6911b95dbc4d977aa5657e26410062a6a02446b8c6bd6141878c4da41427dc69"
PINNED_EPHEMERAL = "3cd94e4d5ae95dad33bc4f3f2e25dfb3a37a0fd3c3968ac90791bf2fdc8e3502"
PINNED_ENCODING = (
    "4c3f000000000000004e54464902000000000000002d3144000000000000e03f530200000000000000c3a9"
    "420100000000000000004c0a0000000000000049010000000000000031"
)
EXTRA_KEYS = (("lora", 7), "salt", b"mm", 1.5, None, True)

MODEL = ModelTag("m", (("revision", "r"),), 2, 1)
GROUPS = (GroupSpec(FULL, 16, 0, "bf16", (Region(0, 0, 64, 32),)), GroupSpec(SLIDING_WINDOW, 16, 128, "", ()))
GEOMETRY = Geometry(GROUPS, 100)

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4).map(tuple),
    max_leaves=8,
)


def typed(value):
    """A value that is equal to another exactly when type and bits are."""
    if isinstance(value, tuple):
        return tuple(map(typed, value))
    return type(value).__name__, struct.pack("<d", value) if isinstance(value, float) else value


def test_pinned_keys_namespaces_and_encoding():
    first = chunk_key(ROOT_KEY, range(16), None)
    assert ROOT_KEY.hex() == PINNED_ROOT
    assert first.hex() == PINNED_FIRST
    assert chunk_key(first, [0, 1, 2**32 - 1], EXTRA_KEYS).hex() == PINNED_SECOND
    assert namespace_id(MODEL, [GEOMETRY, GEOMETRY]).hex() == PINNED_NAMESPACE
    ephemeral = namespace_id(MODEL, [GEOMETRY, GEOMETRY], ephemeral=True)
    assert ephemeral.hex() == PINNED_EPHEMERAL != PINNED_NAMESPACE
    assert encode((None, True, False, -1, 0.5, "é", b"\0", [1])).hex() == PINNED_ENCODING


def test_a_key_by_hand():
    tokens = b"".join(struct.pack("<I", token) for token in range(16))
    by_hand = hashlib.sha256(ROOT_KEY + b"W" + struct.pack("<Q", len(tokens)) + tokens + b"N")
    assert chunk_key(ROOT_KEY, tuple(range(16)), None) == by_hand.digest()
    assert by_hand.digest_size == KEY_BYTES


def test_keys_do_not_depend_on_the_process():
    program = (
        "from lmcache_client.contract.keys import *;"
        f"print(chunk_key(chunk_key(ROOT_KEY, range(16), None), [0, 1, 2**32 - 1], {EXTRA_KEYS!r}).hex())"
    )
    for seed in ("0", "12345"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        result = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        assert result.stdout.strip() == PINNED_SECOND


@settings(deadline=None)
@given(values, values)
def test_different_values_have_different_encodings_of_which_none_begins_another(first, second):
    """So that concatenation is unambiguous."""
    assert (encode(first) == encode(second)) == (typed(first) == typed(second))
    if typed(first) != typed(second):
        assert not encode(first).startswith(encode(second))


def test_what_has_no_encoding_and_what_is_no_token_get_no_key():
    for value in ({}, {1}, object(), bytearray(b"x"), 1j, ({},)):
        with pytest.raises(TypeError, match="cannot be part of a key"):
            chunk_key(ROOT_KEY, [1], value)
    for tokens in ([-1], [1 << 32], ["1"], [1.5]):
        with pytest.raises((OverflowError, TypeError)):
            chunk_key(ROOT_KEY, tokens, None)


def test_every_part_of_a_key_counts():
    keys = {
        chunk_key(parent, tokens, extra)
        for parent in (ROOT_KEY, bytes(32))
        for tokens in ([1, 2], [2, 1], [1], [])
        for extra in (None, "salt", ("salt",), b"salt")
    }
    assert len(keys) == 2 * 4 * 4


def replace_group(**change):
    return Geometry((structs.replace(GROUPS[0], **change), GROUPS[1]), 100)


@pytest.mark.parametrize(
    ("model", "shards"),
    [
        (structs.replace(MODEL, details=(("revision", "s"),)), [GEOMETRY] * 2),
        (structs.replace(MODEL, details=()), [GEOMETRY] * 2),
        (structs.replace(MODEL, tensor_parallel_size=1, pipeline_parallel_size=2), [GEOMETRY] * 2),
        (MODEL, [GEOMETRY]),
        (MODEL, [GEOMETRY, Geometry(GROUPS[::-1], 100)]),
        (MODEL, [GEOMETRY, replace_group(block_size=32)]),
        (MODEL, [GEOMETRY, replace_group(tag="fp8")]),
        (MODEL, [replace_group(replicated=True)] * 2),
        (MODEL, [GEOMETRY, replace_group(kind=SLIDING_WINDOW, window=128)]),
        (MODEL, [GEOMETRY, replace_group(regions=(Region(0, 0, 64, 33),))]),
        (MODEL, [GEOMETRY, replace_group(regions=(Region(0, 0, 64, 32),) * 2)]),
    ],
)
def test_whatever_changes_the_bytes_changes_the_namespace(model, shards):
    assert namespace_id(model, shards) != namespace_id(MODEL, [GEOMETRY] * 2)


def test_where_pages_are_and_the_name_of_a_model_do_not_change_the_namespace():
    elsewhere = structs.replace(
        replace_group(regions=(Region(buffer=3, offset=8, stride_bytes=999, page_bytes=32),)), num_blocks=7
    )
    assert namespace_id(structs.replace(MODEL, model="/x"), [elsewhere] * 2).hex() == PINNED_NAMESPACE


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2-3", range(2, 4)),
        ("0-0", range(1)),
        ("2-9", range(2, 4)),
        ("9-2", range(9, 3)),
        ("99999999-1", range(4)),
        ("two-3", range(4)),
        ("", range(4)),
    ],
)
def test_a_server_may_have_some_of_the_ranks(text: str, expected: range) -> None:
    model = structs.replace(MODEL, tensor_parallel_size=4, details=(("ranks", text),))
    assert model.ranks == expected
    assert structs.replace(model, pipeline_parallel_size=3).world_size == 12
