"""The warm restart as an option of the server: a clean stop saves the index of the cache in L1's file, and
the next start restores it. If anything about the file is doubtful, the cache starts empty."""

import gc
import logging
import os
import time
from collections.abc import Mapping
from typing import Any

from lmcache_client.contract import codec
from lmcache_server.core.cache import Cache
from lmcache_server.errors import StartError
from lmcache_server.host import preflight
from lmcache_server.host.units import size
from lmcache_server.options.warm_restart.l1_file import L1File
from lmcache_server.options.warm_restart.snapshot import Known, Saved, SnapshotError, decode, rebuild, take
from lmcache_server.service.option import Base, Option
from lmcache_server.transfer.gpus import Gpus

logger = logging.getLogger(__name__)


def backing(values: Mapping[str, Any], size_bytes: int) -> L1File | None:
    """The file of --l1-path for so much of L1, open and locked. Raises StartError if it cannot be used."""
    path = values["l1_path"]
    if not path:
        return None
    file = L1File(path, size_bytes)
    if not file.in_memory:
        try:
            preflight.require(preflight.disk_file(path, Gpus().available, os.uname().release))
        except BaseException:
            file.close()
            raise
    return file


class Server(Option):
    def __init__(self, base: Base) -> None:
        super().__init__(base)
        self._cache, self._known, self._options = base.cache, base.sessions.known, base.options
        self._file = base.l1.backing if isinstance(base.l1.backing, L1File) else None

    def restore(self) -> None:
        if self._file is not None:
            saved = restore(self._file, self._cache, self._known)
            for option in self._options:
                option.restored(saved.get(type(option).__module__, b""))

    def tick(self, now_s: float) -> None:
        if self._file is not None:
            self._file.tick()

    def save(self) -> None:
        if self._file is not None:
            saved = {type(option).__module__: option.saved() for option in self._options}
            save(self._file, self._cache, self._known, saved)


def restore(file: L1File, cache: Cache, known: Known) -> Saved:
    """Fills an empty cache from `file`, or leaves it empty and logs why. Afterwards the file is in use.

    `known` gets the summaries of the namespaces. Returns what the options saved. Raises StartError if the
    file cannot be written.
    """
    saved: Saved = {}
    started_s = time.perf_counter()
    reason, index, file.index = file.reason, file.index, None
    if index is not None:
        try:
            file.begin()
        except OSError as error:
            raise StartError(f"cannot write to --l1-path {file.path}: {error.strerror}") from error
        # None of the new objects is garbage, and searching them would double the time.
        gc.disable()
        try:
            snapshot = decode(index, file.num_frames)
            file.ensure(snapshot.total_frames)
            known.update(rebuild(snapshot, cache, time.monotonic(), time.time()))
            file.restored_frames = cache.total_frames
            saved = snapshot.saved
        except SnapshotError as error:
            reason = f"its index is inconsistent ({error})"
        except OSError as error:
            reason = f"it has holes, and there is no space to fill them ({error.strerror})"
        finally:
            gc.enable()
    if reason:
        logger.warning(
            "the cache starts empty, %(path)s is not restored: %(reason)s",
            {"path": file.path, "reason": reason},
        )
    elif cache.num_chunks:
        _log("restored %(chunks)d chunks, %(size)s, in %(seconds).2f s from %(path)s", file, cache, started_s)
    return saved


def save(file: L1File, cache: Cache, known: Known, saved: Saved) -> None:
    """Saves the index of the cache in `file`. No copy may be running, and none may start afterwards."""
    started_s = time.perf_counter()
    try:
        file.finish(codec.pack(take(cache, known, saved, time.monotonic(), time.time())))
    except OSError as error:
        logger.error(
            "the cache is not saved, so the next start will be empty: cannot write to %(path)s: %(reason)s",
            {"path": file.path, "reason": error.strerror},
        )
        return
    _log("saved %(chunks)d chunks, %(size)s, in %(seconds).2f s to %(path)s", file, cache, started_s)


def _log(text: str, file: L1File, cache: Cache, started_s: float) -> None:
    fields = {
        "chunks": cache.num_chunks,
        "bytes": cache.stored_bytes,
        "size": size(cache.stored_bytes),
        "seconds": round(time.perf_counter() - started_s, 6),
        "path": file.path,
    }
    logger.info(text, fields)
