"""What `lmcache status` says of tiers."""

from typing import Any

from lmcache_client.contract.codec import Natural
from lmcache_server.commands.control import json_object
from lmcache_server.commands.status import duration
from lmcache_server.host.units import size
from lmcache_server.options.tiers.base import Usage

LOST = {
    "read_objects": {"gone": "gone", "damaged": "damaged", "failed": "not read"},
    "written_objects": {"full": "without room", "evicted": "evicted first", "dropped": "dropped",
                        "failed": "not written"},
}  # fmt: skip
"""What happened to objects of a tier that were not read or written."""
_TIER = json_object(
    "url failing", "read_bytes written_bytes stored_bytes waiting_objects",
    **dict.fromkeys(Usage._fields, Natural | None),
    read_objects=json_object("", "read gone damaged failed"),
    written_objects=json_object("", "written full evicted dropped failed"),
)  # fmt: skip
_CONFIG = json_object("", "", tier=list[str])
REPORT = {"tiers": list[_TIER], "tier_hit_tokens": Natural, "config": _CONFIG}  # type: ignore[valid-type]


def lines(report: dict[str, Any]) -> list[str]:
    hits = f"tiers: {report['tier_hit_tokens']:,} of the hit tokens were fetched while requests waited"
    return [hits, *map(_line, report["tiers"])] if report["tiers"] else []


def _line(tier: dict[str, Any]) -> str:
    read, written = tier["read_objects"], tier["written_objects"]
    state = f"FAILING: {tier['failing']}" if tier["failing"] else "works"
    lost = [f"{tier[way][key]} {text}" for way in LOST for key, text in LOST[way].items() if tier[way][key]]
    holds = ""
    if tier["used_bytes"] is not None:
        age = f", the oldest use {duration(tier['oldest_age_seconds'])} ago" if tier["records"] else ""
        holds = f"holds {size(tier['used_bytes'])} of {size(tier['capacity_bytes'])} in {tier['records']} "
        holds += f"records{age}, {tier['evicted_records']} evicted; "
    share = tier["stored_bytes"] / max(tier["written_bytes"], 1)
    smaller = f" as {size(tier['stored_bytes'])} ({share:.2f})" if 0 < share < 1 else ""
    return (
        f"tier {tier['url']}: {state}; {holds}read {read['read']} objects, {size(tier['read_bytes'])}; "
        f"wrote {written['written']}, {size(tier['written_bytes'])}{smaller}; {tier['waiting_objects']} wait"
        f"{'; ' if lost else ''}{', '.join(lost)}"
    )
