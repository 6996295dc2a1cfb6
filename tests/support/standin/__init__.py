"""Builds the stand-in of CUDA's driver and says how a process gets it; see cuda.cpp."""

import functools
import hashlib
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from harness.paths import CACHE, ROOT, SUPPORT

SOURCES = (
    SUPPORT / "standin/cuda.cpp",
    SUPPORT / "standin/page_copy_on_cpu.cpp",
    ROOT / "kernels/lmcache_kernels/page_copy.cu",
    SUPPORT / "standin/nvml.cpp",
)
COMPILER = shutil.which("g++")
CUPY = SUPPORT / "standin/cupy"


class Counters(NamedTuple):
    """What one process has at the moment, and what it has done."""

    mappings: int
    registered_bytes: int
    contexts: int
    launches: int
    copies: int
    batches: int
    batched: int
    handles: int
    reservations: int


def header() -> Path | None:
    """A directory with the real cuda.h: Triton ships one, CUDA's own tools as well."""
    for directory in sys.path:
        if (Path(directory) / "triton/backends/nvidia/include/cuda.h").is_file():
            return Path(directory) / "triton/backends/nvidia/include"
    found = Path(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc").resolve().parent.parent / "include"
    return found if (found / "cuda.h").is_file() else None


@functools.cache
def library() -> Path:
    """The directory of libcuda.so.1, compiled once for each state of its sources."""
    include = header()
    assert COMPILER is not None
    assert include is not None
    mark = hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES)).hexdigest()[:16]
    directory = CACHE / "standin" / mark
    if not (directory / "libcuda.so.1").exists():
        directory.mkdir(parents=True, exist_ok=True)
        made = directory / f"{os.getpid()}.so"
        command = [
            COMPILER, "-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas",
            "-shared", "-fPIC", "-pthread", f"-I{include}", f'-DSOURCE="{SOURCES[2]}"',
            "-Wl,-soname,libcuda.so.1",
            "-o", str(made), str(SOURCES[0]),
        ]  # fmt: skip
        subprocess.run(command, check=True)
        management = directory / f"{os.getpid()}-management.so"
        subprocess.run([COMPILER, "-shared", "-fPIC", "-o", str(management), str(SOURCES[3])], check=True)
        management.rename(directory / "libnvidia-ml.so.1")
        made.rename(directory / "libcuda.so.1")
    return directory


def environment(directory: Path, **settings: object) -> dict[str, str]:
    """The environment of processes whose driver is the stand-in, with its files in `directory`.

    `settings` become CUDA_STANDIN_… variables.
    """
    paths = [
        str(CUPY),
        str(ROOT),
        str(ROOT / "kernels"),
        str(SUPPORT),
        os.environ.get("PYTHONPATH", ""),
    ]
    return {
        **os.environ,
        "LD_LIBRARY_PATH": os.pathsep.join(
            filter(None, [str(library()), os.environ.get("LD_LIBRARY_PATH", "")])
        ),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "CUDA_STANDIN_DIR": str(directory),
        **{f"CUDA_STANDIN_{name.upper()}": str(value) for name, value in settings.items()},
    }


def counters(directory: Path, pid: int) -> Counters:
    """Those of a process, living or dead."""
    return Counters(*struct.unpack("9q", (directory / f"counters-{pid}").read_bytes()[:72]))
