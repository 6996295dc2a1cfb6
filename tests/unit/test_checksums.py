"""Checksums of pages: each page has its own, wherever the runs of frames and the loads cut."""

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_client.contract.geometry import Region
from lmcache_server.transfer.checksums import DamagedError, check, checksums
from lmcache_server.transfer.plan import ObjectCopy, pieces

FRAME_BYTES = 16


@st.composite
def objects(draw):
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    num_blocks = draw(st.integers(1, 5))
    needed = -(-num_blocks * sum(sizes) // FRAME_BYTES)
    frames = draw(st.permutations(range(needed + 3)))[:needed]
    return sizes, num_blocks, tuple((frame, 1) for frame in frames)


def regions_of(sizes):
    return tuple(Region(0, 0, size, size) for size in sizes)


@settings(max_examples=300)
@given(objects(), st.data())
def test_a_changed_byte_is_found_where_it_is_read_and_only_there(case, data):
    sizes, num_blocks, runs = case
    regions = regions_of(sizes)
    memory = np.random.default_rng(1).integers(0, 256, (max(f for f, _ in runs) + 1) * FRAME_BYTES, np.uint8)
    base = int(memory.ctypes.data)

    def read(first, count):
        page = ObjectCopy(runs, num_blocks, first, tuple(range(1, count + 1)))
        return page, pieces(page, regions, (0,), base, FRAME_BYTES)

    whole, found = read(0, num_blocks)
    stored = checksums(found, whole, regions)
    inside = np.concatenate([memory[f * FRAME_BYTES : (f + 1) * FRAME_BYTES] for f, _ in runs])
    expected, offset = [], 0
    for size in sizes:
        for _ in range(num_blocks):
            expected.append(zlib.crc32(inside[offset : offset + size].tobytes()))
            offset += size
    assert np.frombuffer(stored, dtype="<u4").tolist() == expected

    # One byte of the page of one block in one region changes.
    region = data.draw(st.integers(0, len(sizes) - 1))
    block = data.draw(st.integers(0, num_blocks - 1))
    at = (
        num_blocks * sum(sizes[:region])
        + block * sizes[region]
        + data.draw(st.integers(0, sizes[region] - 1))
    )
    frame = runs[at // FRAME_BYTES][0]
    memory[frame * FRAME_BYTES + at % FRAME_BYTES] ^= 1 << data.draw(st.integers(0, 7))
    first = data.draw(st.integers(0, num_blocks - 1))
    count = data.draw(st.integers(1, num_blocks - first))
    page, found = read(first, count)
    if first <= block < first + count:
        with pytest.raises(DamagedError, match=f"block {block} in region {region} is damaged") as error:
            check(7, found, page, regions, stored)
        assert error.value.part == 7
    else:
        check(7, found, page, regions, stored)
    check(7, found, page, regions, b"")
    for shape in (stored + bytes(4 * num_blocks), stored[: -4 * num_blocks], b"1"):
        if shape:
            with pytest.raises(DamagedError):
                check(7, found, page, regions, shape)
