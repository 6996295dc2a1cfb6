"""Where an engine's chains of keys start. Each reset of vLLM's cache moves the start."""

import hashlib
from collections.abc import Callable

from lmcache_client.connector.log import logger
from lmcache_client.connector.vllm_surface import caller
from lmcache_client.contract.keys import KEY_BYTES, ROOT_KEY


class Root:
    """The `key` before the first key of each chain.

    After a reset nobody knows which weights the engine has, so the key is random. If the user names weights
    (`is_named`), and vLLM gets a new weight version before it computes anything, the key is made from that.
    """

    def __init__(self, is_named: bool, random_bytes: Callable[[int], bytes]) -> None:
        self.key = ROOT_KEY
        self._is_named, self._random_bytes = is_named, random_bytes
        self._version = "default"  # vLLM's name for the weights that it loads at its start
        self._may_be_named = False

    def reset(self) -> None:
        self.key = self._random_bytes(KEY_BYTES)
        self._may_be_named = self._is_named

    def name(self, changed: Callable[[], None]) -> None:
        """Called, often, before a step computes anything. Calls `changed` if the key has changed."""
        if not self._may_be_named:
            return
        self._may_be_named = False
        # vLLM's EngineCore knows the version, but tells no connector; it is empty if this vLLM has none.
        core = caller("get_weight_version")
        version = str(core.get_weight_version()) if core is not None else ""
        # The old version proves nothing: the weights may have changed since.
        if version not in ("", self._version):
            self._version = version
            self.key = hashlib.sha256(f"weights {version}".encode()).digest()[:KEY_BYTES]
            logger.info("lmcache: pages are shared by weights_name and the weight version %s", version)
            changed()
