"""What ends the server's start."""


class StartError(Exception):
    """The server cannot start; the message says what to change."""
