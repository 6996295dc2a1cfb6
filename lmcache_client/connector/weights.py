"""What stands for weights in names and keys: their content, so that two machines, or two paths, have one name
for the same weights."""

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TypeVar

from huggingface_hub import snapshot_download
from vllm import envs

from lmcache_client.connector.log import logger
from lmcache_client.connector.vllm_surface import caller
from lmcache_client.contract.keys import KEY_BYTES, ROOT_KEY

Value = TypeVar("Value")
READ_BYTES = 4 << 20
REMEMBERED_BYTES = 1 << 20
"""Of files from this size on, the digest is remembered."""
READERS = 4
SLOTS = threading.Semaphore(READERS)
"""So many files are read at a time."""
SAMPLES, SAMPLE_BYTES = 16, 4096
"""So much of a file must match for its remembered digest to count. Two images of file systems may have files
with equal numbers and times."""
MAX_ADAPTERS = 4096
ADAPTER_WAIT_S = 0.1  # for the digest of a new adapter; until then, only this process uses its pages


def local_path(
    name: str, revision: str | None = None, cache: str | None = None, is_loaded: bool = False
) -> Path | None:
    """Where a model or an adapter lies on this machine: at a path, or in the cache of its hub. If files are
    missing there, it counts only if vLLM has loaded it (`is_loaded`), which then needed none of them."""
    with contextlib.suppress(OSError, RuntimeError):
        if (path := Path(name).expanduser()).exists():
            return path
    if envs.VLLM_USE_MODELSCOPE:
        return None
    try:
        return Path(snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True))
    except Exception as error:
        # vLLM does not bring all files of a model.
        found = getattr(error, "snapshot_path", None) if is_loaded else None
        return Path(found) if found else None


def in_thread(work: Callable[[], Value]) -> "Future[Value]":
    """Starts `work` in a thread that ends with the process."""
    future: Future[Value] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="lmcache-weights", daemon=True).start()
    return future


def fingerprint(
    path: Path, older_than_ns: float = float("inf"), deep: bool = False, only_version: bool = True
) -> str:
    """The digest of the names and of all bytes of a directory's files, except hidden ones, or of one file;
    empty if there are none, if they cannot be read, or if they are not older. With `deep`, also of the files
    of its subdirectories. `only_version` is that of is_older."""
    try:
        files = [each for each in _places(path, deep) if each.is_file()]

        def named(first: int) -> list[tuple[str, str]]:
            return [(str(file.relative_to(path)), _digest(file)) for file in files[first::READERS]]

        hashing = [in_thread(functools.partial(named, first)) for first in range(READERS)]
        parts = sorted(part for each in hashing for part in each.result())
        is_named = files and is_older(path, older_than_ns, deep, only_version)  # now that they have been read
        return hashlib.sha256(repr(parts).encode()).hexdigest() if is_named else ""
    except (OSError, RuntimeError, ValueError):
        return ""


def is_older(path: Path, than_ns: float, deep: bool = False, only_version: bool = True) -> bool:
    """Whether what lies there now lay there at this moment, too, by the clock of file times. With
    `only_version`, the only version that a hub has brought counts as older: vLLM has loaded that one."""
    with contextlib.suppress(OSError):
        # A hub replaces no file.
        is_only = only_version and path.parent.name == "snapshots" and len(os.listdir(path.parent)) == 1
        if is_only and all(each.is_symlink() or each.is_dir() for each in _places(path, deep)):
            return True
    state = _state(path, deep)
    return bool(state) and all(changed_ns < than_ns for _, _, changed_ns in state)


def _places(path: Path, deep: bool) -> list[Path]:
    """A file, or a directory and its files; with `deep`, also its subdirectories and theirs. Raises OSError
    if one of these is a link, which may lead anywhere."""
    places = [path]
    for entry in sorted(path.iterdir()) if path.is_dir() else ():
        if entry.name.startswith("."):
            continue
        if entry.is_file():
            places.append(entry)
        elif deep and entry.is_dir():
            if entry.is_symlink():
                raise OSError(f"{entry} is a link to a directory")
            is_open = os.access(entry, os.R_OK) or os.access(entry, os.X_OK)
            places += _places(entry, deep) if is_open else [entry]  # vLLM cannot read it either
    return places


