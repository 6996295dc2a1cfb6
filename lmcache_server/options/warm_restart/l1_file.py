"""The file in which L1 lies: a header, the frames and, after a clean stop, the index.

From before the first change of a frame until after the last, the header says that the file is in use. So if
anything ends the server early, the next one starts empty.
"""

import errno
import fcntl
import hashlib
import logging
import math
import mmap
import os
import stat
import struct
from collections.abc import Callable

from lmcache_client.contract.endpoint import user_name, whose
from lmcache_client.contract.keys import SCHEMA
from lmcache_server.core.pool import FRAME_BYTES
from lmcache_server.errors import StartError
from lmcache_server.host import preflight
from lmcache_server.host.machine import (
    HUGETLBFS,
    MEMORY_FILE_SYSTEMS,
    available_bytes,
    file_system_type,
    free_bytes,
    mount_point,
)
from lmcache_server.host.units import GB_BYTES
from lmcache_server.l1.area import Area
from lmcache_server.transfer.base import CopyError

logger = logging.getLogger(__name__)

MAGIC = b"lmcache-mp L1\r\n\0"
FORMAT = 8
"""Changes with the header, the index and what options save in it, and the way objects are packed."""
HEADER_BYTES = FRAME_BYTES
"""As long as a frame, so that the frames stay aligned."""
IN_USE, CLEAN = 1, 2

_FIELDS = struct.Struct("<16sIIIQIQ32s")
"""Magic, format, schema of keys, bytes per frame, frames, state, bytes of the index, SHA-256 of the index."""
_VERSION = (MAGIC, FORMAT, SCHEMA, FRAME_BYTES)


