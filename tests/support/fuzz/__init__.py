"""Fuzzing of what comes in from clients: the decoder, and the router over a real cache and real copies."""
