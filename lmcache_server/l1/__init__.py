"""L1, the first tier: the host memory that holds the cache."""
