"""Handles the messages of the clients."""
