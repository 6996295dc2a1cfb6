"""The part of lmcache-mp that a vLLM process imports."""

__version__ = "0.1.0"
