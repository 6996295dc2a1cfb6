"""`--tier URL`: what a URL of a tier says, and the tier that it names.

    dir:///nvme/lmcache?size_gb=2000            shared=1 max_age=SECONDS
    valkey://host:6379,host:6379                cluster=1 tls=1
    s3://bucket/prefix, az://…, gs://…          endpoint=URL allow_http=1, and for s3 region=NAME
    mooncake://master:50051                     protocol=tcp|rdma segment_gb devices metadata host

and for each the fields of TierOptions. Passwords and keys come from the environment only.
"""

import difflib
import importlib.util
import logging
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote

from lmcache_server.errors import StartError
from lmcache_server.host.units import GB_BYTES
from lmcache_server.l1.area import Area
from lmcache_server.options.tiers import compressed_body
from lmcache_server.options.tiers.base import CREDENTIALS, Tier

logger = logging.getLogger(__name__)

_EXTRAS = {"valkey": "valkey", "s3": "s3", "az": "s3", "gs": "s3", "mooncake": "mooncake"}
_PACKAGES = {"valkey": "glide_sync", "s3": "obstore", "mooncake": "mooncake"}
COMMIT, COLD = "commit", "cold"
VALKEY_PORT, MOONCAKE_PORT = 6379, 50051


@dataclass(frozen=True)
class TierOptions:
    """What a URL asks of whoever calls the tier. 0 is no limit, and None no key."""

    write: Literal["commit", "cold"]
    """Write a record when L1 has it, or when it is among the coldest of L1."""
    read_mb_s: float = 0.0
    """In 10**6 bytes, as the next one."""
    write_mb_s: float = 0.0
    write_tb_day: float = 0.0
    """In 10**12 bytes."""
    key_file: str | None = None
    compress: str = compressed_body.OFF


@dataclass(frozen=True)
class TierUrl:
    """A valid URL. It has no secrets: `text` may be logged."""

    text: str
    scheme: str
    place: str
    """The directory, the addresses, or bucket and prefix."""
    parameters: dict[str, Any]
    options: TierOptions

    @property
    def is_shared(self) -> bool:
        """Whether other machines may use it, too."""
        return self.scheme != "dir" or bool(self.parameters.get("shared"))

    @property
    def shares_l1(self) -> bool:
        """Whether a process other than the server reads and writes L1."""
        return self.scheme == "mooncake"


class _Kind(NamedTuple):
    """What a parameter may be; `convert` returns None for anything else."""

    fit: str
    convert: Callable[[str], Any]


def parse(url: str) -> TierUrl:
    """Raises StartError with one sentence about what is wrong."""
    scheme, _, rest = url.partition("://")
    if scheme not in _SCHEMES or not rest:
        redis = " (for Redis, try valkey://: it speaks the same protocol, but was not tested)"
        begins = f"--tier {url!r:.200} must begin with {', '.join(f'{s}://' for s in _SCHEMES)}"
        raise StartError(f"{begins}{redis if scheme.startswith('redis') else ''}")
    place, _, query = rest.partition("?")
    # Not even in an error: it would be logged.
    if "@" in unquote(rest):
        raise StartError(f"--tier {scheme}://… must not contain a name or password: set {_SECRETS[scheme]}")
    place, values = unquote(place), _values(url, scheme, query)
    if problem := _problem(scheme, place, values):
        raise _wrong(url, problem)
    options = {each.name: values.pop(each.name) for each in fields(TierOptions) if each.name in values}
    default = {"write": COLD if scheme == "dir" and not values.get("shared") else COMMIT}
    if scheme not in ("dir", "mooncake"):
        default["compress"] = compressed_body.AUTO
    return TierUrl(url, scheme, place, values, TierOptions(**{**default, **options}))


def check_installed(url: TierUrl) -> None:
    """Raises StartError if the package of this tier is not installed."""
    extra = _EXTRAS.get(url.scheme)
    if extra and importlib.util.find_spec(_PACKAGES[extra]) is None:
        raise _not_installed(url)


def compress(url: TierUrl) -> str:
    """How records are compressed. Raises StartError if the package for that is not installed."""
    if url.options.compress == compressed_body.OFF or compressed_body.is_installed():
        return url.options.compress
    reason = f"compress={url.options.compress} needs the package blosc: {compressed_body.INSTALL}"
    if url.options.compress != compressed_body.AUTO:
        raise _wrong(url.text, f"cannot be used: {reason}")
    logger.warning("%(tier)s is not compressed: %(reason)s", {"tier": url.text, "reason": reason})
    return compressed_body.OFF


def open_tier(url: TierUrl, l1: Area | None = None) -> Tier:
    """`l1` is for tiers that share it.

    Raises TierError if the store cannot be used now, StartError if its package cannot be imported."""
    more = dict(url.parameters)
    try:
        if url.scheme == "dir":
            from lmcache_server.options.tiers.directory import Directory

            size_bytes, age_s = int(more.pop("size_gb") * GB_BYTES), more.pop("max_age", math.inf)
            return Directory(url.place, size_bytes, max_age_s=age_s, **more)
        if url.scheme == "valkey":
            from lmcache_server.options.tiers.valkey import Valkey

            secrets = list(map(os.environ.get, CREDENTIALS["valkey"]))
            return Valkey(_addresses(url.place) or [], **more, username=secrets[0], password=secrets[1])
        if url.scheme == "mooncake":
            return _mooncake(url, l1)
        from lmcache_server.options.tiers.object_store import Objects

        bucket, _, prefix = url.place.partition("/")
        return Objects(url.scheme, bucket, prefix, **more)
    except ImportError as error:
        raise _not_installed(url, f" ({error})") from error


