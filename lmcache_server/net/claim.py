"""The Unix socket of a port, at which only one server listens.

ZeroMQ would silently take over a socket file that is in use, and at its end it would remove whatever is at
the path. So the socket is bound here, and ZeroMQ gets its descriptor.
"""

import contextlib
import errno
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from lmcache_client.contract.endpoint import check_runtime_directory, peer_pid, user_name, whose
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
        self._info = path.lstat()
        self._touched_s = 0.0
        self._fault = ""

    def fault(self) -> str:
        """Why engines do not find this server's socket, and what helps; empty if they find it."""
        try:
            if os.path.samestat(self._path.lstat(), self._info):
                return ""
        except OSError as error:
            if isinstance(error, PermissionError):
                fix = f"let user {user_name(os.getuid())} enter it again"
                return f"{whose(str(self._path))}, so no further engine can connect: {fix}"
            if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
                return f"{self._path} cannot be looked at ({error.strerror}): engines may fail to connect"
        return f"{self._path} was removed, so no further engine can connect: restart this server"

    def tick(self, now_s: float) -> None:
        """Touches the files now and then; says so if engines no longer find the socket, or find it again."""
        if (fault := self.fault()) != self._fault:
            self._fault = fault
            again = f"engines can connect at {self._path} again"
            logger.log(logging.ERROR if fault else logging.INFO, "%(state)s", {"state": fault or again})
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
            if listener(path) is not None:  # it still runs, although somebody removed its lock file
                raise BlockingIOError
            path.unlink(missing_ok=True)  # left by a server that crashed
            claim = Claim(path, lock)
        except BlockingIOError:
            has = f"has {path}; choose another --port, or stop that server"
            if not path.exists():
                has = f"runs, but {path} was removed; choose another --port, or restart that server"
            raise StartError(f"port {port} is in use: another lmcache server {has}") from None
        except OSError as error:
            make = "" if path.parent.parent.is_dir() else f"mkdir -m 700 -p {path.parent}, or "
            fix = f"{make}set LMCACHE_RUNTIME_DIR to another directory of this user"
            reason = f"{error.filename or path.parent}: {error.strerror}"
            raise StartError(f"cannot use {path.parent} for the socket ({reason}): {fix}") from error
        stack.callback(lambda: path.unlink(missing_ok=True) if not claim.fault() else None)
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


def listener(path: Path) -> int | None:
    """The process that listens at a Unix socket, None if none does; 0 if it is not to be seen from here, or
    cannot be asked."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        if error := probe.connect_ex(str(path)):  # EAGAIN: its queue is full
            return None if error in (errno.ECONNREFUSED, errno.ENOENT) else 0
        return peer_pid(probe.fileno())
