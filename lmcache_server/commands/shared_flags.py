"""The flags that several commands share."""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click

from lmcache_server import config as configuration
from lmcache_server.config import Command

CONTROL_TIMEOUT_S = 10.0
TOKENIZE_TIMEOUT_S = 60.0
FILE: Any = click.Path(dir_okay=False, path_type=Path)

ADDRESS = {
    "host": "The TCP address of the server. Without it: the server's Unix socket.",
    "port": "The server's port; without --host, the number that names its Unix socket.",
    "key_file": "With --host: a file with the server's key, if it was started with --key-file.",
}


class Number(click.FloatRange):
    """Neither NaN nor infinity, which pass every range that has no upper end."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not math.isfinite(number := super().convert(value, param, ctx)):
            self.fail(f"{value} is not a number of seconds", param, ctx)
        return number


class Address(NamedTuple):
    """Where a command finds the server, as endpoint.address takes it."""

    host: str
    port: int
    key_file: str


def addressing(*more: str, **helps: str) -> Callable[[Command], Command]:
    """The flags of an Address, which the command gets as `server`, and these `more`, with their `helps`."""

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def called(host: str, port: int, key_file: str, **others: Any) -> Any:
            if key_file and not host:
                click.echo("lmcache: --key-file has no effect without --host", err=True)
            return command(server=Address(host, port, key_file), **others)

        return configuration.flags(*ADDRESS, *more, **ADDRESS, **helps)(called)

    return decorate


def asking(*more: str, default_s: float = CONTROL_TIMEOUT_S, **helps: str) -> Callable[[Command], Command]:
    """The flags of a command that asks a server and by default waits `default_s` seconds, and these `more`,
    with their `helps`."""
    timeout = seconds(Number(0.01, 3600), default_s, "Seconds to wait for an answer.")
    return lambda command: addressing(*more, **helps)(timeout(command))


def seconds(kind: Number, default: float, meaning: str) -> Callable[[Command], Command]:
    more: Any = {"default": default, "show_default": True, "metavar": "SECONDS"}
    return click.option("--timeout-s", type=kind, help=meaning, **more)


control_flags = asking()


def count(flag: str, default: int, meaning: str, most: int | None = 1024) -> Callable[[Command], Command]:
    return click.option(flag, type=click.IntRange(1, most), default=default, show_default=True, help=meaning)


def vllm_flags(command: Command) -> Command:
    """The options of a command that talks to vLLM."""
    for option in (
        seconds(Number(1), 600, "Seconds for one answer."),
        click.option("--api-key", envvar="VLLM_API_KEY", help="vLLM's --api-key.  [env: VLLM_API_KEY]"),
        click.option("--model", help="The model to ask, if vLLM serves several.  [default: the first]"),
    ):
        command = option(command)
    return command


def sending(command: Command) -> Command:
    """The arguments and options of a command that sends the prompts of a file through vLLM."""
    file = click.argument("prompts_file", metavar="FILE", type=FILE)
    return click.argument("url")(file(vllm_flags(addressing()(command))))
