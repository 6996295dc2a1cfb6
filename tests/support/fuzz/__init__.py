"""Fuzzing of everything that others can write: messages, replies, HTTP, L1's file, the configuration."""
