"""The connector of an engine that is not cached: it does nothing at every hook and reports the reason.

The reason goes to vLLM's log, once, and to the server, whose status shows it. This file uses as little of
vLLM as a connector can, because it must load even if the rest of the package does not.
"""

import contextlib
import logging
from typing import TYPE_CHECKING, Any

from vllm import __version__ as VLLM_VERSION
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from lmcache_client.server_channel import Channel

TELL_TIMEOUT_S = 2.0


class Uncached(KVConnectorBase_V1, SupportsHMA):
    """Has every hook that vLLM requires of a connector; none of them does anything."""

    _teller: "Channel | None" = None

    def get_num_new_matched_tokens(self, *_args: Any, **_named: Any) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, *_args: Any, **_named: Any) -> None:
        pass

    def build_connector_meta(self, *_args: Any, **_named: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, *_args: Any, **_named: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # in a cache, a dropped store only causes a later miss

    def start_load_kv(self, *_args: Any, **_named: Any) -> None:
        """Does nothing, because loads are asynchronous and start when the metadata is bound."""

    def wait_for_layer_load(self, *_args: Any, **_named: Any) -> None:
        """Does nothing, because loads are asynchronous."""

    def save_kv_layer(self, *_args: Any, **_named: Any) -> None:
        """Does nothing, because stores start after the whole forward pass."""

    def wait_for_save(self) -> None:
        pass

    def shutdown(self) -> None:
        if self._teller is not None:
            self._teller.close()


def uncached(why: str) -> type[Uncached]:
    """The class of a connector that caches nothing; `why` is a noun phrase for the log."""

    class LMCacheMPConnector(Uncached):
        reason = why

        def __init__(
            self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
        ) -> None:
            super().__init__(vllm_config, role, kv_cache_config)
            if role == KVConnectorRole.SCHEDULER:
                with contextlib.suppress(Exception):  # the rest of this package may not load
                    self._teller = tell_server(vllm_config, why)
                log_uncached(why)

    # If a later vLLM requires a method that this class lacks, the inherited one may do nothing, too.
    LMCacheMPConnector.__abstractmethods__ = frozenset()
    return LMCacheMPConnector


def log_uncached(reason: str) -> None:
    logging.getLogger("vllm.lmcache_mp").warning(
        "lmcache: this engine is not cached, because it has %s", reason
    )


def tell_server(vllm_config: "VllmConfig", reason: str) -> "Channel":
    """Starts a channel that reports to every server it meets why this engine does not use the cache."""
    from lmcache_client.connector.settings import parse
    from lmcache_client.contract.messages import MAX_NAME, MAX_REASON, NotCached
    from lmcache_client.server_channel import Channel

    settings, _ = parse(vllm_config.kv_transfer_config.kv_connector_extra_config)
    message = NotCached(
        str(vllm_config.kv_transfer_config.engine_id)[:MAX_NAME],
        str(vllm_config.model_config.model)[:MAX_NAME],
        VLLM_VERSION[:MAX_NAME],
        reason[:MAX_REASON],
    )
    channel = Channel(settings.address, lambda channel: channel.call(message, TELL_TIMEOUT_S))
    channel.start(0.0, 0.0)
    return channel
