"""The connector: what vLLM loads as `LMCacheMPConnector`. The only package here that imports vllm.

Importing the package imports nothing of vLLM's: its plugin runs in every vLLM process, whatever its version.
"""

import inspect
from typing import TYPE_CHECKING, Any

from lmcache_client.contract.version import INSTALL_VLLM, VERSION, VLLM_RANGE, too_old

if TYPE_CHECKING:
    from lmcache_client.connector.connector import LMCacheMPConnector

__all__ = ["LMCacheMPConnector"]


def __getattr__(name: str) -> Any:
    """The connector, when vLLM asks for it. Where it cannot be loaded, one that caches nothing and says why.
    Raises RuntimeError for a vLLM that is too old."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm import __version__

    if refusal := too_old(__version__):
        raise RuntimeError(refusal)
    try:
        from lmcache_client.connector.connector import LMCacheMPConnector

        if inspect.isabstract(LMCacheMPConnector):
            raise ImportError(f"vLLM asks for {', '.join(sorted(LMCacheMPConnector.__abstractmethods__))}")
    # An upgrade of vLLM must not become an outage, whatever it changed.
    except Exception as error:
        reason = (
            f"vLLM {__version__} and lmcache-mp {VERSION}, which do not load together ({error}): "
            f"install vLLM {VLLM_RANGE} ({INSTALL_VLLM}) or another lmcache-mp"
        )
        return _uncached(reason, error)
    return LMCacheMPConnector


def _uncached(reason: str, error: Exception) -> Any:
    try:
        from lmcache_client.connector.uncached import uncached
    except ImportError:
        raise RuntimeError(f"lmcache: {reason}") from error
    return uncached(reason)
