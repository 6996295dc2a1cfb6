"""What `lmcache status` says of tenants."""

from typing import Any

from lmcache_client.contract.codec import Natural
from lmcache_server.commands.control import json_object
from lmcache_server.commands.status import count
from lmcache_server.host.units import size

_TENANT = json_object("tenant", "bytes", quota_bytes=Natural | None)
REPORT = {"tenants": list[_TENANT], "tenants_left_out": Natural}  # type: ignore[valid-type]


def lines(report: dict[str, Any]) -> list[str]:
    said = [f"tenants: {count(report, 'tenants')}"] if report["tenants"] else []
    for tenant in report["tenants"]:
        quota = f" of {size(tenant['quota_bytes'])}" if tenant["quota_bytes"] is not None else ""
        said.append(f"  {tenant['tenant'][:12]}  {size(tenant['bytes'])}{quota}")
    return said
