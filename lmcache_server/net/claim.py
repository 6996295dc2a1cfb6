"""The Unix socket of a port, at which only one server listens.

ZeroMQ would silently take over a socket file that is in use, and at its end it would remove whatever is at
the path. So the socket is bound here, and ZeroMQ gets its descriptor.
"""

import contextlib
import fcntl
import logging
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from lmcache_client.contract.endpoint import check_runtime_directory
from lmcache_server.errors import StartError

logger = logging.getLogger(__name__)

TOUCH_EVERY_S = 3600.0
"""Programs that tidy up /tmp remove files that nobody has touched for days."""
BACKLOG = 100


class Claim:
    """This server's lock file and socket. `listening` is the socket until ZeroMQ gets it."""

    def __init__(self, path: Path, lock: Path) -> None:
        self._path, self._lock = path, lock
        self.listening = socket.socket(socket.AF_UNIX)
        self.listening.setblocking(False)
        self.listening.bind(str(path))
        self.listening.listen(BACKLOG)
        info = path.lstat()
        self._inode = info.st_dev, info.st_ino
        self._touched_s = 0.0
        self._is_lost = False

    def is_ours(self) -> bool:
        """Whether the file at the path still is this server's socket."""
        with contextlib.suppress(OSError):
            info = self._path.lstat()
            return (info.st_dev, info.st_ino) == self._inode
        return False

    def tick(self, now_s: float) -> None:
        """Touches the files now and then; says so once if the socket has been removed."""
        if not self._is_lost and not self.is_ours():
            self._is_lost = True
            logger.error(
                "%(path)s was removed, so no further engine can connect: restart this server",
                {"path": str(self._path)},
            )
        if now_s - self._touched_s >= TOUCH_EVERY_S:
            self._touched_s = now_s
            for file in (self._path, self._lock):
                with contextlib.suppress(OSError):
                    os.utime(file)


@contextlib.contextmanager
def claimed(path: Path, port: int) -> Iterator[Claim]:
    """Own the Unix socket at `path` inside the context. Raises StartError."""
    with contextlib.ExitStack() as stack:
        try:
            lock = path.with_suffix(".lock")
            while not _locked(stack, lock):
                pass
            if _is_stale(path):
                path.unlink()
            claim = Claim(path, lock)
        except BlockingIOError:
            raise StartError(
                f"port {port} is in use: another lmcache server of this user has {path}; "
                "stop it, or choose another --port"
            ) from None
        except OSError as error:
            make = "" if path.parent.parent.is_dir() else f"mkdir -m 700 -p {path.parent}, or "
            fix = f"{make}set LMCACHE_RUNTIME_DIR to another directory of this user"
            reason = f"{error.filename or path.parent}: {error.strerror}"
            raise StartError(f"cannot use {path.parent} for the socket ({reason}): {fix}") from error
        stack.callback(lambda: path.unlink(missing_ok=True) if claim.is_ours() else None)
        yield claim


def _locked(stack: contextlib.ExitStack, path: Path) -> bool:
    """False if a server that ended just now has removed the file or the directory. Raises OSError;
    BlockingIOError if another server has the lock."""
    path.parent.mkdir(mode=0o700, parents=False, exist_ok=True)
    with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as opened:
        check_runtime_directory(path.parent, must_own=True)
        shared = _opened(opened, path.parent, os.O_RDONLY | os.O_DIRECTORY)
        lock = _opened(opened, path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        # systemd-tmpfiles leaves a locked directory alone.
        with contextlib.suppress(OSError):
            fcntl.flock(shared, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another server may already have locked a new file at the same path.
        if is_ours := _is_at(path, lock):
            opened.callback(_remove, path, lock)
            stack.push(opened.pop_all())
        return is_ours
    return False


def _remove(path: Path, lock: int) -> None:
    """Removes a file that is locked until later. Where it stayed, commands of other users would look for a
    server."""
    with contextlib.suppress(OSError):
        if _is_at(path, lock):
            path.unlink()
        if not os.environ.get("LMCACHE_RUNTIME_DIR"):
            path.parent.rmdir()  # if it is empty


def _is_at(path: Path, descriptor: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    return False


def _opened(stack: contextlib.ExitStack, path: Path, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    stack.callback(os.close, descriptor)
    return descriptor


def _is_stale(path: Path) -> bool:
    """Whether a server that crashed has left its socket. Raises BlockingIOError if a server listens there: it
    still runs, although somebody removed its lock file."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return True
    except FileNotFoundError:
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))  # BlockingIOError: its queue is full
        except ConnectionRefusedError:
            return True
    raise BlockingIOError
