"""`lmcache doctor` and --l1-path: room for the file, and whether a server would take it."""

import os
from collections.abc import Iterator, Mapping
from typing import Any

from lmcache_server.commands.doctor import verdicts
from lmcache_server.errors import StartError
from lmcache_server.host import machine, preflight
from lmcache_server.host.preflight import FAIL, Check
from lmcache_server.host.units import GB_BYTES
from lmcache_server.options.warm_restart.l1_file import L1File
from lmcache_server.transfer.gpus import Gpus


def checks(values: Mapping[str, Any], running: Mapping[str, Any]) -> list[Check]:
    """For these values of the flags; `running` is the status of the server that runs, if one does."""
    path, l1_bytes = values["l1_path"], int(values["l1_size_gb"] * GB_BYTES)
    if not path:
        return []
    is_running = running.get("config", {}).get("l1_path") == path
    return [*_room(path, l1_bytes), *(() if is_running else _refusal(path, l1_bytes))]


def _room(path: str, l1_bytes: int) -> list[Check]:
    directory = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(directory):
        return [preflight.no_directory(path)]
    in_memory = machine.file_system_type(directory) in machine.MEMORY_FILE_SYSTEMS
    taken_bytes = os.stat(path).st_blocks * 512 if os.path.exists(path) else 0
    free_bytes, mount = machine.free_bytes(directory), machine.mount_point(path)
    room = preflight.l1_file(path, mount, in_memory, l1_bytes, taken_bytes, free_bytes)
    if not in_memory:
        return [room, preflight.disk_file(path, Gpus().available, os.uname().release)]
    memory = preflight.memory(l1_bytes, taken_bytes, *machine.available_bytes())
    # More than that cannot be had by a larger /dev/shm.
    rooms = [memory] if memory.verdict == FAIL else [room, memory]
    huge_pages = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
    return [*rooms, verdicts.transparent_huge_pages(machine.text(huge_pages), huge_pages)]


def _refusal(path: str, l1_bytes: int) -> Iterator[Check]:
    """With what words a server of this user would refuse the file, if it would."""
    directory = os.path.dirname(os.path.abspath(path))
    try:
        if os.path.lexists(path):
            L1File(path, l1_bytes, trial=True).close()
        elif os.path.isdir(directory) and not os.access(directory, os.W_OK):
            raise StartError(f"cannot make --l1-path {path}: name a file where this user may write")
    except StartError as error:
        finding, _, fix = str(error).rpartition(": ")
        yield Check("L1 file", FAIL, finding, fix)
