"""What a deployment says to `lmcache server` must exist, and vLLM must take what it is given."""

import json
from collections.abc import Iterable, Mapping

from lmcache_client.connector import settings
from lmcache_server import config
from lmcache_server.commands.cli import cli
from lmcache_server.options.tiers.base import CREDENTIALS

NO_FLAGS = {"LMCACHE_RUNTIME_DIR", config.CONFIG_VARIABLE, *CREDENTIALS["valkey"]}
"""Variables of ours that are no option of the server."""


def assert_server_options_exist(arguments: Iterable[str], environment: Mapping[str, str]) -> None:
    """Flags, as `--name=value`, and variables."""
    known = {flag for each in cli.commands["server"].params for flag in (*each.opts, *each.secondary_opts)}
    assert {each.partition("=")[0] for each in arguments if each.startswith("-")} <= known
    variables = {name for name in environment if name.startswith(config.ENVIRONMENT_PREFIX)}
    assert variables - NO_FLAGS <= {config.variable_name(name) for name in config.FLAGS}


def vllm_flags(arguments: Iterable[str]) -> tuple[dict[str, str], settings.Settings, str]:
    """The options of an engine that uses our connector, what the connector makes of its part, and where the
    engine publishes KV events, if it does."""
    from vllm.config import KVTransferConfig
    from vllm.config.kv_events import KVEventsConfig

    split = (each.partition("=") for each in arguments)
    given = {name: value for name, _, value in split if name.startswith("--")}
    transfer = KVTransferConfig(**json.loads(given["--kv-transfer-config"]))
    assert (transfer.kv_connector, transfer.kv_role) == ("LMCacheMPConnector", "kv_both")
    parsed, ignored = settings.parse(transfer.kv_connector_extra_config)
    assert not ignored
    if "--kv-events-config" not in given:
        return given, parsed, ""
    events = KVEventsConfig(**json.loads(given["--kv-events-config"]))
    assert (events.enable_kv_cache_events, events.publisher) == (True, "zmq")
    return given, parsed, events.endpoint
