"""`lmcache verify`: compares a running vLLM's answers from the cache with its computed ones."""
