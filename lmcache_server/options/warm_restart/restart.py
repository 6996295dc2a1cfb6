"""The warm restart: a clean stop saves the index of the cache in L1's file, and the next start restores it.
If anything about the file is doubtful, the cache starts empty."""

import gc
import logging
import time

from lmcache_server.core.cache import Cache
from lmcache_server.errors import StartError
from lmcache_server.host.units import size
from lmcache_server.options.warm_restart.l1_file import L1File
from lmcache_server.options.warm_restart.snapshot import (
    Known,
    Saved,
    SnapshotError,
    decode,
    encode,
    rebuild,
    take,
)

logger = logging.getLogger(__name__)


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
            snapshot, namespaces, of_options = decode(index, file.num_frames, time.time())
            file.ensure(snapshot.total_frames)
            rebuild(snapshot, cache, time.monotonic())
            file.restored_frames = cache.total_frames
            known.update(namespaces)
            saved = of_options
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
        file.finish(encode(take(cache, time.monotonic()), known, saved, time.time()))
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
