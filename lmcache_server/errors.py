"""The errors that end the server's start or a command."""


class StartError(Exception):
    """The server cannot start; the message says what to change."""


class CommandError(Exception):
    """A command cannot do its work; the message is one sentence that says why."""
