"""The first tier: the host memory that holds the cache."""
