"""A TCP proxy between a server and its store, or a client and its server. It delays or cuts what the store
says, goes silent, or notes what passes."""

import contextlib
import socket
import threading
import time
from typing import Self

PIECE_BYTES = 1 << 16


class Proxy:
    """Listens at `port` of the loopback for the store at another. Each setting holds for what is sent from
    then on, in connections that are open, too."""

    def __init__(self, store_port: int) -> None:
        self._store_port = store_port
        self.delay_s = 0.0
        """Each piece that the store sends arrives so much later."""
        self.bytes_per_s = 0.0
        """So much passes each way, of all connections together; 0 for no limit."""
        self._next_s = {False: 0.0, True: 0.0}
        self._lock = threading.Lock()
        self.cut_bytes: int | None = None
        """A connection ends when the store has sent so many bytes at once, in the middle of a record."""
        self.cuts = 0
        self.noted: bytearray | None = None
        """If it is one, all that passes is added to it, in both directions."""
        self._open: set[socket.socket] = set()
        self._silent: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.delay_s = 0.0
        for each in (self._listener, *self._open):
            self._end(each)
        for thread in self._threads:
            thread.join()

    def silence(self) -> None:
        """Nothing more passes through the connections that are open now, and none of them ends."""
        self._silent |= self._open

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    store = socket.create_connection(("127.0.0.1", self._store_port))
                except OSError:  # the store does not run
                    client.close()
                    continue
                self._open.add(client)
                self._open.add(store)
                for ends in ((client, store, False), (store, client, True)):
                    self._threads.append(threading.Thread(target=self._pass, args=ends))
                    self._threads[-1].start()

    def _pass(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        passed, began_s = 0, 0.0
        with contextlib.suppress(OSError):
            while piece := source.recv(PIECE_BYTES):
                if source in self._silent:
                    continue
                if self.noted is not None:
                    self.noted += piece
                if time.monotonic() - began_s > 0.1:  # the store was silent: another answer
                    passed = 0
                began_s = time.monotonic()
                time.sleep(self._wait_s(len(piece), is_answer))
                if is_answer:
                    time.sleep(self.delay_s)
                    passed += len(piece)
                    if self.cut_bytes is not None and passed > self.cut_bytes:
                        self.cuts += 1
                        target.sendall(piece[: len(piece) // 2])
                        break
                target.sendall(piece)
        for each in (source, target):
            self._end(each)

    def _wait_s(self, num_bytes: int, is_answer: bool) -> float:
        if not self.bytes_per_s:
            return 0.0
        with self._lock:
            now_s = time.monotonic()
            # What was slept too long is made up for.
            self._next_s[is_answer] = (
                max(now_s - 0.003, self._next_s[is_answer]) + num_bytes / self.bytes_per_s
            )
            return max(self._next_s[is_answer] - now_s, 0.0)

    def _end(self, end: socket.socket) -> None:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
        self._open.discard(end)
