"""How a command ends: with an exit code and, if something is wrong, one line that says what to do."""

import os
import re
import shlex
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from lmcache_client.contract import lmcache_names
from lmcache_server.config import FLAGS, flag_name, variable_name
from lmcache_server.host import logs
from lmcache_server.host.logs import printable

BESIDE_LMCACHE = (
    "LMCache is in this Python environment, too, and its command has the same name: use 'lmcache-mp', or run "
    "'pip uninstall lmcache' and then install lmcache-mp again"
)
EXIT_FAILED = 1
EXIT_USAGE = 2


def advice(error: click.UsageError, arguments: Sequence[str]) -> Sequence[str]:
    """What a user of LMCache should do instead, in lines; empty if the error has another cause."""
    words = [each for each in arguments if not each.startswith("-")]
    if isinstance(error, click.NoSuchOption) and words[:1] == ["server"]:
        return _of_all_flags(arguments)
    names = (" ".join(words[:2]), *words[:1])
    return [told for told in (lmcache_names.advice("commands", name) for name in names) if told][:1]


def _of_all_flags(arguments: Sequence[str]) -> Sequence[str]:
    """A line for each flag that the server does not have, and its command without them; empty if none is of
    LMCache."""
    known, is_kept = {*map(flag_name, FLAGS), "--config"}, True
    lines, kept, is_of_lmcache = [], ["lmcache"], False
    for word in arguments:
        if word.startswith("--"):
            name = re.sub("^--no-", "--", word.partition("=")[0])
            is_kept = name in known
            if not is_kept:
                told = lmcache_names.advice("flags", name)
                is_of_lmcache |= bool(told)
                lines.append(told or f"there is no flag {name}")
        kept += [word] if is_kept else []
    return [*lines, f"without them: {shlex.join(kept)}"] if is_of_lmcache else []


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


def end(code: int, *lines: str, in_json: bool = False) -> NoReturn:
    if in_json:
        logs.set_up("info", logs.JSON)
        logs.logger.critical("%(reason)s", {"reason": "; ".join(lines)})
        logs.flush()
    for line in () if in_json else lines:
        click.echo(f"lmcache: {printable(line)}", err=True)
    sys.exit(code)


def logs_json(arguments: Sequence[str]) -> bool:
    """Whether these are the arguments of a server that shall log in JSON."""
    words = " ".join(arguments).replace("=", " ").lower()
    variable = os.environ.get(variable_name("log_format"), "").lower()
    wanted = re.search(r"--log-format (\w+)", words)
    return [*arguments[:1]] == ["server"] and (wanted[1] if wanted else variable) == logs.JSON
