"""The connector: what vLLM loads as `LMCacheMPConnector`. The only package here that imports vllm."""

from lmcache_client.connector.connector import LMCacheMPConnector

__all__ = ["LMCacheMPConnector"]
