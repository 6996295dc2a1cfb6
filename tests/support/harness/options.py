"""What `lmcache server` makes of flags, environment and file."""

import os
from collections.abc import Mapping
from unittest import mock

from lmcache_server import config
from lmcache_server.commands.cli import cli


def load(*arguments: str, environment: Mapping[str, str] | None = None) -> config.Config:
    """The configuration; what is not in `environment` is not in the environment. Raises StartError."""
    others = {name: text for name, text in os.environ.items() if not name.startswith("LMCACHE_")}
    with mock.patch.dict(os.environ, {**others, **(environment or {})}, clear=True):
        context = cli.commands["server"].make_context("server", list(arguments))
    return config.checked(context.params)
