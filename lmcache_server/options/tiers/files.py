"""Whole files, written and read past the page cache where the file system allows it (O_DIRECT)."""

import contextlib
import errno
import mmap
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from lmcache_server.options.tiers.pieces import PAGE_BYTES, first, fits

MAX_PIECES = 1024
"""Of one system call (IOV_MAX)."""
USED_S = 600.0
"""The time of access is written only if it is older: to write it at each read would wear out a disk."""
FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
_NO_FILE = (errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.EACCES, errno.EIO, *_NO_DIRECT)
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # or a FIFO would be waited for
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW

_Made = TypeVar("_Made")


def temporary_name() -> str:
    """A name that no other file has, of no record."""
    return f"~{secrets.token_hex(8)}"


def is_temporary(name: str) -> bool:
    return re.fullmatch("~[0-9a-f]{16}", name) is not None


class Files:
    """The files below the open directory `root`. Every method may raise OSError.

    Paths are relative to `root`: if another file system is mounted over it, or it is moved, nothing is
    written elsewhere. Nothing is forced to the disk: after a power failure a file may have any content.
    With `notes_use`, the time of access (atime) of a file says when it was read.
    """

    def __init__(self, root: int, notes_use: bool = False) -> None:
        self._root, self._notes_use = root, notes_use
        self.direct = os.O_DIRECT if self._probe() else 0
        """The flag O_DIRECT, or 0 where the file system refuses it; then cached pages are dropped at once."""

    def _probe(self) -> bool:
        name = temporary_name()
        with mmap.mmap(-1, PAGE_BYTES) as memory, memoryview(memory) as page:
            try:
                self.direct = os.O_DIRECT
                self.write(name, [page])
                return bool(self.read(name, [page], lambda _: True))
            except OSError as error:
                if error.errno not in (*_NO_DIRECT, *FULL):
                    raise
                return error.errno in FULL
            finally:
                self.unlink(name)

    def write(self, path: str, pieces: Sequence[memoryview]) -> None:
        """Create a file, or overwrite one of the same size."""
        file = self._open(path, _WRITE)
        try:
            _transfer(os.pwritev, file, pieces)
            self._forget_pages(file)
        finally:
            os.close(file)

    def read(self, path: str, pieces: Sequence[memoryview], wanted: Callable[[os.stat_result], bool]) -> int:
        """Fill the pieces, from their start on. The bytes of the file; 0 unless it is `wanted`, has whole
        pages that fit, and opens."""
        try:
            file = self._open(path, _READ)
        except OSError as error:
            if error.errno in _NO_FILE:
                return 0
            raise
        try:
            status = os.fstat(file)
            if not fits(status.st_size, pieces) or not os.path.isfile(file) or not wanted(status):
                return 0
            done = _transfer(os.preadv, file, first(pieces, status.st_size))
            self._forget_pages(file)
            if self._notes_use and abs(time.time() - status.st_atime) > USED_S:
                with contextlib.suppress(OSError):  # as of a read-only file system
                    os.utime(file, ns=(time.time_ns(), status.st_mtime_ns))
            return done if done == status.st_size else 0
        finally:
            os.close(file)

    def rename(self, path: str, to: str) -> bool:
        """False if there is no such file."""
        with contextlib.suppress(FileNotFoundError):
            self._in_folder(to, lambda: os.rename(path, to, src_dir_fd=self._root, dst_dir_fd=self._root))
            return True
        return False

    def unlink(self, *paths: str) -> None:
        for path in paths:
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                os.unlink(path, dir_fd=self._root)

    def stat(self, path: str) -> os.stat_result | None:
        with contextlib.suppress(FileNotFoundError):
            return os.stat(path, dir_fd=self._root, follow_symlinks=False)
        return None

    def free_bytes(self) -> tuple[int, int]:
        """Free for this user, and in all."""
        space = os.fstatvfs(self._root)
        return space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize

    def folder(self, name: str) -> Iterator[os.DirEntry[str]]:
        """The entries of a subdirectory."""
        try:
            folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._root)
        except FileNotFoundError:
            return
        try:
            with os.scandir(folder) as entries:
                yield from entries
        finally:
            os.close(folder)

    def _open(self, path: str, flags: int) -> int:
        def opened() -> int:
            return os.open(path, flags | self.direct, 0o600, dir_fd=self._root)

        return self._in_folder(path, opened) if flags & os.O_CREAT else opened()

    def _in_folder(self, path: str, make: Callable[[], _Made]) -> _Made:
        """Makes a file; first its subdirectory, if there is none."""
        try:
            return make()
        except FileNotFoundError:
            folder = os.path.dirname(path)
            if not folder:
                raise
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700, dir_fd=self._root)
        return make()

    def _forget_pages(self, file: int) -> None:
        if not self.direct:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def _transfer(
    call: Callable[[int, Sequence[memoryview], int], int], file: int, pieces: Sequence[memoryview]
) -> int:
    """Read or write the pieces from the file's start on. Returns the bytes done: fewer where a file ends."""
    rest, at, offset = list(pieces), 0, 0
    while at < len(rest):
        done = call(file, rest[at : at + MAX_PIECES], offset)
        if done <= 0:
            break
        offset += done
        while at < len(rest) and done >= rest[at].nbytes:
            done -= rest[at].nbytes
            at += 1
        if done:
            rest[at] = rest[at][done:]
    return offset
