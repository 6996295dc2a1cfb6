"""/selftest and /selftest/gpu: a client in its own process stores pages and restores them."""

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lmcache_server.admin.http import Answer, as_json

KEEP_S, GPUS_KEEP_S = 5.0, 60.0
"""For this long the result of a test is given again, so that frequent probes do not load server and GPUs."""
DEADLINE_S, GPUS_DEADLINE_S = 16.0, 100.0
"""Longer than the client's own deadlines."""
PACKAGES = Path(__file__).resolve().parents[2]


class SelfTest:
    """Runs one test at a time, and then calls `ended` with "" or with the failed step and the reason."""

    def __init__(
        self, address: str, chunk_size: int | None, ended: Callable[[str], object], on_gpus: bool = False
    ) -> None:
        size, gpus = [] if chunk_size is None else [str(chunk_size)], ["gpus"] * on_gpus
        self._arguments = [address, *size, *gpus]
        self._keep_s, self._deadline_s = (GPUS_KEEP_S, GPUS_DEADLINE_S) if on_gpus else (KEEP_S, DEADLINE_S)
        self._ended = ended
        self._last: asyncio.Task[Answer] | None = None

    async def result(self) -> Answer:
        """A test runs to its end even if its client has gone. Else those that come and go start many."""
        if self._last is None:
            self._last = asyncio.get_running_loop().create_task(self._answer())
        return await asyncio.shield(self._last)

    async def _answer(self) -> Answer:
        try:
            report = await self._run()
            self._ended("" if report["ok"] else f"{report['failed']}: {report['error']}")
            return as_json(report, 200 if report["ok"] else 503)
        finally:
            asyncio.get_running_loop().call_later(self._keep_s, setattr, self, "_last", None)

    async def _run(self) -> dict[str, Any]:
        command = [sys.executable, "-m", "lmcache_server.commands.bench.selftest", *self._arguments]
        try:
            # -m adds the working directory to the search path: use one that is on it anyway.
            process = await asyncio.create_subprocess_exec(
                *command, cwd=PACKAGES, stdin=DEVNULL, stdout=PIPE, stderr=PIPE
            )
            try:
                output, errors = await asyncio.wait_for(process.communicate(), self._deadline_s)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            if process.returncode == 0:
                return dict(json.loads(output))
            last = b"".join(errors.splitlines()[-1:]).decode(errors="replace")
            reason = f"its process ended with code {process.returncode}: {last}"
        except ValueError:
            reason = "its process did not print JSON"
        except asyncio.TimeoutError:
            reason = f"its process did not end within {self._deadline_s:.0f} s"
        except OSError as error:
            reason = f"its process could not run: {error}"
        return {"ok": False, "failed": "client", "error": reason}
