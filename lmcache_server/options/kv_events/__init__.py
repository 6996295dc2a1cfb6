"""Tells engines which chunks they can no longer find, for routers: see docs/several-machines.md."""
