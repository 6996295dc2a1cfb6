"""What a deployment says to `lmcache server` must exist."""

from collections.abc import Iterable, Mapping

from lmcache_server import config
from lmcache_server.commands.cli import cli
from lmcache_server.tiers import urls

NO_OPTIONS = {"LMCACHE_RUNTIME_DIR", config.CONFIG_VARIABLE, urls.USERNAME_VARIABLE, urls.PASSWORD_VARIABLE}
"""Variables of ours that are no option of the server."""


def assert_server_options_exist(arguments: Iterable[str], environment: Mapping[str, str]) -> None:
    """Flags, as `--name=value`, and variables."""
    known = {flag for each in cli.commands["server"].params for flag in (*each.opts, *each.secondary_opts)}
    assert {each.partition("=")[0] for each in arguments if each.startswith("-")} <= known
    variables = {name for name in environment if name.startswith(config.ENVIRONMENT_PREFIX)}
    assert variables - NO_OPTIONS <= {config.variable_name(name) for name in config.OPTIONS}
