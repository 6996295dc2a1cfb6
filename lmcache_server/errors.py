"""What ends the server's start, and what ends a command."""


class StartError(Exception):
    """The server cannot start; the message says what to change."""


class CommandError(Exception):
    """A command cannot do what it was asked for; the message is one sentence that says why."""
