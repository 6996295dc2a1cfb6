"""What this option adds to the flags of `lmcache server`."""

from lmcache_server.core.named_limits import Limits, is_tenant, positive


def quotas_gb(text: str) -> Limits:
    """How much each tenant may hold: `4, 0b5d5f2cbd9c=16`. Raises ValueError."""
    quotas = Limits.parse(text, positive)
    if not all(map(is_tenant, quotas.named)):
        raise ValueError("a tenant is named by 8 or more hexadecimal digits")
    return quotas


FLAGS = {
    "quota_gb": {
        "parse": quotas_gb,
        "fit": "a number of GB such as 4, or 4,0b5d5f2cbd9c=16",
        "metavar": "GB",
        "help_text": "How much of the cache each cache_salt may take, in GB: 4, or 4,0b5d5f2cbd9c=16 with "
        "another number for one salt, named by the first digits (8 or more) that `lmcache status` shows. A "
        "salt at its quota loses its own chunks, the least recently used first. Chunks without a salt have "
        "no quota.",
    }
}
