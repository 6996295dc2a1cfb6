"""What the tiers add to the flags of `lmcache server`."""

import os
from collections.abc import Mapping
from typing import Any

from lmcache_server.errors import StartError
from lmcache_server.options.tiers.base import CREDENTIALS

MAX_TIERS = 2
FLAGS = {
    "tier": {
        "default": (),
        "metavar": "URL",
        "multiple": True,
        "help_text": "A store behind the memory, for what the memory cannot hold and for other servers to "
        "use: dir:///nvme/lmcache?size_gb=500, valkey://host:6379, s3://bucket/prefix?endpoint=…; "
        "docs/tiers.md lists all settings. Give the flag twice for two tiers, in the order in which they are "
        "asked; in the environment, separate them by a space.",
    }
}
OF_DOCTOR, VARIABLES = ("tier",), CREDENTIALS["valkey"]


def check(values: Mapping[str, Any]) -> None:
    """Raises StartError if the values of the flags contradict each other."""
    from lmcache_server.options.tiers import urls

    if len(values["tier"]) > MAX_TIERS:
        raise StartError(f"--tier can be given {MAX_TIERS} times at most")
    places = [(url.scheme, os.path.normpath(url.place)) for url in map(urls.parse, values["tier"])]
    if len({*places}) < len(places):
        raise StartError(f"--tier names {places[0][1]} twice: leave one out")
    if values["tier"] and values.get("max_age"):
        raise StartError(
            "--max-age and --tier cannot be combined: leave one out, because a tier brings old chunks back"
        )


def shares_l1(values: Mapping[str, Any]) -> bool:
    """Whether another process must map L1."""
    from lmcache_server.options.tiers import urls

    return any(urls.parse(text).shares_l1 for text in values["tier"])
