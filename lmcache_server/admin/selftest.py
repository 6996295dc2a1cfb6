"""/selftest: a client in a process of its own stores and restores a page through the real path."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

KEEP_S = 5.0
"""A result is given to all who ask within this time of its end, so that a probe cannot load the server."""
DEADLINE_S = 16.0
"""More than the client's own."""
PACKAGES = Path(__file__).resolve().parents[2]


class SelfTest:
    """For any thread; one test at a time. `ended(error)` is told of each, in the thread of whoever asked:
    an empty sentence, or the step that failed and why."""

    def __init__(self, address: str, chunk_size: int | None, ended: Callable[[str], object]) -> None:
        self._arguments = [address] if chunk_size is None else [address, str(chunk_size)]
        self._ended = ended
        self._lock = threading.Lock()
        self._last_s = -KEEP_S
        self._last = (503, b"")

    def result(self) -> tuple[int, bytes]:
        """The HTTP status and its JSON."""
        with self._lock:
            if time.monotonic() - self._last_s >= KEEP_S:
                report = self._run()
                self._ended("" if report["ok"] else f"{report['failed']}: {report['error']}")
                self._last = (200 if report["ok"] else 503, json.dumps(report).encode())
                self._last_s = time.monotonic()
            return self._last

    def _run(self) -> dict[str, Any]:
        # A directory that the interpreter searches anyway: -m puts the present one first.
        command = [sys.executable, "-m", "lmcache_server.commands.bench.selftest", *self._arguments]
        try:
            done = subprocess.run(
                command,
                cwd=PACKAGES,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=DEADLINE_S,
                check=False,
            )
            if done.returncode == 0:
                report: dict[str, Any] = json.loads(done.stdout)
                return report
            said = done.stderr.decode(errors="replace").splitlines()[-1:]
            why = f"its process ended with code {done.returncode}: {''.join(said)}"
        except ValueError:
            why = "what its process said is not JSON"
        except (OSError, subprocess.TimeoutExpired) as error:
            why = f"its process could not run: {error}"
        return {"ok": False, "failed": "client", "error": why}
