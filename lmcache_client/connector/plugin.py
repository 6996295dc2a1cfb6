"""Points vLLM's connector name LMCacheMPConnector at this package, in every process of an engine.

vLLM runs the entry points of `vllm.general_plugins` before it resolves a connector's name. Nothing is
imported here beyond vLLM's own factory: the connector is loaded, and refuses a vLLM that it does not work
with, when its name is used.
"""

import logging

NAME = "LMCacheMPConnector"
MODULE = "lmcache_client.connector"


def register() -> None:
    """Take over the name; vLLM ships an entry of that name which needs LMCache's own package. Never raises:
    this runs in engines that do not use the connector, too."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        # There is no public way to replace an entry, and register_connector refuses a name that is taken.
        KVConnectorFactory._registry.pop(NAME, None)
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
    except Exception as error:
        logging.getLogger("vllm.lmcache_mp").warning(
            "lmcache: this vLLM knows no connector of lmcache-mp by its name (%s): give it "
            '"kv_connector_module_path":"%s" to use it',
            error,
            MODULE,
        )
