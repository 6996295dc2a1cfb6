"""An engine that is not cached: the connector does nothing at every hook, and says why, once.

It says so in vLLM's log and, as long as a server runs, to the server, whose status shows it. This file uses
as little of vLLM as a connector can: it is what is left when the rest does not load.
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

    from lmcache_client.channel import Channel
    from lmcache_client.connector.settings import Settings

TELL_TIMEOUT_S = 2.0


class Uncached(KVConnectorBase_V1, SupportsHMA):
    """Every hook that vLLM requires of a connector, doing nothing."""

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
        """A cache: a store that is dropped is a later miss, nothing else."""
        return False

    def start_load_kv(self, *_args: Any, **_named: Any) -> None:
        """Loads are asynchronous and start with the step's stores."""

    def wait_for_layer_load(self, *_args: Any, **_named: Any) -> None:
        """Loads are asynchronous: nothing to wait for."""

    def save_kv_layer(self, *_args: Any, **_named: Any) -> None:
        """Stores start after the whole forward pass: nothing to do per layer."""

    def wait_for_save(self) -> None:
        pass


def uncached(why: str) -> type[Uncached]:
    """A connector for vLLM to construct that caches nothing; `why` is a noun phrase for the log."""

    class LMCacheMPConnector(Uncached):
        reason = why

        def __init__(
            self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
        ) -> None:
            super().__init__(vllm_config, role, kv_cache_config)
            self._teller = None
            if role == KVConnectorRole.SCHEDULER:
                # The rest of this package may be what does not load.
                with contextlib.suppress(Exception):
                    from lmcache_client.connector.settings import parse

                    settings, _ = parse(vllm_config.kv_transfer_config.kv_connector_extra_config)
                    self._teller = tell_server(settings, vllm_config, why)
                log_uncached(why)

        def shutdown(self) -> None:
            if self._teller is not None:
                self._teller.close()

    # A method that a later vLLM requires and this class lacks: doing nothing is right for it, too.
    LMCacheMPConnector.__abstractmethods__ = frozenset()
    return LMCacheMPConnector


def log_uncached(reason: str) -> None:
    logging.getLogger("vllm.lmcache_mp").warning(
        "lmcache: this engine is not cached, because it has %s", reason
    )


def tell_server(settings: "Settings", vllm_config: "VllmConfig", reason: str) -> "Channel":
    """A channel that tells a server, whenever one is there, that this engine does not use it and why."""
    from lmcache_client.channel import Channel
    from lmcache_client.contract.messages import MAX_NAME, MAX_REASON, NotCached

    message = NotCached(
        str(vllm_config.kv_transfer_config.engine_id)[:MAX_NAME],
        str(vllm_config.model_config.model)[:MAX_NAME],
        VLLM_VERSION[:MAX_NAME],
        reason[:MAX_REASON],
    )
    channel = Channel(settings.address, lambda channel: channel.call(message, TELL_TIMEOUT_S))
    channel.start(0.0, 0.0)
    return channel
