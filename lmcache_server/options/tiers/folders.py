"""How records lie in a directory, what else lies there, and who may use it: the parts on the file system."""

import collections
import contextlib
import errno
import fcntl
import logging
import os
import stat
import time
import zlib
from collections.abc import Iterator

from lmcache_client.contract.endpoint import user_name, whose
from lmcache_server.options.tiers.base import TierError, checked_name, is_name
from lmcache_server.options.tiers.files import Files, is_temporary

logger = logging.getLogger(__name__)

LOCK, SWEEPER = "lock", "sweeper.lock"
FOLDERS = [f"{number:02x}" for number in range(256)]
_ENDING = ".kv"
_ADVICE = {
    errno.EROFS: "its file system is read-only: name another one, remount it or, under systemd, add it to "
    "ReadWritePaths= of the unit",
    errno.ENOENT: "it was removed, renamed or unmounted: restore it and restart the server",
    errno.ESTALE: "its file server has replaced it: restart the server",
    errno.EIO: "the disk fails: see the kernel's log (dmesg)",
    errno.ENOLCK: "its file system has no locks: mount it with locks",
}


@contextlib.contextmanager
def explained(what: str, path: str) -> Iterator[None]:
    """OSError becomes a TierError that says what cannot be done with the directory, why, and what to do."""
    try:
        yield
    except OSError as error:
        failed = f"cannot {what} the directory {path}"
        reason = _ADVICE.get(error.errno or 0, "") or error.strerror or error
        if error.errno in (errno.EACCES, errno.EPERM):
            file = os.path.normpath(os.path.join(path, str(error.filename or "")))
            closed = os.path.dirname(file) if os.access(file, os.R_OK | os.W_OK) else file
            failed = f"{failed} ({os.strerror(error.errno).lower()}; {whose(closed)})"
            reason = f"name one that user {user_name(os.geteuid())} may write to"
        raise TierError(f"{failed}: {reason}") from error


def path_of(name: str) -> str:
    """The file of a record. Raises TierError for a name that is none."""
    checked_name(name)
    return f"{zlib.crc32(name.encode()) & 0xFF:02x}/{name.replace('/', '+')}{_ENDING}"


def open_root(path: str, shared: bool, opened: contextlib.ExitStack) -> int:
    """The directory, made if need be, and locked as long as `opened`. Raises TierError and OSError."""
    try:
        os.mkdir(path, 0o700)
        logger.info("made the directory %(path)s for a tier", {"path": path})
        if os.stat(path).st_dev == os.stat("/").st_dev:
            advice = "if its own disk is not mounted, stop the server, mount that disk and start again"
            logger.warning("the tier in %(path)s is on the root file system: %(advice)s",
                           {"path": path, "advice": advice})  # fmt: skip
    except FileExistsError:
        pass
    except FileNotFoundError:
        # Whatever should be mounted there is not: the file system of the root would fill instead.
        parent = os.path.dirname(path.rstrip("/"))
        raise TierError(f"there is no directory {parent}: mount or make it, or name another one") from None
    root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    opened.callback(os.close, root)
    found = os.fstat(root)
    if found.st_mode & 0o022:
        # Whoever closed it as root might harm others.
        fix = f"name a new subdirectory of it, such as {os.path.join(path, 'lmcache')}"
        raise TierError(f"other users may write to the directory {path} and so change records: {fix}")
    if found.st_uid not in (0, os.geteuid()):
        raise TierError(
            f"the directory {path} belongs to user {user_name(found.st_uid)}, who may change records: name "
            "another one, or start the server as that user"
        )
    if not _lock(root, LOCK, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, opened):
        raise TierError(f"another server uses the directory {path}: name another, or add shared=1 for both")
    return root


def may_sweep(root: int, opened: contextlib.ExitStack) -> bool:
    """Whether this server is the one that evicts from a shared directory, from now on as long as `opened`."""
    return _lock(root, SWEEPER, fcntl.LOCK_EX, opened)


def _lock(root: int, name: str, kind: int, opened: contextlib.ExitStack) -> bool:
    """False if another server has the lock."""
    file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=root)
    with contextlib.ExitStack() as made, contextlib.suppress(BlockingIOError):
        made.callback(os.close, file)
        fcntl.flock(file, kind | fcntl.LOCK_NB)
        opened.push(made.pop_all())
        return True
    return False


def now_s(root: int) -> float:
    """The file system's time: its server's, if there is one. If nothing may be written there, this machine's
    time."""
    with contextlib.suppress(OSError):
        os.utime(LOCK, dir_fd=root)
        return os.stat(LOCK, dir_fd=root).st_mtime
    return time.time()


def records(files: Files) -> Iterator[tuple[str, "os.DirEntry[str]"]]:
    """All records, in no order. Others may delete them at any time. Files of others are left alone."""
    for folder in FOLDERS:
        for entry in files.folder(folder):
            name = entry.name.removesuffix(_ENDING).replace("+", "/")
            if is_name(name) and path_of(name) == f"{folder}/{entry.name}":
                yield name, entry


def status(entry: "os.DirEntry[str]") -> os.stat_result | None:
    """None if somebody has deleted it."""
    with contextlib.suppress(FileNotFoundError):
        return entry.stat(follow_symlinks=False)
    return None


def delete_leftovers(files: Files, before_s: float) -> None:
    """Delete temporary files last written before that time."""
    for folder in [".", *FOLDERS]:
        for entry in files.folder(folder):
            found = status(entry) if is_temporary(entry.name) else None
            if found and stat.S_ISREG(found.st_mode) and found.st_mtime < before_s:
                files.unlink(f"{folder}/{entry.name}")


def delete_oldest(files: Files, size_bytes: int, before_s: float) -> None:
    """Delete the records written before that time, and the oldest others until the rest has `size_bytes`."""
    written: collections.Counter[int] = collections.Counter()
    for _, entry in records(files):
        if found := status(entry):
            written[int(found.st_mtime)] += found.st_size
    for second in sorted(written, reverse=True):
        size_bytes -= written[second]
        if size_bytes < 0:
            before_s = max(before_s, second + 1)
            break
    if written and min(written) < before_s:
        for name, entry in records(files):
            if (found := status(entry)) and found.st_mtime < before_s:
                files.unlink(path_of(name))
