"""The warm restart as an option of the server."""

import os
from collections.abc import Mapping
from typing import Any

from lmcache_server.host import preflight
from lmcache_server.options.warm_restart import restart
from lmcache_server.options.warm_restart.l1_file import L1File
from lmcache_server.service.option import Base, Option
from lmcache_server.transfer.gpus import Gpus


def backing(values: Mapping[str, Any], size_bytes: int) -> L1File | None:
    """The file of --l1-path for so much of L1, open and locked. Raises StartError if it cannot be used."""
    path = values["l1_path"]
    if not path:
        return None
    file = L1File(path, size_bytes)
    if not file.in_memory:
        try:
            preflight.require(preflight.disk_file(path, Gpus().available, os.uname().release))
        except BaseException:
            file.close()
            raise
    return file


class Server(Option):
    def __init__(self, base: Base) -> None:
        super().__init__(base)
        self._cache, self._known, self._options = base.cache, base.registry.known, base.options
        self._file = base.l1.backing if isinstance(base.l1.backing, L1File) else None

    def restore(self) -> None:
        if self._file is not None:
            saved = restart.restore(self._file, self._cache, self._known)
            for option in self._options:
                option.restored(saved.get(type(option).__module__, b""))

    def tick(self, now_s: float) -> None:
        if self._file is not None:
            self._file.tick()

    def save(self) -> None:
        if self._file is not None:
            saved = {type(option).__module__: option.saved() for option in self._options}
            restart.save(self._file, self._cache, self._known, saved)