class L1File:
    """An open file for `size_bytes` of L1, locked against other servers.

    `index` is what the previous server gave to `finish`. If it is None, `reason` says why, or is empty for a
    new file. `in_memory` says that the file system takes memory, not disk space.
    """

    def __init__(self, path: str, size_bytes: int, trial: bool = False) -> None:
        """Opens and locks the file. Raises StartError if it cannot be used, and then leaves its content.
        `trial`: the file is there, and nothing is changed."""
        self.path = path
        self.num_frames = size_bytes // FRAME_BYTES
        self._end = HEADER_BYTES + self.num_frames * FRAME_BYTES
        self._was_cut = self._is_lost = False
        self.restored_frames = 0
        """How many of the first frames have their space already."""
        self.descriptor = _open(path, 0 if trial else os.O_CREAT)
        try:
            self._check_owner()
            self._lock()
            kind = file_system_type(self.descriptor)
            if kind == HUGETLBFS:
                raise StartError(
                    f"--l1-path {path} is on hugetlbfs, which cannot hold the file: name a file in /dev/shm"
                )
            self.in_memory = kind in MEMORY_FILE_SYSTEMS
            self.index, self.reason = self._read()
            if trial:
                return
            try:
                self._check_space()
            except StartError:
                if not os.fstat(self.descriptor).st_size:
                    os.unlink(path)  # nobody has used it
                raise
            if self.index is None:
                self.begin()
        except OSError as error:
            self.close()
            limit = "it would exceed the limit of file sizes; raise that (ulimit -f), or lower --l1-size-gb"
            reason = limit if error.errno == errno.EFBIG else error.strerror
            raise StartError(f"cannot use --l1-path {path}: {reason}") from error
        except BaseException:
            self.close()
            raise

    def begin(self) -> None:
        """Marks the file as in use and cuts off its index. No frame may change before. Raises OSError."""
        self._write_header(IN_USE, b"")
        os.ftruncate(self.descriptor, self._end)

    def map(self) -> mmap.mmap:
        """Maps the frames. Only frames that have space may be touched: see `allocate`. Raises StartError."""
        size_bytes = self._end - HEADER_BYTES
        try:
            # Larger than before; what is saved stays valid until `begin`.
            if os.fstat(self.descriptor).st_size < self._end:
                os.ftruncate(self.descriptor, self._end)
            return mmap.mmap(self.descriptor, size_bytes, flags=mmap.MAP_SHARED, offset=HEADER_BYTES)
        except OSError as error:
            raise StartError(f"the system refuses to map --l1-path {self.path}: {error.strerror}") from error

    def area(self, address: int, num_bytes: int) -> Area:
        return Area(self.descriptor, HEADER_BYTES, address, num_bytes)

    def check(self) -> None:
        if self.is_cut():
            raise CopyError(f"--l1-path {self.path} was cut short by another program: restart the server")

    def is_cut(self) -> bool:
        """Whether the file has ever been seen shorter than its frames: what was cut off is zeros if the file
        grows again. Any thread may ask."""
        self._was_cut |= os.fstat(self.descriptor).st_size < self._end
        return self._was_cut

    def tick(self) -> None:
        """Called once a second: says so once if the file has been removed."""
        if not self._is_lost and self._is_removed():
            self._is_lost = True
            logger.error(
                "%(path)s was removed, so the cache will not be saved: restart this server",
                {"path": self.path},
            )

    def _is_removed(self) -> bool:
        try:
            return not os.path.samestat(os.lstat(self.path), os.fstat(self.descriptor))
        except OSError as error:  # others: its directory is closed to this user now
            return isinstance(error, FileNotFoundError)

    def take(self, start: int, end: int, grow: Callable[[int], object]) -> bool:
        """Reserves space for these bytes, because a write to a hole of a full file system would kill the
        process. As Backing.take."""
        start = max(start, self.restored_frames * FRAME_BYTES)
        if start >= end:
            return True
        try:
            self.allocate(start, end - start)
        except OSError as error:
            logger.error(
                "L1 has %(size_gb).2f of %(wanted_gb).2f GB and gets no more: no space for %(path)s "
                "(%(reason)s); free some and start again, or ask for less with --l1-size-gb",
                {
                    "size_gb": start / GB_BYTES,
                    "wanted_gb": self.num_frames * FRAME_BYTES / GB_BYTES,
                    "path": self.path,
                    "reason": error.strerror,
                },
            )
            return False
        grow((end - start) // FRAME_BYTES)
        return True

    def allocate(self, offset: int, num_bytes: int) -> None:
        """Reserves space for these bytes of the frames, and keeps their content. Raises OSError."""
        os.posix_fallocate(self.descriptor, HEADER_BYTES + offset, num_bytes)

    def ensure(self, frames: int) -> None:
        """Reserves space for the first `frames` frames if the file has holes, as a copied file may. Raises
        OSError."""
        if os.fstat(self.descriptor).st_blocks * 512 < frames * FRAME_BYTES:
            self.allocate(0, frames * FRAME_BYTES)

    def finish(self, index: bytes) -> None:
        """Saves the frames and `index` for the next start. No frame may change afterwards. Raises OSError."""
        if self.is_cut():
            raise OSError(errno.EIO, "another program cut it short")
        if self._is_removed():
            raise OSError(errno.ENOENT, "another program removed it")
        with open(self.descriptor, "r+b", closefd=False) as file:
            file.seek(self._end)
            file.write(index)
        os.fsync(self.descriptor)
        self._write_header(CLEAN, index)

    def close(self) -> None:
        os.close(self.descriptor)

    def _check_owner(self) -> None:
        info = os.fstat(self.descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise StartError(f"--l1-path {self.path} is not a regular file: name one, or a new file")
        if info.st_size and os.pread(self.descriptor, len(MAGIC), 0) != MAGIC:
            raise StartError(
                f"--l1-path {self.path} is not an lmcache file and is left unchanged: name another file"
            )
        if info.st_uid != os.geteuid():
            raise StartError(
                f"--l1-path {self.path} belongs to user {user_name(info.st_uid)}: start the server as that "
                "user, or name another file"
            )
        if stat.S_IMODE(info.st_mode) & 0o077:
            fix = f"run 'chmod 600 {self.path}', or name another file" if info.st_size else "name a new file"
            raise StartError(f"--l1-path {self.path} is open to other users: {fix}")

    def _lock(self) -> None:
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartError(
                f"--l1-path {self.path} is in use by another lmcache server: name another "
                "file, or stop that server"
            ) from None

    def _check_space(self) -> None:
        size_bytes = self.num_frames * FRAME_BYTES
        taken_bytes = os.fstat(self.descriptor).st_blocks * 512
        # First, because a larger /dev/shm is no advice where memory is short.
        if self.in_memory:
            preflight.require(preflight.memory(size_bytes, taken_bytes, *available_bytes()))
        # Without space for all of L1, the part that can be restored is still worth keeping.
        if self.index is None or os.fstat(self.descriptor).st_size < self._end:
            mount, free = mount_point(self.path), free_bytes(self.descriptor)
            preflight.require(
                preflight.l1_file(self.path, mount, self.in_memory, size_bytes, taken_bytes, free)
            )

    def _read(self) -> tuple[bytes | None, str]:
        """Returns the index and "", or None and the reason."""
        size_bytes = os.fstat(self.descriptor).st_size
        if not size_bytes:
            return None, ""
        head = os.pread(self.descriptor, _FIELDS.size + 32, 0)
        if head[: struct.calcsize("<16sIII")] != struct.pack("<16sIII", *_VERSION):
            return None, "another version of lmcache wrote it"
        if len(head) != _FIELDS.size + 32 or _sha256(head[:-32]) != head[-32:]:
            return None, "its header is damaged"
        *_, frames, state, index_bytes, digest = _FIELDS.unpack(head[:-32])
        if state != CLEAN:
            return None, "the previous server did not stop cleanly"
        end = HEADER_BYTES + frames * FRAME_BYTES
        if size_bytes < end + index_bytes:
            return None, f"it has {size_bytes} bytes instead of {end + index_bytes}"
        with open(self.descriptor, "rb", closefd=False) as file:
            file.seek(end)
            index = file.read(index_bytes)
        if _sha256(index) != digest:
            return None, "its index is damaged"
        if frames > self.num_frames:
            least = math.ceil(1000 * frames * FRAME_BYTES / GB_BYTES) / 1000
            raise StartError(
                f"--l1-path {self.path} holds the cache of a larger L1: pass --l1-size-gb {least:.10g} or "
                "more or, to start empty, name another file"
            )
        return index, ""

    def _write_header(self, state: int, index: bytes) -> None:
        fields = _FIELDS.pack(*_VERSION, self.num_frames, state, len(index), _sha256(index))
        # RWF_DSYNC writes the header to the disk, but does not wait for frames that are still to be written.
        os.pwritev(self.descriptor, [fields + _sha256(fields)], 0, os.RWF_DSYNC)


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _open(path: str, create: int) -> int:
    flags = os.O_RDWR | create | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        return os.open(path, flags, 0o600)
    except OSError as error:
        directory = os.path.dirname(os.path.abspath(path))
        if error.errno == errno.ENOENT and not os.path.isdir(directory):
            raise StartError(str(preflight.no_directory(path))) from None
        advice = {
            errno.EISDIR: "it is a directory; name a file in it",
            errno.ELOOP: "it is a symbolic link; name the file that it leads to",
            errno.ENOENT: f"no file can be made in {directory}; name one in /dev/shm",
            errno.EROFS: "its file system is read-only; name a file on another or, under systemd, one in "
            "ReadWritePaths= of the unit",
            errno.EACCES: f"permission denied ({whose(path)}); name another file",
            errno.EPERM: f"operation not permitted ({whose(path)}); name another file",
        }.get(error.errno or 0, error.strerror)
        raise StartError(f"cannot open --l1-path {path}: {advice}") from error
