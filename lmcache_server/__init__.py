"""The lmcache server: one process that owns a machine's L1 and copies KV pages in and out of it."""
