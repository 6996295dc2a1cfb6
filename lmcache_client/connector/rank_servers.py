"""Which server each rank of an engine uses."""

import re
from typing import NamedTuple

from lmcache_client.connector.settings import Settings
from lmcache_client.contract.endpoint import address

SERVERS_KEY = "lmcache.mp.servers in kv_connector_extra_config"
SERVERS_EXAMPLE = '{"0-3": "10.0.0.1:5555", "4-7": "10.0.0.2:5555"}'


class RankServer(NamedTuple):
    """A server, and the ranks whose workers use it."""

    ranks: range
    address: str

    def details(self, world_size: int) -> tuple[tuple[str, str], ...]:
        """What a worker adds to its ModelTag: nothing if the server has all ranks."""
        if len(self.ranks) == world_size:
            return ()
        return (("ranks", f"{self.ranks.start}-{self.ranks.stop - 1}"),)


def rank_servers(settings: Settings, world_size: int) -> tuple[RankServer, ...]:
    """Those of an engine with so many ranks, in their order. Raises ValueError that says what to change."""
    if not settings.servers:
        return (RankServer(range(world_size), settings.address),)
    given = (_rank_server(ranks, where, settings.key_file) for ranks, where in settings.servers.items())
    found = sorted(given, key=lambda each: each.ranks.start)
    ends = [0, *(each.ranks.stop for each in found)]
    for each, end in zip(found, ends, strict=False):
        if each.ranks.start != end:
            wrong = "two servers for" if each.ranks.start < end else "no server for"
            rank = min(each.ranks.start, end)
            raise ValueError(
                f"{SERVERS_KEY} has {wrong} rank {rank}: give each of ranks 0 to {world_size - 1} one"
            )
    if ends[-1] != world_size:
        raise ValueError(
            f"{SERVERS_KEY} ends at rank {ends[-1] - 1}, but this engine has ranks 0 to {world_size - 1}"
        )
    if len({each.address for each in found}) < len(found):
        raise ValueError(f"{SERVERS_KEY} names one server twice: give it all its ranks in one range")
    return tuple(found)


def _rank_server(ranks: str, where: str, key_file: str) -> RankServer:
    numbers = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", ranks)
    host_port = re.fullmatch(r"(?:(.+):)?(\d+)", where)
    first = int(numbers[1]) if numbers else 0
    last = int(numbers[2] or first) if numbers else -1
    if numbers is None or last < first:
        raise ValueError(f"{SERVERS_KEY}: {ranks!r} is no range of ranks; an example is {SERVERS_EXAMPLE}")
    if host_port is None or not 0 < int(host_port[2]) < 1 << 16:
        raise ValueError(f"{SERVERS_KEY}: {where!r} is not HOST:PORT; an example is {SERVERS_EXAMPLE}")
    return RankServer(range(first, last + 1), address(host_port[1] or "", int(host_port[2]), key_file))
