"""`lmcache doctor` and tiers: opens each, and writes, reads, compares and removes one small record."""

import contextlib
import dataclasses
import functools
import io
import logging
import mmap
import os
import stat
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lmcache_client.contract.endpoint import whose
from lmcache_server.errors import StartError
from lmcache_server.host.preflight import FAIL, OK, WARN, Check
from lmcache_server.host.units import GB_BYTES, size
from lmcache_server.options.tiers import urls
from lmcache_server.options.tiers.base import Tier, TierError
from lmcache_server.options.tiers.directory import FREE_PART
from lmcache_server.options.tiers.folders import explained
from lmcache_server.options.tiers.record_format import read_key

WAIT_S = 30.0
RECORD_BYTES = 8192
WITHOUT_LIMIT_GB = 1e9


def checks(values: Mapping[str, Any], running: Mapping[str, Any]) -> list[Check]:
    """A check for each tier of these values of the flags, and one for the room of each directory. A directory
    of one server is locked by the server that has it: `running` is its status."""
    found, tiers = [], running.get("config", {}).get("tier", ())
    place: Callable[[str], str] = lambda text: text.partition("?")[0].rstrip("/")  # noqa: E731
    used = [place(each) for each in tiers if each[:4] == "dir:" and "shared=1" not in each]
    for number, text in enumerate(values["tier"]):
        name = f"tier {number + 1}"
        try:
            url = urls.parse(text)
        except StartError as error:
            found.append(Check(name, FAIL, str(error), "docs/tiers.md lists all settings"))
            continue
        pid = running["pid"] if place(text) in used else 0
        found.append(_within(name, url, functools.partial(_tried, pid=pid)))
        if url.scheme == "dir" and found[-1].verdict != FAIL:
            found.append(_within(f"{name}, room", url, _room))
    return found


def _within(name: str, url: urls.TierUrl, check: Callable[[str, urls.TierUrl], Check]) -> Check:
    """A store that hangs must not keep the command: its thread ends with the process."""
    late = f"{url.text} gave no answer within {WAIT_S:g} s"
    found = [Check(name, FAIL, late, "see whether the store hangs")]
    thread = threading.Thread(target=lambda: found.append(check(name, url)), daemon=True)
    thread.start()
    thread.join(WAIT_S)
    return found[-1]


def _tried(name: str, url: urls.TierUrl, pid: int) -> Check:
    """What the running server, process `pid`, uses is only looked at."""
    warnings = io.StringIO()
    handler = logging.StreamHandler(warnings)
    logger = logging.getLogger("lmcache_server.options.tiers")
    logger.addHandler(handler)
    logger.propagate = False
    made = contextlib.ExitStack()
    try:
        if pid:
            with explained("use", url.place):
                info, proc = os.stat(url.place), Path(f"/proc/{pid}")
            if info.st_mode & stat.S_IRWXU != stat.S_IRWXU:
                raise TierError(f"its owner may not use {url.place}: run 'chmod u+rwx {url.place}'")
            with contextlib.suppress(OSError):  # it has ended, or cannot be seen from here
                if b"lmcache" in (proc / "cmdline").read_bytes() and info.st_uid != proc.stat().st_uid:
                    told = f"{whose(url.place)}, and the running server is another user's"
                    raise TierError(f"{told}: restore the owner, or name another directory")
            return Check(name, OK, f"{url.text}: the running server uses it, so it was not tried")
        urls.compress(url)
        if url.options.key_file:
            read_key(url.options.key_file)
        if url.scheme == "dir":  # shared and without limits, nothing else there is deleted or listed
            url = dataclasses.replace(url, parameters={"size_gb": WITHOUT_LIMIT_GB, "shared": True})
            parent = os.path.dirname(url.place.rstrip("/"))
            if os.path.isdir(parent) and not os.path.lexists(url.place):
                # What root would leave there, the server's user could not use.
                with explained("make", url.place):
                    place = made.enter_context(tempfile.TemporaryDirectory(prefix="lmcache-", dir=parent))
                url = dataclasses.replace(url, place=place)
        if url.scheme == "mooncake":  # and nothing of this memory goes there
            url = dataclasses.replace(url, parameters={**url.parameters, "segment_gb": 0})
        with contextlib.closing(urls.open_tier(url)) as tier:
            _round_trip(tier)
    except (TierError, StartError, OSError, ValueError) as error:
        finding, _, fix = str(error).partition(": ")
        return Check(name, FAIL, finding, fix)
    finally:
        made.close()
        logger.removeHandler(handler)
        logger.propagate = True
    if advice := warnings.getvalue().strip():
        finding, _, fix = advice.partition(": ")
        return Check(name, WARN, finding, fix)
    return Check(name, OK, f"{url.text}: one record was written, read, compared and removed")


def _round_trip(tier: Tier) -> None:
    """Raises TierError."""
    name, content = f"d0c/{os.urandom(16).hex()}", os.urandom(RECORD_BYTES)
    written, read = (memoryview(mmap.mmap(-1, RECORD_BYTES)) for _ in range(2))
    written[:] = content
    try:
        if not tier.write(name, [written]):
            raise TierError("the store has no room for a small record: free space there, or let it evict")
        if not tier.present([name])[0] or not tier.read(name, [read]):
            raise TierError("a record just written is not there: see whether the store evicts at once")
        if read != content:
            raise TierError("a record came back with other bytes: do not use this store, it may be damaged")
    finally:
        tier.remove([name])


def _room(name: str, url: urls.TierUrl) -> Check:
    """Whether there is room for what the tier may become."""
    path = url.place
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    space, wanted = os.statvfs(path), int(url.parameters["size_gb"] * GB_BYTES)
    free, whole = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    shown = f"{size(free)} of {size(whole)} are free, for {size(wanted)} of records"
    room = free - int(whole * FREE_PART)
    for record in Path(url.place).glob("[0-9a-f][0-9a-f]/*.kv") if wanted > room else ():
        with contextlib.suppress(FileNotFoundError):  # a server has evicted it
            room += record.lstat().st_size
    if wanted > room:
        most_gb = room * 100 // GB_BYTES / 100
        less = f"size_gb={most_gb:g} or less" if most_gb > 0 else "name another directory"
        return Check(name, WARN, f"{shown}; 2 % must stay free", f"{less}, or free space there")
    return Check(name, OK, shown)
