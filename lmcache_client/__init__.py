"""The part of lmcache-mp that a vLLM process imports."""
