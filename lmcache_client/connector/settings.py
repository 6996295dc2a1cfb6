"""The `lmcache.mp.*` keys of vLLM's kv_connector_extra_config, and which server each rank uses by them."""

import difflib
import re
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from lmcache_client.contract.endpoint import address
from lmcache_client.contract.lmcache_names import NO_EFFECT, advice, row
from lmcache_client.contract.messages import DEFAULT_PORT

PREFIX = "lmcache.mp."
SERVERS_KEY = "lmcache.mp.servers in kv_connector_extra_config"
SERVERS_EXAMPLE = '{"0-3": "10.0.0.1:5555", "4-7": "10.0.0.2:5555"}'


class Settings(msgspec.Struct, frozen=True):
    """An empty `host` means the Unix socket of `port`. After `lookup_timeout_s` a lookup counts as a miss;
    after `load_timeout_s` the engine recomputes the tokens of a load. After `wait_timeout_s`, a request takes
    what another engine has stored of its prompt. `store_everything` also stores windows and states that no
    request is likely to read. Without `save_decode_cache`, answers are not stored. `untested_vllm` allows a
    vLLM that is newer than the newest tested version. `weights_name` names the weights instead of their
    content. `servers` has a HOST:PORT for each range of ranks, instead of host and port. `key_file` is the
    server's."""

    host: str = ""
    port: Annotated[int, Meta(ge=1)] = DEFAULT_PORT
    lookup_timeout_s: Annotated[float, Meta(gt=0)] = 1.0
    load_timeout_s: Annotated[float, Meta(gt=0)] = 30.0
    wait_timeout_s: Annotated[float, Meta(ge=0)] = 10.0
    store_everything: bool = False
    save_decode_cache: bool = True
    strict_resume_points: bool = False
    untested_vllm: bool = False
    weights_name: Annotated[str, Meta(max_length=1024)] = ""
    servers: dict[str, str] = {}
    key_file: str = ""

    @property
    def address(self) -> str:
        return address(self.host, self.port, self.key_file)


def parse(extra_config: Mapping[str, Any]) -> tuple[Settings, list[str]]:
    """Returns the settings and the keys without effect. Raises ValueError that says what to change."""
    values = {
        key.removeprefix(PREFIX): value for key, value in extra_config.items() if key.startswith(PREFIX)
    }
    unknown = [name for name in values if name not in Settings.__struct_fields__]
    ignored = [PREFIX + name for name in unknown if row("keys", PREFIX + name)[0] == NO_EFFECT]
    told = [
        f"unknown key {PREFIX + name!r} in kv_connector_extra_config: "
        f"{advice('keys', PREFIX + name) or _suggestion(name)}"
        for name in unknown
        if PREFIX + name not in ignored
    ]
    if told:
        raise ValueError("; ".join(told))
    try:
        # Not strict, because vLLM's command line may pass numbers as text. Other names are left out.
        return msgspec.convert(values, Settings, strict=False), ignored
    except msgspec.ValidationError as error:
        reason, _, name = str(error).rstrip("`").partition(" - at `$.")
        name = name.partition("[")[0]
        raise ValueError(
            f"{PREFIX}{name} in kv_connector_extra_config is {values[name]!r}: {reason.lower()}"
        ) from None


def _suggestion(name: str) -> str:
    known = Settings.__struct_fields__
    if close := difflib.get_close_matches(name, known, n=1):
        return f"did you mean {PREFIX + close[0]}?"
    return "the keys are " + ", ".join(PREFIX + each for each in known)


class Place(NamedTuple):
    """A server, and the ranks whose workers use it."""

    ranks: range
    address: str

    def details(self, world_size: int) -> tuple[tuple[str, str], ...]:
        """What a worker adds to its ModelTag: nothing if the server has all ranks."""
        if len(self.ranks) == world_size:
            return ()
        return (("ranks", f"{self.ranks.start}-{self.ranks.stop - 1}"),)


def places(settings: Settings, world_size: int) -> tuple[Place, ...]:
    """In the order of ranks. Raises ValueError that says what to change."""
    if not settings.servers:
        return (Place(range(world_size), settings.address),)
    given = (_place(ranks, where, settings.key_file) for ranks, where in settings.servers.items())
    found = sorted(given, key=lambda place: place.ranks.start)
    ends = [0, *(place.ranks.stop for place in found)]
    for place, end in zip(found, ends, strict=False):
        if place.ranks.start != end:
            wrong = "two servers for" if place.ranks.start < end else "no server for"
            rank = min(place.ranks.start, end)
            raise ValueError(
                f"{SERVERS_KEY} has {wrong} rank {rank}: give each of ranks 0 to {world_size - 1} one"
            )
    if ends[-1] != world_size:
        raise ValueError(
            f"{SERVERS_KEY} ends at rank {ends[-1] - 1}, but this engine has ranks 0 to {world_size - 1}"
        )
    if len({place.address for place in found}) < len(found):
        raise ValueError(f"{SERVERS_KEY} names one server twice: give it all its ranks in one range")
    return tuple(found)


def _place(ranks: str, where: str, key_file: str) -> Place:
    numbers = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", ranks)
    host_port = re.fullmatch(r"(?:(.+):)?(\d+)", where)
    first = int(numbers[1]) if numbers else 0
    last = int(numbers[2] or first) if numbers else -1
    if numbers is None or last < first:
        raise ValueError(f"{SERVERS_KEY}: {ranks!r} is no range of ranks; an example is {SERVERS_EXAMPLE}")
    if host_port is None or not 0 < int(host_port[2]) < 1 << 16:
        raise ValueError(f"{SERVERS_KEY}: {where!r} is not HOST:PORT; an example is {SERVERS_EXAMPLE}")
    return Place(range(first, last + 1), address(host_port[1] or "", int(host_port[2]), key_file))
