"""One request of a client: what it was, how it is refused, how it is logged."""

import logging
from typing import Any

from lmcache_client.contract.messages import Message
from lmcache_server.service.sessions import Session

MAX_TEXT = 300
"""Characters of a value in a line of the log."""

logger = logging.getLogger("lmcache_server.service.router")


class Refusal(Exception):
    """A request that is answered with Refused; `code` is one of the constants of the messages."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def log_request(
    level: int,
    text: str,
    session: Session | None,
    message: Message,
    values: dict[str, Any],
    *,
    trace: bool = False,
) -> None:
    """A line about one message, with `values`, the session it came from and the requests it names."""
    if not logger.isEnabledFor(level):
        return
    fields: dict[str, Any] = {}
    for name in ("request_id", "request_ids"):
        if hasattr(message, name):
            fields[name] = getattr(message, name)
    if session is not None:
        fields |= {"session": session.session_id, "pid": session.pid}
        fields |= {"engine": session.engine_id, "model": session.model}
    # Names and reasons may hold as many characters as a client likes.
    cut = {
        name: value[:MAX_TEXT] if isinstance(value, str) else value
        for name, value in (fields | values).items()
    }
    logger.log(level, text, cut, exc_info=trace)
