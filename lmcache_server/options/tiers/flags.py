"""What the tiers add to the flags of `lmcache server`."""

from collections.abc import Mapping
from typing import Any

from lmcache_server.errors import StartError

MAX_TIERS = 2
FLAGS = {
    "tier": {
        "default": (),
        "metavar": "URL",
        "show_default": "none",
        "multiple": True,
        "help_text": "A store behind the memory, for what the memory cannot hold and for other servers to "
        "use: dir:///nvme/lmcache?size_gb=500, valkey://host:6379, s3://bucket/prefix?endpoint=…; "
        "docs/tiers.md lists all settings. Give the flag twice for two tiers, in the order in which they are "
        "asked; in the environment, separate them by a space.",
    }
}
OF_DOCTOR = ("tier",)
VARIABLES = ("LMCACHE_VALKEY_USERNAME", "LMCACHE_VALKEY_PASSWORD")


def check(values: Mapping[str, Any]) -> None:
    """Raises StartError if the values of the flags contradict each other."""
    from lmcache_server.options.tiers import urls

    if len(values["tier"]) > MAX_TIERS:
        raise StartError(f"--tier can be given {MAX_TIERS} times at most")
    for tier in values["tier"]:
        urls.parse(tier)
    if values["tier"] and values.get("max_age"):
        raise StartError(
            "--max-age and --tier cannot be combined: leave one out, because a tier brings old chunks back"
        )


def shares_l1(values: Mapping[str, Any]) -> bool:
    """Whether another process must map L1."""
    from lmcache_server.options.tiers import urls

    return any(urls.parse(text).shares_l1 for text in values["tier"])
