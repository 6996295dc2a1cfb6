"""Decides what is cached. No I/O, no clock, no threads: time comes in as an argument, decisions go out."""
