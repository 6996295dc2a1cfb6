"""Forgets chunks when they are old, however much they are used."""
