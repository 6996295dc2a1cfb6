"""Hands file descriptors of GPU memory to the server over a Unix socket.

The server needs no right over this process for that. Containers often withhold such rights.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Collection

from lmcache_client.contract.endpoint import LENT_BYTES, check_runtime_directory, lending_path, peer_user

PATIENCE_S = 2.0


class Lender:
    """Lends these descriptors to processes of this user and to root, until `close`. If this process may not
    listen in the runtime directory, or the server has another one, nobody asks."""

    def __init__(self, descriptors: Collection[int]) -> None:
        self._descriptors = descriptors
        self._path = lending_path(os.getpid())
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            check_runtime_directory(self._path.parent)
            self._path.unlink(missing_ok=True)  # of a former process with this number
            self._socket.bind(str(self._path))
            self._socket.listen()
        except (OSError, ValueError):
            self._socket.close()
            return
        threading.Thread(target=self._work, name="lmcache-lender", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it may never have listened
            self._socket.shutdown(socket.SHUT_RDWR)
            self._path.unlink(missing_ok=True)

    def _work(self) -> None:
        with self._socket, contextlib.suppress(OSError):  # `close` makes accept fail
            while True:
                asking, _ = self._socket.accept()
                with asking, contextlib.suppress(OSError):
                    asking.settimeout(PATIENCE_S)
                    number = int.from_bytes(asking.recv(LENT_BYTES), "little")
                    if peer_user(asking) in (0, os.getuid()) and number in self._descriptors:
                        socket.send_fds(asking, [b"\0"], [number])