def _mooncake(url: TierUrl, l1: Area | None) -> Tier:
    from lmcache_server.options.tiers.isolated import Isolated

    check_installed(url)  # here only the other process imports it
    (host, port), more = (_addresses(url.place, MOONCAKE_PORT) or [])[0], dict(url.parameters)
    segment_bytes = int(more.pop("segment_gb", 0) * GB_BYTES)
    settings = {"master": f"[{host}]:{port}" if ":" in host else f"{host}:{port}", **more}
    holder = {**settings, "segment_bytes": segment_bytes} if segment_bytes else None
    return Isolated(f"Mooncake at {settings['master']}", settings, l1, holder)


def _not_installed(url: TierUrl, why: str = "") -> StartError:
    extra = _EXTRAS[url.scheme]
    return StartError(
        f"--tier {url.scheme}:// needs the extra {extra}: run pip install '.[{extra}]' in this project's "
        f"directory{why}"
    )


def _values(url: str, scheme: str, query: str) -> dict[str, Any]:
    known = {**_SCHEMES[scheme], **_OPTIONS}
    values: dict[str, Any] = {}
    for pair in filter(None, query.split("&")):
        name, _, text = pair.partition("=")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            near = f"did you mean {close[0]}?" if close else f"the names are {', '.join(known)}"
            raise _wrong(url, f"has the unknown parameter {name!r:.60}: {near}")
        if name in values:
            raise _wrong(url, f"has the parameter {name} twice: leave one out")
        values[name] = known[name].convert(unquote(text))
        if values[name] is None:
            raise _wrong(url, f"has {name}={unquote(text)!r:.60}: it must be {known[name].fit}")
    return values


def _problem(scheme: str, place: str, values: dict[str, Any]) -> str:
    if not place.isprintable():
        return "contains characters that cannot be printed"
    if scheme == "dir":
        if not place.startswith("/") or place.strip("/") == "":
            return "must name a directory by its whole path: dir:///path"
        needed = "needs size_gb, the most that the tier may take: add ?size_gb=100"
        return "" if "size_gb" in values else needed
    if scheme == "valkey":
        return "" if _addresses(place) else "must name servers: valkey://host:6379,host:6379"
    if scheme == "mooncake":
        names = _addresses(place, MOONCAKE_PORT)
        return "" if names and len(names) == 1 else "must name the master: mooncake://host:50051"
    if not re.fullmatch(r"[\w.-]+(/.*)?", place):
        return f"must name a bucket: {scheme}://bucket/prefix"
    if values.get("endpoint", "").startswith("http://") and not values.get("allow_http"):
        return "has an endpoint without TLS: make it https://, or add allow_http=1 if you trust the network"
    return ""


def _addresses(place: str, default_port: int = VALKEY_PORT) -> list[tuple[str, int]] | None:
    addresses = []
    for each in place.rstrip("/").split(","):
        found = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+)(?::(\d{1,5}))?", each)
        if not found or not 0 < (port := int(found[2] or default_port)) < 65536:
            return None
        addresses.append((found[1].strip("[]"), port))
    return addresses


def _wrong(url: str, problem: str) -> StartError:
    # Without what may be a secret.
    return StartError(f"--tier {url.partition('?')[0]!r:.200} {problem}")


def _matching(pattern: str) -> Callable[[str], str | None]:
    return lambda text: text if re.fullmatch(pattern, text) else None


def _one_of(*names: str) -> _Kind:
    return _Kind(" or ".join(names), {name: name for name in names}.get)


def _number(text: str) -> float | None:
    try:
        return number if 0 < (number := float(text)) < math.inf else None
    except ValueError:
        return None


_NUMBER = _Kind("a number above 0", _number)
_SECONDS = _Kind("seconds, such as 604800 for a week", _number)
_FLAG = _Kind("0 or 1", {"0": False, "1": True}.get)
_ENDPOINT = _Kind("an address such as https://host:9000", _matching(r"https?://[\w.:/\[\]-]+"))
_COMPRESS = _one_of(compressed_body.OFF, compressed_body.AUTO, *compressed_body.METHODS)
_OBJECTS = {"endpoint": _ENDPOINT, "allow_http": _FLAG, "compress": _COMPRESS}
_REGION = _Kind("a region's name", _matching(r"[\w-]+"))
_OPTIONS = {
    "write": _one_of(COMMIT, COLD),
    "read_mb_s": _NUMBER,
    "write_mb_s": _NUMBER,
    "write_tb_day": _NUMBER,
    "key_file": _Kind("a whole path", _matching(r"/[^\0]+")),
}
_SCHEMES = {
    "dir": {"size_gb": _NUMBER, "shared": _FLAG, "max_age": _SECONDS, "compress": _COMPRESS},
    "valkey": {"cluster": _FLAG, "tls": _FLAG, "compress": _COMPRESS},
    "s3": {**_OBJECTS, "region": _REGION},
    "az": _OBJECTS,
    "gs": _OBJECTS,
    "mooncake": {
        "protocol": _one_of("tcp", "rdma"),
        "segment_gb": _Kind("0 or a number above it", lambda text: 0.0 if text == "0" else _number(text)),
        "devices": _Kind("names of RDMA devices, such as mlx5_0,mlx5_1", _matching(r"[\w.,-]+")),
        "metadata": _Kind("P2PHANDSHAKE or an address", _matching(r"[\w.:/,\[\]-]+")),
        "host": _Kind("this machine's address", _matching(r"[\w.:\[\]-]+")),
    },
}
_SECRETS = {
    "dir": "nothing, a directory needs none",
    "mooncake": "nothing, it knows no passwords",
    **{scheme: f"{' and '.join(names)} in the environment" for scheme, names in CREDENTIALS.items()},
}
