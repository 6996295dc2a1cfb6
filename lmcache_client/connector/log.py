"""The logger of the connector. It is a child of vLLM's logger, so its lines appear where vLLM's do."""

from vllm.logger import init_logger

logger = init_logger("vllm.lmcache_mp")


def log_state(level: int, text: str) -> None:
    """Logs a change of the connection to the server."""
    logger.log(level, "lmcache: %s", text, stacklevel=2)


def trace(request_id: str, text: str, *values: object) -> None:
    """Logs an event of a request, shown with VLLM_LOGGING_LEVEL=DEBUG."""
    logger.debug("lmcache: request %s: " + text, request_id, *values, stacklevel=2)
