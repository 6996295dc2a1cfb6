"""Names weights by their content, so that two machines, or two paths, have one name for the same weights."""

import hashlib
import json
import os
import time
from pathlib import Path

from huggingface_hub import snapshot_download

PAGE_BYTES = 4096
SMALL_BYTES = 1 << 20
"""Files of up to this size are read whole."""
STRIDE_BYTES = 4 << 20
"""From larger files, a page is read for each so many bytes, and one of each tensor."""
END_BYTES = 1 << 18
"""Read at the end of a larger file: a torch file has the checksums of its tensors there."""
MAX_HEADER_BYTES = 100 << 20
"""The bound of the safetensors library."""
MAX_ADAPTERS = 4096


def local_path(name: str, revision: str | None = None, cache: str | None = None) -> Path | None:
    """Where a model or an adapter lies on this machine: at a path, or in the cache of its hub."""
    path = Path(name).expanduser()
    if path.exists():
        return path
    try:
        return Path(snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True))
    except Exception:
        return None


def fingerprint(path: Path) -> str:
    """A digest of a file, or of the files in a directory except hidden ones; empty if there are none, or if
    they cannot be read.

    It covers the names and sizes of the files, the content of small ones, and of large ones some pages: every
    training or merge changes it, because these change whole tensors. An edit of a few rows of a tensor may be
    missed.
    """
    try:
        files = _files(path)
        digest = hashlib.sha256(repr([(file.name, file.stat().st_size) for file in files]).encode())
        for file in files:
            with file.open("rb", buffering=0) as opened:
                for offset, length in _places(file):
                    opened.seek(offset)
                    digest.update(opened.read(length))
        return digest.hexdigest() if files else ""
    except (OSError, ValueError, OverflowError):
        return ""


def _files(path: Path) -> list[Path]:
    entries = sorted(path.iterdir()) if path.is_dir() else [path]
    return [entry for entry in entries if entry.is_file() and not entry.name.startswith(".")]


def _places(file: Path) -> list[tuple[int, int]]:
    """The (offset, length) that are read of a file."""
    size = file.stat().st_size
    if size <= SMALL_BYTES:
        return [(0, size)]
    starts = {*range(0, size, STRIDE_BYTES)}
    if file.suffix == ".safetensors":
        starts |= {(begin + end - PAGE_BYTES) // 2 for begin, end in _tensors(file, size)}
    pages = [(max(0, start), PAGE_BYTES) for start in sorted(starts)]
    return [*pages, (max(0, size - END_BYTES), END_BYTES)]


def _tensors(file: Path, size: int) -> list[tuple[int, int]]:
    """Where the tensors of a safetensors file begin and end; nothing if its header is damaged."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = opened.read(length) if length <= MAX_HEADER_BYTES else b""
    try:
        offsets = [
            entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__"
        ]
        places = [(8 + length + int(begin), 8 + length + int(end)) for begin, end in offsets]
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return []
    return [(begin, end) for begin, end in places if 0 <= begin <= end <= size]


class Adapters:
    """How the adapters (LoRA) of this engine stand in the keys of their requests.

    An adapter is known by its content if its files are older than this process: vLLM may have loaded it at
    any time since. Otherwise nobody knows which content vLLM has, so only this process uses its pages.
    """

    def __init__(self) -> None:
        self._keys: dict[tuple[str, int], tuple[object, tuple[str, ...]]] = {}
        self._nonce = os.urandom(16).hex()
        self._started_ns = _process_started_ns()

    def key(self, name: str, path: str, number: int) -> tuple[str, ...]:
        """`number` is vLLM's own of the adapter: another if it was unloaded and loaded again."""
        place = local_path(path)
        state = _state(place)
        known = self._keys.get((path, number))
        if known is not None and known[0] == state:
            return known[1]
        is_old = place is not None and all(changed_ns < self._started_ns for _, _, changed_ns in state)
        content = fingerprint(place) if is_old and place is not None else ""
        own = (name, path, self._nonce, str(number), repr(state))
        key = ("lora", "content", content) if content else ("lora", "own", *own)
        if len(self._keys) >= MAX_ADAPTERS:
            self._keys.clear()
        self._keys[path, number] = state, key
        return key


def _state(path: Path | None) -> list[tuple[str, int, int]]:
    """The name, size and time of the last change (in ns) of each file."""
    try:
        stats = [(file.name, file.stat()) for file in _files(path)] if path is not None else []
    except OSError:
        return []
    return [(name, stat.st_size, max(stat.st_mtime_ns, stat.st_ctime_ns)) for name, stat in stats]


def _process_started_ns() -> int:
    """When this process began, by the clock of file times."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * 10**9 // os.sysconf("SC_CLK_TCK")
    return time.time_ns() - age_ns
