"""Keeps the cache for the next server: L1 lies in a file, which has an index after a clean stop."""
