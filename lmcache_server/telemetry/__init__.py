"""Counters, recent failures and history, filled where things happen."""
