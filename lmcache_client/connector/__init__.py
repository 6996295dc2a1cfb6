"""The connector: what vLLM loads as `LMCacheMPConnector`. The only package here that imports vllm.

Importing the package imports nothing of vLLM's: its plugin runs in every vLLM process, whatever its version.
"""

from typing import TYPE_CHECKING, Any

from lmcache_client.contract.version import vllm_refusal

if TYPE_CHECKING:
    from lmcache_client.connector.connector import LMCacheMPConnector

__all__ = ["LMCacheMPConnector"]


def __getattr__(name: str) -> Any:
    """The connector, for who asks for it. Raises RuntimeError for a vLLM that it does not work with."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm import __version__

    if refusal := vllm_refusal(__version__):
        raise RuntimeError(refusal)
    from lmcache_client.connector.connector import LMCacheMPConnector

    return LMCacheMPConnector
