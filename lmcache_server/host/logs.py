"""The log on stderr: one line per event, as text or as a JSON object.

An event's values come as one mapping: `logger.info("session %(session)d ended", {"session": 7})`. The text
shows the values that it names; the JSON object has all of them as fields.
"""

import json
import logging
import sys
import threading
from collections.abc import Mapping
from datetime import datetime, timezone
from types import TracebackType

TEXT, JSON = FORMATS = ("text", "json")
LINE = "%(asctime)s %(levelname)s %(message)s"

logger = logging.getLogger("lmcache_server")


def set_up(level: str, form: str) -> None:
    """Log all of this process on stderr, from `level` up, in one of FORMATS."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == JSON else TextFormatter(LINE))
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    logging.captureWarnings(True)
    sys.excepthook = _ended_by
    threading.excepthook = lambda ended: _ended_by(ended.exc_type, ended.exc_value, ended.exc_traceback)


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
        return json.dumps({**event, **values}, default=str)


def printable(text: str) -> str:
    """The text with line ends, control characters and the like escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
