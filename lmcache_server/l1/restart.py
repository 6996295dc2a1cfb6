"""A warm restart: at a clean stop the index of the cache goes into the file of L1, at the next start it
comes back. Any doubt about it, and the cache starts empty."""

import gc
import json
import logging
import time
from typing import Any

import msgpack  # type: ignore[import-untyped]

from lmcache_client.contract import codec
from lmcache_client.contract.codec import Natural
from lmcache_server.core.cache import Cache
from lmcache_server.core.snapshot import Snapshot, SnapshotError
from lmcache_server.errors import StartError
from lmcache_server.host.units import size
from lmcache_server.l1.file import L1File

logger = logging.getLogger(__name__)

Known = dict[bytes, dict[str, Any]]
_Content = tuple[Natural, list[bytes], list[str], list[Any]]
"""Frames, namespaces, what is known of each as JSON, rows."""


def restore(file: L1File, cache: Cache, known: Known) -> None:
    """Fill an empty cache from `file`, or leave it empty and log why; then the file is in use.

    `known` gets the namespaces that have chunks. Raises StartError when the file cannot be written.
    """
    started_s = time.perf_counter()
    reason, index, file.index = file.reason, file.index, None
    if index is not None:
        try:
            file.begin()
        except OSError as error:
            raise StartError(f"cannot write to --l1-path {file.path}: {error.strerror}") from error
        # Nothing of this is garbage; looking for some would take as long as all the rest.
        gc.disable()
        try:
            snapshot, namespaces = decode(index, file.num_frames)
            file.ensure(snapshot.total_frames)
            cache.restore(snapshot, time.monotonic())
            known.update(namespaces)
        except SnapshotError as error:
            reason = f"its index does not fit together ({error})"
        except OSError as error:
            reason = f"it has holes for which there is no space ({error.strerror})"
        finally:
            gc.enable()
    if reason:
        logger.warning(
            "the cache starts empty, %(path)s is not restored: %(reason)s",
            {"path": file.path, "reason": reason},
        )
    elif cache.num_chunks:
        _log("restored %(chunks)d chunks, %(size)s, in %(seconds).2f s from %(path)s", file, cache, started_s)


def save(file: L1File, cache: Cache, known: Known) -> None:
    """Put the index of the cache into `file`. No copy may be under way, and none may begin any more."""
    started_s = time.perf_counter()
    try:
        file.finish(encode(cache.snapshot(time.monotonic()), known))
    except OSError as error:
        logger.error(
            "the cache is not saved, the next start is an empty one: cannot write to %(path)s: %(reason)s",
            {"path": file.path, "reason": error.strerror},
        )
        return
    _log("saved %(chunks)d chunks, %(size)s, in %(seconds).2f s to %(path)s", file, cache, started_s)


def _log(sentence: str, file: L1File, cache: Cache, started_s: float) -> None:
    fields = {
        "chunks": cache.num_chunks,
        "bytes": cache.stored_bytes,
        "size": size(cache.stored_bytes),
        "seconds": round(time.perf_counter() - started_s, 6),
        "path": file.path,
    }
    logger.info(sentence, fields)


def encode(snapshot: Snapshot, known: Known) -> bytes:
    """A snapshot, and what is known of its namespaces."""
    described = [json.dumps(known.get(namespace)) for namespace in snapshot.namespaces]
    return codec.pack([snapshot.total_frames, snapshot.namespaces, described, snapshot.rows])


def decode(index: bytes, max_frames: int) -> tuple[Snapshot, Known]:
    """What `encode` made the bytes of, not checked further than to its rows. Raises SnapshotError."""
    known: Known = {}
    try:
        total_frames, namespaces, described, rows = codec.build(_Content, _unpack(index))
        for namespace, summary in zip(namespaces, map(json.loads, described), strict=True):
            if isinstance(summary, dict):
                known[namespace] = summary
    except (TypeError, ValueError) as error:
        raise SnapshotError(str(error)) from error
    if total_frames > max_frames:
        raise SnapshotError(f"{total_frames} frames in a file of {max_frames}")
    return Snapshot(total_frames, namespaces, rows), known


def _unpack(index: bytes) -> Any:
    try:
        return msgpack.unpackb(index, raw=False, strict_map_key=True, max_map_len=0, max_ext_len=0)
    except Exception as error:  # msgpack raises a dozen types, all of which mean the same here
        raise SnapshotError(f"not MessagePack: {error}") from error
