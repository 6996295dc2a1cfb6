"""Stores behind L1 that keep objects by name. Each adapter is one file behind the protocol of base.py."""
