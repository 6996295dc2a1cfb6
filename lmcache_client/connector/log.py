"""The logger of the connector: a child of vLLM's, so that its lines show where vLLM's do."""

from vllm.logger import init_logger

logger = init_logger("vllm.lmcache_mp")


def log_state(ready: bool, sentence: str) -> None:
    """A change of the connection to the server."""
    (logger.info if ready else logger.warning)("lmcache: %s", sentence)


def trace(request_id: str, sentence: str, *values: object) -> None:
    """What becomes of a request, for who follows one at VLLM_LOGGING_LEVEL=DEBUG."""
    logger.debug("lmcache: request %s: " + sentence, request_id, *values, stacklevel=2)
