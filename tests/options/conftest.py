"""What the tests of this folder share."""

from desk import desk

__all__ = ["desk"]
