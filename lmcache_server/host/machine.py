"""Memory, file systems, processors and servers of this machine, or of the container that this runs in."""

import contextlib
import ctypes
import http.client
import os
from collections.abc import Iterator
from pathlib import Path

HTTP_TIMEOUT_S, MAX_PAGE_BYTES = 0.5, 1 << 20
UNLIMITED = 1 << 60
"""Stands for no limit, mostly in bytes. cgroup v1 shows "no limit" as a number near 2**63."""

HUGETLBFS = 0x958458F6
MEMORY_FILE_SYSTEMS = (0x01021994, 0x858458F6)
"""tmpfs and ramfs, whose files take memory."""

_libc = ctypes.CDLL(None, use_errno=True)


def text(path: str | Path) -> str | None:
    """What a file of /proc, /sys or the like says, None if it is not there or not for this process."""
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return None


def memory_info() -> dict[str, int]:
    """The values of /proc/meminfo: sizes in bytes, HugePages_* as counts."""
    info = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        number, *unit = value.split()
        info[name] = int(number) * (1024 if unit else 1)
    return info


def is_descendant(pid: int, ancestor: int) -> bool:
    """Whether process `pid` is `ancestor`, or was started by it or by one of its descendants. False for 0."""
    with contextlib.suppress(OSError):
        while pid > 1 and pid != ancestor:
            pid = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        return 0 < pid == ancestor
    return False


def process_namespace(pid: int | str) -> str:
    """The process namespace of a process; empty if the process is not visible here, or not this user's."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/pid")
    return ""


def page(host: str, port: int, path: str = "/healthz") -> bytes | None:
    """What an lmcache server answers there over HTTP, up to MAX_PAGE_BYTES; None if none answers."""
    connection = http.client.HTTPConnection(host, port, timeout=HTTP_TIMEOUT_S)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.read(MAX_PAGE_BYTES) if answer.getheader("Server") == "lmcache" else None
    return None


def file_system_type(path: str | int) -> int:
    """The magic number of the file system of `path`, a name or an open descriptor. Raises OSError."""
    # On every architecture, struct statfs begins with the number as a long and is shorter than this.
    answer = (ctypes.c_long * 64)()
    name = f"/proc/self/fd/{path}" if isinstance(path, int) else path
    if _libc.statfs(os.fsencode(name), ctypes.byref(answer)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(answer[0])


def free_bytes(path: str | int) -> int:
    """The free space for files where `path` is, a name or an open descriptor. Raises OSError."""
    system = os.statvfs(path)
    # A ramfs reports no size.
    return system.f_bavail * system.f_frsize if system.f_blocks else UNLIMITED


def mount_point(path: str) -> str:
    """The mount point of the file system that has, or would have, the file `path`."""
    return next(str(parent) for parent in Path(path).absolute().parents if os.path.ismount(parent))


def local_processors(pci_bus_id: str, root: Path = Path("/")) -> set[int]:
    """The processors of a device's NUMA node; empty if the system does not say."""
    return numbers(text(root / "sys/bus/pci/devices" / pci_bus_id.lower() / "local_cpulist") or "")


def move_to(processors: set[int], usable: set[int]) -> None:
    """Lets the calling thread run only on those of these processors that are usable, if there are any."""
    os.sched_setaffinity(0, processors & usable or usable)


def numbers(listed: str) -> set[int]:
    """The numbers of a list as /sys writes it: "0-2,8" means 0, 1, 2 and 8."""
    members: set[int] = set()
    for part in listed.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            members.update(range(int(first), int(last or first) + 1))
    return members


def available_bytes(root: Path = Path("/")) -> tuple[int, str]:
    """The bytes that can still be allocated, and the source of that figure."""
    available = memory_info().get("MemAvailable", UNLIMITED)
    reason = "MemAvailable of this machine"
    for directory in _cgroup_directories(root):
        left = _left_in_cgroup(directory)
        if left < available:
            available, reason = left, f"the memory limit of its cgroup, {directory}"
    return available, reason


def _cgroup_directories(root: Path) -> Iterator[Path]:
    """The cgroups, v1 and v2, whose memory limits apply to this process: its own and all parents."""
    for line in (text(root / "proc/self/cgroup") or "").splitlines():
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
    """The bytes left below the limit of one cgroup, whose page cache counts as free."""
    for limit_name, used_name, cache_names in (
        ("memory.max", "memory.current", ("inactive_file", "active_file")),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    ):
        with contextlib.suppress(OSError):
            limit = (directory / limit_name).read_text().strip()
            used = int((directory / used_name).read_text())
            stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
            if limit != "max" and int(limit) < UNLIMITED:
                cache = sum(int(stat.get(name, 0)) for name in cache_names)
                return max(0, int(limit) - max(0, used - cache))
    return UNLIMITED
