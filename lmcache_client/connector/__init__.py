"""The connector that vLLM loads as `LMCacheMPConnector`. No other package of this project imports vLLM.

Importing the package alone imports nothing from vLLM: its plugin runs in vLLM processes of every version.
"""

import inspect
from typing import TYPE_CHECKING, Any

from lmcache_client.contract.version import INSTALL_VLLM, VERSION, VLLM_RANGE, too_old

if TYPE_CHECKING:
    from lmcache_client.connector.connector import LMCacheMPConnector

__all__ = ["LMCacheMPConnector"]


def __getattr__(name: str) -> Any:
    """Loads the connector when vLLM asks for it, or one that caches nothing and says why if that fails.
    Raises RuntimeError if vLLM is too old."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm import __version__

    if refusal := too_old(__version__):
        raise RuntimeError(refusal)
    try:
        from lmcache_client.connector.connector import LMCacheMPConnector

        if inspect.isabstract(LMCacheMPConnector):
            raise ImportError(f"vLLM requires {', '.join(sorted(LMCacheMPConnector.__abstractmethods__))}")
    except Exception as error:  # an upgrade of vLLM must never become an outage
        reason = (
            f"vLLM {__version__} and lmcache-mp {VERSION}, which do not load together ({error}): "
            f"install vLLM {VLLM_RANGE} ({INSTALL_VLLM}) or another lmcache-mp"
        )
        try:
            from lmcache_client.connector.uncached import uncached
        except ImportError:
            raise RuntimeError(f"lmcache: {reason}") from error
        return uncached(reason)
    return LMCacheMPConnector
