"""What this machine, or the container the server runs in, can still give."""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

_UNLIMITED_BYTES = 1 << 60
"""cgroup v1 shows "no limit" as a number near 2**63."""

HUGETLBFS = 0x958458F6
MEMORY_FILE_SYSTEMS = (0x01021994, 0x858458F6)
"""tmpfs and ramfs: what their files take is memory."""

_libc = ctypes.CDLL(None, use_errno=True)


def memory_info() -> dict[str, int]:
    """/proc/meminfo: sizes in bytes, and the HugePages_* counts."""
    info = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        number, *unit = value.split()
        info[name] = int(number) * (1024 if unit else 1)
    return info


def file_system_type(path: str | int) -> int:
    """The magic number of the file system that an open file or `path` is on. Raises OSError."""
    # struct statfs begins with it, a long; the rest of it is shorter than this everywhere.
    answer = (ctypes.c_long * 64)()
    if isinstance(path, int):
        failed = _libc.fstatfs(path, ctypes.byref(answer))
    else:
        failed = _libc.statfs(os.fsencode(path), ctypes.byref(answer))
    if failed:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(answer[0])


def free_bytes(path: str | int) -> int:
    """What files can still take of the file system of an open file or of `path`. Raises OSError."""
    system = os.statvfs(path)
    # A ramfs has no size of its own.
    return system.f_bavail * system.f_frsize if system.f_blocks else _UNLIMITED_BYTES


def mount_point(path: str) -> str:
    """Where the file system is mounted that the file `path` is on or would be created on."""
    return next(str(parent) for parent in Path(path).absolute().parents if os.path.ismount(parent))


def local_processors(pci_bus_id: str, root: Path = Path("/")) -> set[int]:
    """The processors of the NUMA node that a device is at; empty where the system does not say."""
    try:
        text = (root / "sys/bus/pci/devices" / pci_bus_id.lower() / "local_cpulist").read_text()
    except OSError:
        return set()
    return numbers(text)


def numbers(text: str) -> set[int]:
    """What a list of the system means: "0-2,8" is 0, 1, 2 and 8."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return found


def available_bytes(root: Path = Path("/")) -> tuple[int, str]:
    """(bytes that can still be allocated, where that figure is from)."""
    available = memory_info().get("MemAvailable", _UNLIMITED_BYTES)
    reason = "MemAvailable of this machine"
    for directory in _cgroup_directories(root):
        left = _left_in_cgroup(directory)
        if left < available:
            available, reason = left, f"the memory limit of its cgroup, {directory}"
    return available, reason


def _cgroup_directories(root: Path) -> Iterator[Path]:
    """The cgroups, v1 and v2, whose memory limits hold for this process: its own and all above."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = root / ("sys/fs/cgroup/memory" if controllers else "sys/fs/cgroup")
        directory = mount / path.strip("/")
        while directory != mount:
            yield directory
            directory = directory.parent
        yield mount


def _left_in_cgroup(directory: Path) -> int:
    """Bytes below the limit of one cgroup, counting its page cache as free."""
    for limit_name, used_name, cache_names in (
        ("memory.max", "memory.current", ("inactive_file", "active_file")),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    ):
        try:
            limit = (directory / limit_name).read_text().strip()
            used = int((directory / used_name).read_text())
            stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
        except OSError:
            continue
        if limit == "max" or int(limit) >= _UNLIMITED_BYTES:
            continue
        cache = sum(int(stat.get(name, 0)) for name in cache_names)
        return max(0, int(limit) - max(0, used - cache))
    return _UNLIMITED_BYTES
