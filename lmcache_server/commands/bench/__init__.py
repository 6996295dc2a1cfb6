"""`lmcache bench`: what a running server does for a synthetic engine, measured from the engine's side."""
