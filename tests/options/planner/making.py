"""A planner beside a cache, without the rest of a server."""

from typing import Any

from lmcache_server.config import Config
from lmcache_server.core.cache import Cache
from lmcache_server.options.planner.server import Server
from lmcache_server.service.option import Base
from lmcache_server.telemetry.metrics import Metrics


def new_planner(cache: Cache) -> Server:
    nothing: Any = None
    return Server(Base(Config(), cache, nothing, nothing, Metrics(), nothing, nothing))
