"""The log on stderr: one line per event, as text or as a JSON object.

An event's values come as one mapping: `logger.info("session %(session)d ended", {"session": 7})`. The text
shows the values that it names; the JSON object has all of them as fields.

A thread writes the lines. So if nobody reads stderr, for example a stopped terminal, only this thread waits.
"""

import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from queue import Full, Queue
from types import TracebackType
from typing import TextIO

TEXT, JSON = FORMATS = ("text", "json")
MAX_LINES = 4096
"""Lines that wait to be written."""
FLUSH_S = 1.0
"""How long the end of the process waits for them."""
LINE = "%(asctime)s %(levelname)s %(message)s"

logger = logging.getLogger("lmcache_server")


def set_up(level: str, form: str) -> None:
    """Log all of this process on stderr, from `level` up, in one of FORMATS."""
    handler = LineWriter(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == JSON else TextFormatter(LINE))
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    logging.captureWarnings(True)
    sys.excepthook = _ended_by
    threading.excepthook = lambda ended: _ended_by(ended.exc_type, ended.exc_value, ended.exc_traceback)


def flush() -> None:
    """Wait until all lines are written, but not for long if nobody reads them."""
    for handler in logging.getLogger().handlers:
        handler.flush()


class LineWriter(logging.Handler):
    """Has a thread write the lines to `stream`. If too many wait, it drops further ones and says how many."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._lines: Queue[str] = Queue(MAX_LINES)
        self._dropped = self._told = 0
        threading.Thread(target=self._work, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record) + "\n")
        except Full:
            self._dropped += 1
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        end_s = time.monotonic() + FLUSH_S
        while self._lines.unfinished_tasks and time.monotonic() < end_s:
            time.sleep(0.001)

    def _work(self) -> None:
        while True:
            line = self._lines.get()
            # The notice about dropped lines comes after the lines that waited.
            self._write(line)
            if (dropped := self._dropped - self._told) and self._lines.empty():
                self._told += dropped
                text, values = "%(lines)d lines of the log were dropped: nobody read them", {"lines": dropped}
                record = logger.makeRecord(logger.name, logging.WARNING, __file__, 0, text, (values,), None)
                self._write(self.format(record) + "\n")
            self._lines.task_done()

    def _write(self, line: str) -> None:
        # The stream is not used, because its lock would make the end of the process wait, too.
        data = line.encode(errors="backslashreplace")
        with contextlib.suppress(OSError, ValueError):  # closed, or its reader has gone
            try:
                descriptor = self._stream.fileno()
            except OSError:
                self._stream.write(line)
                return
            while data:
                try:
                    data = data[os.write(descriptor, data) :]
                except BlockingIOError:  # noqa: PERF203
                    time.sleep(0.01)


def _ended_by(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    if error is not None:
        name = threading.current_thread().name
        logger.critical("%(thread)s ended", {"thread": name}, exc_info=(kind, error, trace))


class TextFormatter(logging.Formatter):
    """One line per event; the lines of a traceback follow, indented. So no name that a client chose can
    start a line that looks like the server's."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))

    def formatException(self, ei: "logging._SysExcInfoType") -> str:
        lines = super().formatException(ei).splitlines()
        return "\n".join("    " + printable(line) for line in lines)


class JsonFormatter(logging.Formatter):
    """One object per line: time, level, logger, message, the event's values, and any traceback."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        event = {
            "time": at.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        values = record.args if isinstance(record.args, Mapping) else {}
        if record.exc_info:
            event["traceback"] = self.formatException(record.exc_info)
        # json.dumps escapes all but ASCII, so no client's text can end the line.
        return json.dumps({**event, **values, **event}, default=str)


def printable(text: str) -> str:
    """The text with line ends, control characters and the like escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
