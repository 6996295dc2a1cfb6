"""Decisions about what is cached: no I/O, no clock, no threads. Time is given, decisions are returned."""
