"""Hands file descriptors of GPU memory to the server over a Unix socket.

The server needs no right over this process for that. Containers often withhold such rights.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Collection

from lmcache_client.contract.endpoint import LENT_BYTES, check_runtime_directory, credentials, lending_path

PATIENCE_S, PAUSE_S = 2.0, 0.05


class Lender:
    """Lends these descriptors to processes of this user and to root, from `listen` to `close`. If it may not
    listen in the runtime directory, or the server has another one, nobody asks."""

    def __init__(self, descriptors: Collection[int]) -> None:
        self._descriptors = descriptors
        self._path = lending_path(os.getpid())
        self._thread: threading.Thread | None = None

    def listen(self) -> None:
        """Called before each registration: the server may only now have made the directory."""
        if self._thread is not None:
            return
        with contextlib.suppress(OSError, ValueError), contextlib.ExitStack() as stack:
            check_runtime_directory(self._path.parent)
            self._socket = stack.enter_context(socket.socket(socket.AF_UNIX))
            self._path.unlink(missing_ok=True)  # of a former process with this number
            self._socket.bind(str(self._path))
            self._socket.listen()
            stack.pop_all()
            self._thread = threading.Thread(target=self._work, name="lmcache-lender", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Afterwards the descriptors may be closed: nobody gets what has their numbers then."""
        if self._thread is not None:
            self._descriptors = ()
            self._path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # its thread has seen that already
                self._socket.shutdown(socket.SHUT_RDWR)
            self._thread.join()

    def _work(self) -> None:
        with self._socket:
            while self._descriptors:
                try:
                    asking, _ = self._socket.accept()
                except OSError:  # closed, or no descriptor is left
                    time.sleep(PAUSE_S)
                    continue
                with asking, contextlib.suppress(OSError):
                    asking.settimeout(PATIENCE_S)
                    number = int.from_bytes(asking.recv(LENT_BYTES), "little")
                    if credentials(asking)[1] in (0, os.getuid()) and number in self._descriptors:
                        socket.send_fds(asking, [b"\0"], [number])
