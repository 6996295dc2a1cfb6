"""Tells engines which chunks they can no longer find, so that they can tell routers: see docs/several-machines.md."""
