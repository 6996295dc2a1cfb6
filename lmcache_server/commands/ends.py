"""How a command ends: with an exit code and, if something is wrong, one line that says what to do."""

import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from lmcache_client.contract import migration
from lmcache_server.config import variable_name
from lmcache_server.host import logs
from lmcache_server.host.logs import printable

BESIDE_LMCACHE = (
    "LMCache is in this Python environment, too, and its command has the same name: use 'lmcache-mp', or run "
    "'pip uninstall lmcache' and then install lmcache-mp again"
)
EXIT_FAILED = 1
EXIT_USAGE = 2


def advice(error: click.UsageError, arguments: Sequence[str]) -> str:
    """What a user of LMCache should do instead; empty if the error has another cause."""
    words = [each for each in arguments if not each.startswith("-")]
    if isinstance(error, click.NoSuchOption) and words[:1] == ["server"]:
        return migration.advice("flags", re.sub("^--no-", "--", error.option_name))
    return migration.advice("commands", " ".join(words[:2])) or migration.advice(
        "commands", words[0] if words else ""
    )


def warn_of_lmcache() -> None:
    """Says so if this Python environment also has LMCache. Only looks for its directory."""
    if any(os.path.exists(f"{place}/lmcache/__init__.py") for place in sys.path if place):
        click.echo(f"lmcache: {BESIDE_LMCACHE}", err=True)


def open_standard_files() -> None:
    """If they were closed, a server's lock file would get such a number, and then what is printed."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
        if number:
            setattr(sys, ("stdout", "stderr")[number - 1], os.fdopen(number, "w", closefd=False))
    os.close(number)


def end(code: int, reason: str, in_json: bool = False) -> NoReturn:
    if in_json:
        logs.set_up("info", logs.JSON)
        logs.logger.critical("%(reason)s", {"reason": reason})
        logs.flush()
    else:
        click.echo(f"lmcache: {printable(reason)}", err=True)
    sys.exit(code)


def logs_json(arguments: Sequence[str]) -> bool:
    """Whether these are the arguments of a server that shall log in JSON."""
    words = " ".join(arguments).replace("=", " ").lower()
    variable = os.environ.get(variable_name("log_format"), "").lower()
    wanted = re.search(r"--log-format (\w+)", words)
    return words.startswith("server ") and (wanted[1] if wanted else variable) == logs.JSON