def _digest(file: Path) -> str:
    """The SHA-256 of a file. A hub's cache has it as the name of the file; of others, it is remembered."""
    file = file.resolve()
    if file.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", file.name):
        return file.name
    identity, size = _identity(file), file.stat().st_size
    memory = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lmcache-mp" / "digests"
    with SLOTS, file.open("rb", buffering=0) as opened:
        if size >= REMEMBERED_BYTES:
            places = (size * number // SAMPLES for number in range(SAMPLES))
            samples = [os.pread(opened.fileno(), SAMPLE_BYTES, place) for place in places]
            known = memory / hashlib.sha256(repr((identity, samples)).encode()).hexdigest()
            with contextlib.suppress(OSError):  # of the ranks of an engine, one reads and the others wait
                fcntl.flock(opened, fcntl.LOCK_EX)
            with contextlib.suppress(OSError, ValueError):
                if re.fullmatch("[0-9a-f]{64}", remembered := known.read_text()):
                    return remembered
        digest = hashlib.sha256()
        while piece := opened.read(READ_BYTES):
            digest.update(piece)
        if _identity(file) != identity:
            raise OSError(f"{file} has changed while it was read")
        if size >= REMEMBERED_BYTES:
            with contextlib.suppress(OSError):
                known.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                new = known.with_name(f"{known.name}.{os.getpid()}")
                new.write_text(digest.hexdigest())
                new.rename(known)
    return digest.hexdigest()


def _identity(file: Path) -> tuple[int, ...]:
    stat = file.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


class Adapters:
    """How the adapters (LoRA) of this engine stand in the keys of their requests.

    An adapter is named by its content if its files have not changed since this process began: vLLM may have
    loaded it at any time since then. Otherwise nobody knows which content vLLM has, so only this process uses
    its pages.
    """

    def __init__(self) -> None:
        self._contents: dict[tuple[str, int], tuple[object, Future[str]]] = {}
        self._has_forgotten = False
        """Whether there were too many to remember what was there first."""
        self._nonce = os.urandom(16).hex()
        self._started_ns = process_started_ns()

    def key(self, name: str, path: str, number: int) -> tuple[str, ...]:
        """`number` is vLLM's own of the adapter: another if it was unloaded and loaded again."""
        place = local_path(path)
        state = _state(place)
        known, hashing = self._contents.get((path, number), (None, Future[str]()))
        if known != state:
            if len(self._contents) >= MAX_ADAPTERS:
                self._contents.clear()
                self._has_forgotten = True
            # vLLM has loaded what was there first. A hub may bring another version, and remove that one.
            named = (
                functools.partial(fingerprint, place, self._started_ns, only_version=not self._has_forgotten)
                if place and not known
                else str
            )
            hashing = in_thread(named)
            # What was there once does not begin anew when it is gone for a moment.
            self._contents[path, number] = state or known or [], hashing
            wait([hashing], ADAPTER_WAIT_S)
        if hashing.done() and (content := hashing.result()):
            return ("lora", "content", content)
        return ("lora", "own", name, path, self._nonce, str(number), repr(state))


class Root:
    """The `key` before the first key of each chain. Each reset of vLLM's cache changes it.

    After a reset nobody knows which weights the engine has, so the key is random. If the user names weights
    (`is_named`), and vLLM gets a new weight version before it computes anything, the key is made from that.
    """

    def __init__(self, is_named: bool, random_bytes: Callable[[int], bytes]) -> None:
        self.key = ROOT_KEY
        self._is_named, self._random_bytes = is_named, random_bytes
        self._version = "default"  # vLLM's name for the weights that it loads at its start
        self._may_be_named = False

    def reset(self) -> None:
        self.key = self._random_bytes(KEY_BYTES)
        self._may_be_named = self._is_named

    def adopt_version(self, changed: Callable[[], None]) -> None:
        """Called, often, before a step computes anything. Calls `changed` if the key has changed."""
        if not self._may_be_named:
            return
        self._may_be_named = False
        # vLLM's EngineCore knows the version, but tells no connector; it is empty if this vLLM has none.
        core = caller("get_weight_version")
        version = str(core.get_weight_version()) if core is not None else ""
        # The old version proves nothing: the weights may have changed since.
        if version not in ("", self._version):
            self._version = version
            self.key = hashlib.sha256(f"weights {version}".encode()).digest()[:KEY_BYTES]
            logger.info("lmcache: pages are shared by weights_name and the weight version %s", version)
            changed()


def _state(path: Path | None, deep: bool = False) -> list[tuple[str, int, int]]:
    """The name, size and time of the last change (in ns) of each file and directory."""
    try:
        files = _places(path, deep) if path is not None else []  # a directory may be exchanged, too
        stats = [(file.name, file.stat(), file.lstat()) for file in files]
    except OSError:
        return []
    # A link is new where a hub has brought another version.
    return [
        (name, of.st_size, max(of.st_mtime_ns, of.st_ctime_ns, link.st_ctime_ns)) for name, of, link in stats
    ]


def process_started_ns() -> int:
    """When this process began, by the clock of file times."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * 10**9 // os.sysconf("SC_CLK_TCK")
    return time.time_ns() - age_ns
