"""`lmcache verify`: is what a running vLLM serves from the cache what it would have computed?"""
