"""Keeps the chunks of a prompt for a time, as long as others can be evicted."""
