"""The log on stderr: a line for each event, as text or as a JSON object.

An event's values come as one mapping, `logger.info("session %(session)d ended", {"session": 7})`: the text
takes from it what it names, the JSON object has all of it as fields.
"""

import json
import logging
import sys
import threading
from collections.abc import Mapping
from datetime import datetime, timezone
from types import TracebackType

TEXT, JSON = FORMATS = ("text", "json")

logger = logging.getLogger("lmcache_server")


def set_up(level: str, form: str) -> None:
    """Log everything of this process on stderr, from `level` on and in one of FORMATS."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == JSON else TextFormatter())
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    logging.captureWarnings(True)
    sys.excepthook = _ended_by
    threading.excepthook = lambda ended: _ended_by(ended.exc_type, ended.exc_value, ended.exc_traceback)


def _ended_by(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    if error is not None:
        name = threading.current_thread().name
        logger.critical("%(thread)s ended", {"thread": name}, exc_info=(kind, error, trace))


class TextFormatter(logging.Formatter):
    """One line an event. Only a traceback follows on lines of its own, which are indented: whatever a client
    named its model, no line begins that is not the server's."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))

    def formatException(self, ei: "logging._SysExcInfoType") -> str:
        lines = super().formatException(ei).splitlines()
        return "\n".join("    " + printable(line) for line in lines)


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message, the event's values, a traceback if there is one."""

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
        # ASCII alone: no character of a client's ends the line for whoever reads it.
        return json.dumps({**event, **values}, default=str)


def printable(text: str) -> str:
    """Line ends, control characters and the like as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
