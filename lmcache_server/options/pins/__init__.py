"""Keeps from eviction what users pin, and fills the cache with prompts."""
