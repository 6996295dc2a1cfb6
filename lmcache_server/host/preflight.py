"""Checks whether this machine can run the server: pure functions from figures to a finding and its fix.

The server's start and `lmcache doctor` call the same functions, so they never disagree.
"""

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from lmcache_server.errors import NotNowError, StartError
from lmcache_server.host.machine import UNLIMITED
from lmcache_server.host.units import GB_BYTES, size

OK, WARN, FAIL = "ok", "warn", "fail"
MEMORY = "memory"
LEAST_OPEN_FILES = 4096
FEWEST_OPEN_FILES = 256
"""With fewer, a hundred idle clients would crash the server."""


@dataclass(frozen=True)
class Check:
    """The result of one check. `fix` says what to do; it is empty if nothing is wrong."""

    name: str
    verdict: str
    finding: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.finding}: {self.fix}" if self.fix else self.finding


def require(check: Check) -> None:
    """Raises StartError if the check failed."""
    if check.verdict == FAIL:
        raise (NotNowError if check.name == MEMORY else StartError)(str(check))


def memory(l1_bytes: int, taken_bytes: int, available_bytes: int, reason: str) -> Check:
    """L1 already has `taken_bytes` of its memory. `reason` names the source of `available_bytes`.

    Page tables take 0.2 % of L1 and the index less, and a container's limit counts both: with them, 0.5 %
    must be there.
    """
    missing = max(l1_bytes - taken_bytes, 0) >> 20 << 20  # L1 has whole frames only.
    beside = missing // 200
    if missing + beside <= available_bytes:
        more = " more" if taken_bytes else ""
        need = f"for {size(missing)}{more} of L1" if missing else "beside L1, which has its memory"
        return Check(MEMORY, OK, f"{size(available_bytes)} available {need} ({reason})")
    # An engine may start only later, and needs memory, too.
    fix = _smaller(available_bytes + taken_bytes, "free memory", 50, "half, because engines need some, too; ")
    also = ""
    if missing <= available_bytes:
        also = f" and takes {size(beside)} more for page tables and the index"
    return Check(MEMORY, FAIL, _lacks(l1_bytes, missing, available_bytes, reason, also), fix)


def l1_file(
    path: str, mount: str, in_memory: bool, l1_bytes: int, taken_bytes: int, free_bytes: int
) -> Check:
    """The file `path` takes `taken_bytes` of the file system at `mount`, which has `free_bytes` left.
    `in_memory`: the files of that file system take memory."""
    name = "shared memory"
    more, room_bytes = max(l1_bytes - taken_bytes, 0), taken_bytes + free_bytes
    if more <= free_bytes:
        return Check(name, OK, f"{size(room_bytes)} for {size(l1_bytes)} of L1 at {mount}")
    fix = _smaller(room_bytes, "free space")
    if in_memory:
        gigabytes = -(-l1_bytes // GB_BYTES) + 1
        fix = f"sudo mount -o remount,size={gigabytes}G {mount}  (docker: --shm-size {gigabytes}g)"
    return Check(name, FAIL, _lacks(l1_bytes, more, free_bytes, f"the file system of {path}, {mount}"), fix)


def disk_file(path: str, has_gpu: bool, release: str) -> Check:
    """The file `path` is not in memory; `release` is the kernel's, as in "6.8.0-45-generic"."""
    if not has_gpu or tuple(map(int, re.findall(r"\d+", release)[:2])) < (6, 5):
        return Check("L1 file", OK, f"{path} is on a disk")
    finding = f"--l1-path {path} is on a disk, where Linux 6.5 and newer do not let GPUs copy"
    fix = "put it in /dev/shm, or hide the GPUs from the server if no engine uses them: CUDA_VISIBLE_DEVICES="
    return Check("L1 file", FAIL, finding, fix)


def no_directory(path: str) -> Check:
    fix = f"mkdir -p {shlex.quote(os.path.dirname(os.path.abspath(path)))}"
    return Check("shared memory", FAIL, f"there is no directory for --l1-path {path}", fix)


def huge_pages(info: Mapping[str, int], l1_bytes: int) -> Check:
    """Whether enough reserved huge pages are free for --l1-hugetlb; `info` is machine.memory_info()."""
    name = "reserved huge pages"
    total = info.get("HugePages_Total", 0)
    free = max(info.get("HugePages_Free", 0) - info.get("HugePages_Rsvd", 0), 0)
    page_bytes = info.get("Hugepagesize", 2 << 20)
    needed = -(-l1_bytes // page_bytes)
    if needed <= free:
        return Check(name, OK, f"{free} of {total} are free, for {size(l1_bytes)} of L1")
    finding = f"--l1-hugetlb needs {needed} huge pages of {size(page_bytes)}, but {free} of {total} are free"
    fix = f"sudo sysctl vm.nr_hugepages={total - free + needed}  (or leave out --l1-hugetlb)"
    return Check(name, FAIL, finding, fix)


def open_files(limit: int) -> Check:
    if limit >= LEAST_OPEN_FILES:
        return Check("open files", OK, "unlimited" if limit >= UNLIMITED else str(limit))
    finding = f"the limit of open files is {limit}, so clients that connect very often could crash the server"
    ways = "ulimit -n 65536; systemd: LimitNOFILE=65536; docker: --ulimit nofile=65536"
    verdict = WARN if limit >= FEWEST_OPEN_FILES else FAIL
    return Check("open files", verdict, finding, f"raise it to {LEAST_OPEN_FILES} or more ({ways})")


def _lacks(l1_bytes: int, more_bytes: int, available_bytes: int, reason: str, also: str = "") -> str:
    asked, more, available = (f"{each / GB_BYTES:.2f} GB" for each in (l1_bytes, more_bytes, available_bytes))
    part = f", of which {more} are still missing" if l1_bytes - more_bytes >= 1 << 20 else ""
    return f"--l1-size-gb asks for {asked}{part}{also}, but {available} are available ({reason})"


def _smaller(room_bytes: int, otherwise: str, percent: int = 90, why: str = "") -> str:
    """Advice to ask for less, for so much of the room: others need some, too."""
    gigabytes = room_bytes * percent / 100 / GB_BYTES
    step = 1 if gigabytes >= 10 else 10 if gigabytes >= 1 else 1000
    shown = f"{int(gigabytes * step) / step:g}"
    return f"pass --l1-size-gb {shown}  ({why}or {otherwise})" if shown != "0" else otherwise
