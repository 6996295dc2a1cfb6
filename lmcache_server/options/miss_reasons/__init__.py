"""Tells why lookups did not find more."""
