"""Repeats in vLLM's log that an engine runs without a server."""

from lmcache_client.connector.log import logger
from lmcache_client.server_channel import Channel

REMIND_S = 600.0


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
