"""The errors that end the server's start or a command."""


class StartError(Exception):
    """The server cannot start; the message says what to change. `exit_code` is that of the command."""

    exit_code = 2


class NotNowError(StartError):
    """The reason may pass by itself, such as a lack of memory: a supervisor should start the server again."""

    exit_code = 1


class CommandError(Exception):
    """A command cannot do its work; the message is one sentence that says why."""
