"""What this option adds to the flags of `lmcache server`."""

from collections.abc import Mapping
from typing import Any

from lmcache_server.errors import StartError

FLAGS = {
    "l1_path": {
        "metavar": "FILE",
        "help_text": "File that holds the cache, best in a memory file system such as /dev/shm. After a "
        "clean stop, the next server with the same file, and at least this --l1-size-gb, restores the whole "
        "cache. Without a file, the cache ends with the server.",
    }
}
OF_DOCTOR = ("l1_path",)


def check(values: Mapping[str, Any]) -> None:
    """Raises StartError if the flags contradict each other."""
    if values["l1_path"] and values["l1_hugetlb"]:
        raise StartError("--l1-path and --l1-hugetlb cannot be combined: leave one of them out")


def backs_l1(values: Mapping[str, Any]) -> bool:
    """Whether L1 lies in a file, and takes no memory of its own."""
    return bool(values["l1_path"])
