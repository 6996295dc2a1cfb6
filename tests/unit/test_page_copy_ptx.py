"""The copy kernel as nvcc compiles it for a GPU, executed instruction by instruction (support/ptx.py)."""

import itertools
import random
import shutil
import subprocess

import pytest
from ptx import Kernel, Memory, PtxError, Range

from lmcache_kernels.page_copy import SOURCE

NVCC = shutil.which("nvcc")
pytestmark = pytest.mark.skipif(NVCC is None, reason="no nvcc")
TABLE, SOURCES, DESTINATIONS = 0x7000_0000_0000, (5 << 32) - 96, (9 << 32) - 64
"""Addresses. Copies cross a multiple of 4 GiB on both sides."""


def compiled(path, directory):
    made = directory / "page_copy.ptx"
    subprocess.run([NVCC, "-arch", "compute_90", "-ptx", "-o", made, path], check=True, capture_output=True)
    return Kernel(made.read_text(), "page_copy")


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    return compiled(SOURCE, tmp_path_factory.mktemp("ptx"))


def table(rows):
    return b"".join(number.to_bytes(8, "little") for row in rows for number in row)


def copy(kernel, pieces, tile_bytes=4096, blocks=2, threads=64):
    """Has the kernel copy `pieces`, each (place in the sources, place in the destinations, bytes). It may
    read only them and their table, and must write each of their bytes once, and no other."""
    rows = [(SOURCES + start, DESTINATIONS + to, length) for start, to, length in pieces]
    sources = [Range(start, random.Random(start).randbytes(length)) for start, _, length in rows]
    copies = [Range(to, bytes(length), writable=True) for _, to, length in rows]
    tiles = -(-max(length for _, _, length in rows) // tile_bytes)
    memory = Memory([Range(TABLE, table(rows)), *sources, *copies])
    kernel.run(blocks, threads, (TABLE, len(rows), tiles, tile_bytes), memory)
    for source, made in zip(sources, copies, strict=True):
        assert made.content == source.content
        assert made.writes == [1] * len(made.content), "each byte once"


def pages(count, page_bytes, stride, first=0):
    return [(first + number * page_bytes, number * stride, page_bytes) for number in range(count)]


@pytest.mark.parametrize(
    "pieces",
    [
        pages(1, 4096, 4096),
        pages(3, 1024, 2048),
        pages(5, 576, 640, first=8),
        pages(4, 1000, 1004, first=4),
        pages(7, 333, 335),
        pages(20, 16, 48, first=3),
        [(0, 0, 9000), (9100, 9100, 1), (9200, 9201, 4097)],
    ],
    ids=lambda pieces: f"{len(pieces)}x{pieces[0][2]}",
)
@pytest.mark.parametrize("grid", [(1, 32), (2, 64)], ids=str)
def test_pages_are_copied_exactly(kernel, pieces, grid):
    copy(kernel, pieces, 4096 if grid[0] == 1 else 512, *grid)


@pytest.mark.parametrize("length", [3, 21, 83])
def test_every_pair_of_alignments(kernel, length):
    pairs = itertools.product(range(16), range(16))
    copy(kernel, [(i * 128 + a, i * 128 + b, length) for i, (a, b) in enumerate(pairs)], 4096, 1, 32)


def test_what_lies_behind_4_gib_of_a_piece_is_copied(kernel):
    """Of a grid with a team for each tile, one block runs."""
    tile = (1 << 32) // 4096 + 1
    rows, at = [(1 << 40, 2 << 40, (1 << 32) + 8192)], tile * 4096
    source = Range((1 << 40) + at, random.Random(0).randbytes(4096))
    made = Range((2 << 40) + at, bytes(4096), writable=True)
    memory = Memory([Range(TABLE, table(rows)), source, made])
    kernel.run(tile + 1, 32, (TABLE, 1, tile + 1, 4096), memory, only=[tile])
    assert made.content == source.content


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("lane < head", "lane <= head", "outside|each byte once"),
        ("tail + lane < bytes", "tail + lane <= bytes", "outside"),
        ("tail + lane < bytes", "tail + lane + 1 < bytes", "assert"),
        ("first + i * TEAM < count", "first + i * TEAM <= count", "outside"),
        ("item < num_pieces * tiles", "item <= num_pieces * tiles", "outside"),
        ("apart % sizeof(uint4)", "apart % sizeof(unsigned int)", "misaligned"),
    ],
)
def test_a_kernel_that_is_off_by_one_is_found(old, new, found, tmp_path):
    source = tmp_path / SOURCE.name
    assert old in SOURCE.read_text()
    source.write_text(SOURCE.read_text().replace(old, new))
    with pytest.raises((PtxError, AssertionError), match=found):
        copy(compiled(source, tmp_path), [(4, 8, 83), (100, 132, 83), (352, 352, 512)], 4096, 1, 32)


def test_an_instruction_that_is_not_known_is_an_error():
    with pytest.raises(PtxError, match="unknown: shfl"):
        Kernel(".entry page_copy()\n{\nshfl.sync.idx.b32 %r1, %r2, 0, 31, -1;\n}", "page_copy")
