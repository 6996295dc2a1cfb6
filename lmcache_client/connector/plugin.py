"""Points vLLM's connector name LMCacheMPConnector at this package, in every process of an engine.

vLLM runs the entry points of `vllm.general_plugins` before it resolves a connector's name. This module only
imports vLLM's factory: the connector is loaded, and may refuse the version of vLLM, when its name is used.
"""

import functools
import logging
import os
from typing import Any

NAME = "LMCacheMPConnector"
MODULE = "lmcache_client.connector"
SWITCH = "LMCACHE_MP_PLUGIN"


def register() -> None:
    """Replaces vLLM's entry of that name, which needs the LMCache package, unless SWITCH is 0. Never raises,
    because this also runs in engines that do not use the connector."""
    if os.environ.get(SWITCH) == "0":
        return
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        # vLLM has no public way to replace an entry, and register_connector refuses a name that exists.
        KVConnectorFactory._registry.pop(NAME, None)
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
        _check_keys_early(KVConnectorFactory)
    except Exception as error:
        logging.getLogger("vllm.lmcache_mp").warning(
            "lmcache: the connector of lmcache-mp could not be registered with vLLM (%s): to use it, set "
            '"kv_connector_module_path":"%s" in --kv-transfer-config',
            error,
            MODULE,
        )


def _check_keys_early(factory: Any) -> None:
    """Lets vLLM refuse wrong keys while it builds its configuration, before it loads any weights. vLLM passes
    the keys to no method of a connector by then, but it does ask its factory for the connector's class."""
    find = factory.get_connector_class
    if hasattr(find, "__wrapped__"):
        return

    @functools.wraps(find)
    def get_connector_class(kv_transfer_config: Any) -> Any:
        asked = (kv_transfer_config.kv_connector, kv_transfer_config.kv_connector_module_path)
        if asked in ((NAME, None), (NAME, MODULE)):
            from lmcache_client.connector.settings import parse

            try:
                parse(kv_transfer_config.kv_connector_extra_config)
            except ValueError as error:
                # vLLM would print a ValueError in the middle of its whole configuration.
                raise RuntimeError(f"lmcache: {error}") from None
        return find(kv_transfer_config)

    factory.get_connector_class = staticmethod(get_connector_class)
