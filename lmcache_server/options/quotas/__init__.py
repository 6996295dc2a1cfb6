"""Bounds what the requests of each salt take of L1."""
