"""The source of the copy kernel: right for every alignment, length and grid, and small enough.

No GPU runs here. The very source that a GPU would run is compiled as C++ and run thread after thread, and
nvcc, where there is one, compiles it for the GPUs it is meant for.
"""

import ctypes
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from harness.paths import SUPPORT
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_kernels.page_copy import SOURCE, THREADS, KernelError, arguments, compiled

CXX = shutil.which("c++") or shutil.which("g++")
NVCC = shutil.which("nvcc")
MAX_REGISTERS = 64
"""More, and two blocks do not fit on a multiprocessor, which has 65,536."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    if CXX is None:
        pytest.skip("no C++ compiler")
    library = tmp_path_factory.mktemp("page_copy") / "page_copy.so"
    driver = SUPPORT / "standin/page_copy_on_cpu.cpp"
    command = [CXX, "-std=c++17", "-O1", "-shared", "-fPIC", f'-DSOURCE="{SOURCE}"', "-o", library, driver]
    subprocess.run(command, check=True, capture_output=True)
    function = ctypes.CDLL(str(library)).run
    function.argtypes = [ctypes.c_uint32] * 2 + [ctypes.c_void_p] + [ctypes.c_uint32] * 3 + [ctypes.c_void_p]
    function.restype = None
    return function


def copy(run, source, destination, pieces, tile_bytes=4096, blocks=2, threads=64):
    """Let the kernel copy `pieces`, rows of (offset in source, offset in destination, bytes), and check
    both buffers to their last byte. Returns how many bytes it stored by 16 at a time."""
    offsets = np.array(pieces, dtype=np.uint64).reshape(-1, 3)
    expected, untouched = destination.copy(), source.copy()
    for start, to, length in pieces:
        expected[to : to + length] = source[start : start + length]
    table, tiles = arguments(
        offsets[:, 0] + np.uint64(source.ctypes.data),
        offsets[:, 1] + np.uint64(destination.ctypes.data),
        offsets[:, 2],
        tile_bytes,
    )
    seen = np.zeros(3, dtype=np.uint64)
    run(blocks, threads, table.ctypes.data, len(table), tiles, tile_bytes, seen.ctypes.data)
    misaligned, stored_bytes, stored_by_16_bytes = seen.tolist()
    assert np.array_equal(destination, expected)
    assert np.array_equal(source, untouched)
    assert misaligned == 0
    assert stored_bytes == offsets[:, 2].sum()
    return stored_by_16_bytes


def buffers(num_bytes):
    """Random bytes to copy from and others to copy into, both at multiples of 16."""
    whole = np.random.default_rng(0).integers(0, 256, 2 * num_bytes + 16, dtype=np.uint8)
    first = -whole.ctypes.data % 16
    assert num_bytes % 16 == 0
    return whole[first : first + num_bytes], whole[first + num_bytes : first + 2 * num_bytes]


@st.composite
def piece_lists(draw):
    """Pieces that follow each other with gaps, in the source and, in another order, in the destination."""
    lengths = st.one_of(st.integers(1, 40), st.integers(1, 700), st.integers(1, 9000))
    sizes = draw(st.lists(lengths, min_size=1, max_size=8))
    result = [[0, 0, size] for size in sizes]
    for side in (0, 1):
        end = 0
        for index in draw(st.permutations(range(len(sizes)))):
            # A multiple of 16 half of the time, or two sides would hardly ever lie alike.
            gap = draw(st.integers(0, 35))
            start = -(-end // 16) * 16 + gap if draw(st.booleans()) else end + gap
            result[index][side], end = start, start + sizes[index]
    return result


@given(
    pieces=piece_lists(),
    tile_bytes=st.sampled_from([16, 100, 512, 4096]),
    blocks=st.integers(1, 5),
    threads=st.sampled_from([32, 64, 96, 512]),
)
@settings(max_examples=400, deadline=None)
def test_it_copies_every_byte_once_and_touches_no_other(run, pieces, tile_bytes, blocks, threads):
    copy(run, *buffers(1 << 17), pieces, tile_bytes, blocks, threads)


@pytest.mark.parametrize("source_remainder", range(16))
def test_every_pair_of_alignments(run, source_remainder):
    for remainder in range(16):
        for length in (*range(1, 35), 1000, 4097):
            copy(run, *buffers(8192), [(source_remainder, remainder, length)])


def test_pages_are_copied_by_16_bytes_where_both_ends_lie_alike(run):
    pages = [(i * 1040, i * 2048, 1024) for i in range(20)]
    assert copy(run, *buffers(1 << 16), pages) == 20 * 1024
    assert copy(run, *buffers(1 << 16), [(3, 19, 1000)]) == 976
    assert copy(run, *buffers(1 << 16), [(3, 20, 1000)]) == 0


def test_what_cannot_be_copied_or_compiled_is_one_sentence(monkeypatch):
    many = np.full(1 << 16, 1 << 28, dtype=np.uint64)
    with pytest.raises(ValueError, match="65536 pieces of up to 268435456 bytes are too many for one launch"):
        arguments(many, many, many)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(KernelError, match="for a faster kernel, run pip install 'cupy-cuda13x"):
        compiled("90")


@pytest.mark.parametrize("architecture", ["80", "90", "100"])
def test_cupy_compiles_it_without_a_gpu(architecture):
    pytest.importorskip("cupy", reason="no cupy")
    pytest.importorskip("nvidia.cu13", reason="no NVRTC for it")
    assert compiled(architecture).startswith(b"\x7fELF")


@pytest.mark.skipif(NVCC is None, reason="no nvcc")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_it_compiles_and_needs_few_registers(architecture, tmp_path):
    known = subprocess.run([NVCC, "--list-gpu-code"], check=True, capture_output=True, text=True).stdout
    if architecture not in known.split():
        pytest.skip(f"this nvcc does not know {architecture}")
    flags = ["-arch", architecture, "-cubin", "-Xptxas", "-v", "-Werror", "all-warnings"]
    done = subprocess.run(
        [NVCC, *flags, "-o", tmp_path / "page_copy.cubin", SOURCE], check=True, capture_output=True, text=True
    )
    said = done.stdout + done.stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in said
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", said)]
    assert len(registers) == 1
    assert 0 < registers[0] <= MAX_REGISTERS
    assert 2 * registers[0] * THREADS <= 1 << 16
