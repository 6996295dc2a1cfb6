"""File systems and limits for tests of files."""

import contextlib
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted(directory: Path, options: str, kind: str = "tmpfs") -> Iterator[Path]:
    """A file system of its own in a new directory, if we may mount one."""
    directory.mkdir()
    command = ["mount", "-t", kind, "-o", options, "none", str(directory)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a file system to test with")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


@contextlib.contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """This process can make no larger file meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
