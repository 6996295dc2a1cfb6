"""Points vLLM's connector name LMCacheMPConnector at this package, in every process of an engine.

vLLM runs the entry points of `vllm.general_plugins` before it resolves a connector's name. This module only
imports vLLM's factory: the connector is loaded, and may refuse the version of vLLM, when its name is used.
"""

import logging

NAME = "LMCacheMPConnector"
MODULE = "lmcache_client.connector"


def register() -> None:
    """Replaces vLLM's entry of that name, which needs the LMCache package. Never raises, because this also
    runs in engines that do not use the connector."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        # vLLM has no public way to replace an entry, and register_connector refuses a name that exists.
        KVConnectorFactory._registry.pop(NAME, None)
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
    except Exception as error:
        logging.getLogger("vllm.lmcache_mp").warning(
            "lmcache: the connector of lmcache-mp could not be registered with vLLM (%s): to use it, set "
            '"kv_connector_module_path":"%s" in --kv-transfer-config',
            error,
            MODULE,
        )
