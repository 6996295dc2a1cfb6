"""The logger of the connector. It is a child of vLLM's logger, so its lines appear where vLLM's do."""

from vllm.logger import init_logger

from lmcache_client.server_channel import Channel

logger = init_logger("vllm.lmcache_mp")
REMIND_S = 600.0


def log_state(level: int, text: str) -> None:
    """Logs a change of the connection to the server."""
    logger.log(level, "lmcache: %s", text, stacklevel=2)


def trace(request_id: str, text: str, *values: object) -> None:
    """Logs an event of a request, shown with VLLM_LOGGING_LEVEL=DEBUG."""
    logger.debug("lmcache: request %s: " + text, request_id, *values, stacklevel=2)


class Absence:
    """The time that an engine has been without a server. The log has one line for every REMIND_S of it."""

    _since_s: float | None = None
    _lines = 0

    def check(self, channel: Channel) -> None:
        now_s = channel.system.now_s()
        if channel.ready or self._since_s is None:
            self._since_s, self._lines = now_s, 0
            return
        absent_s = now_s - self._since_s
        if absent_s < REMIND_S * (self._lines + 1):
            return
        self._lines = int(absent_s // REMIND_S)
        advice = (
            "check that `lmcache server` runs there, and that lmcache.mp.host, lmcache.mp.port and "
            "LMCACHE_RUNTIME_DIR of this engine match the server's --host, --port and LMCACHE_RUNTIME_DIR"
        )
        logger.warning(
            "lmcache: for %d minutes the server at %s has not served this engine, so nothing is cached: %s",
            absent_s // 60,
            channel.address,
            channel.refusal or advice,
        )
