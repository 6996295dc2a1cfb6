"""How a client's request is refused and logged."""

import logging
from typing import Any

from lmcache_client.contract.messages import Message
from lmcache_server.service.engines import Session

MAX_TEXT = 300
"""Characters of a value in a line of the log."""

logger = logging.getLogger("lmcache_server.service.router")


class Refusal(Exception):
    """The request is answered with Refused; `code` is one of the constants in `messages`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def log_request(
    level: int, text: str, session: Session | None, message: Message, values: dict[str, Any]
) -> None:
    """Logs a line about one message, with `values`, its session and the requests that it names. An error gets
    the traceback of the exception that is being handled."""
    if not logger.isEnabledFor(level):
        return
    names = ("request_id", "request_ids")
    fields: dict[str, Any] = {name: getattr(message, name) for name in names if hasattr(message, name)}
    if session is not None:
        fields |= {"session": session.session_id, "pid": session.pid}
        fields |= {"engine": session.engine_id, "model": session.model}
    # Names and reasons may hold as many characters as a client likes.
    cut = {
        name: value[:MAX_TEXT] if isinstance(value, str) else value
        for name, value in (fields | values).items()
    }
    logger.log(level, text, cut, exc_info=level == logging.ERROR)
