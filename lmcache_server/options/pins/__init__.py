"""Keeps chunks that users name from eviction, and fills the cache with prompts."""
