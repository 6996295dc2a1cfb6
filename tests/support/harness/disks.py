"""File systems and limits for tests of files."""

import contextlib
import os
import resource
import shutil
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


class Disk:
    """A small ext4 file system on a loop device, whose disk may fail. Only root can have one."""

    NUM_BYTES = 64 << 20

    def __init__(self, directory: Path) -> None:
        self._image, self.place = directory / "image", directory / "disk"

    def become_read_only(self) -> None:
        """As after an error in its tables."""
        mounts = (line.split() for line in Path("/proc/mounts").read_text().splitlines())
        device = next(device for device, place, *_ in mounts if place == str(self.place))
        Path(f"/sys/fs/ext4/{Path(device).name}/trigger_fs_error").write_text("a test")

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """Others have taken all space."""
        file = self.place / "others"
        with file.open("wb") as others, contextlib.suppress(OSError):
            while True:
                others.write(bytes(1 << 16))
        try:
            yield
        finally:
            file.unlink()

    def fail(self) -> None:
        """From now on each read of what lies on the disk gives EIO."""
        os.sync()
        os.truncate(self._image, 1 << 20)  # the first megabyte has the tables of the file system
        Path("/proc/sys/vm/drop_caches").write_text("3")


@contextlib.contextmanager
def disk(directory: Path) -> Iterator[Disk]:
    made = Disk(directory)
    with made._image.open("wb") as image:
        image.truncate(Disk.NUM_BYTES)
    make = ["mkfs.ext4", "-q", "-F", "-m0", "-O", "^has_journal", str(made._image)]
    if not shutil.which("mkfs.ext4") or subprocess.run(make, capture_output=True, check=False).returncode:
        pytest.skip("there is no mkfs.ext4")
    made.place.mkdir()
    mount = ["mount", "-o", "loop,errors=remount-ro", str(made._image), str(made.place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a file system to test with, and it needs a loop device")
    try:
        yield made
    finally:
        subprocess.run(["umount", "-l", str(made.place)], check=True)
