"""`lmcache bench`: measures a running server from the side of synthetic engines."""
