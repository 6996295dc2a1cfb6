"""The options of `lmcache server`: one table, from which flags, environment, file and help come.

The fields of Config are that table. An option `l1_size_gb` is the flag `--l1-size-gb`, the variable
LMCACHE_L1_SIZE_GB and the key `l1_size_gb` of the TOML file. Precedence: flag, environment, file, default.
"""

import dataclasses
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcache_client.contract.endpoint import is_loopback
from lmcache_client.contract.geometry import MAX_CHUNK_TOKENS
from lmcache_client.contract.messages import DEFAULT_PORT
from lmcache_server.errors import StartError
from lmcache_server.host.logs import FORMATS, TEXT
from lmcache_server.host.units import GB_BYTES

ENVIRONMENT_PREFIX = "LMCACHE_"
CONFIG_VARIABLE = "LMCACHE_CONFIG"
MAX_FILE_BYTES = 1 << 20

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


class _Unfit(ValueError):
    """A value that does not fit its option; the message names what would."""


Parser = Callable[[object], Any]


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise _Unfit("text")
    return value.strip()


def _flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    word = value.strip().lower() if isinstance(value, str) else ""
    if word not in _TRUE + _FALSE:
        raise _Unfit("true or false")
    return word in _TRUE


def _integer(low: int, high: int) -> Parser:
    def parse(value: object) -> int:
        try:
            number = int(value) if isinstance(value, str) else value
        except ValueError:
            number = None
        if type(number) is not int or not low <= number <= high:
            raise _Unfit(f"an integer from {low} to {high}")
        return number

    return parse


def _number(low: float, high: float) -> Parser:
    def parse(value: object) -> float:
        try:
            number = float(value) if isinstance(value, (str, int, float)) else math.nan
        except (ValueError, OverflowError):
            number = math.nan
        if isinstance(value, bool) or not low <= number <= high:
            raise _Unfit(f"a number from {low:g} to {high:g}")
        return number

    return parse


def _choice(*names: str) -> Parser:
    def parse(value: object) -> str:
        for name in names:
            if isinstance(value, str) and value.strip().lower() == name.lower():
                return name
        raise _Unfit(f"one of {', '.join(names)}" if len(names) > 1 else names[0])

    return parse


def _chunk_size(value: object) -> int | None:
    if isinstance(value, str) and value.strip().lower() == "auto":
        return None
    try:
        number: int = _integer(1, MAX_CHUNK_TOKENS)(value)
    except _Unfit:
        raise _Unfit(f"auto, or an integer from 1 to {MAX_CHUNK_TOKENS}") from None
    return number


def _option(default: Any, parse: Parser, shown: str, help_text: str, metavar: str = "") -> Any:
    """A field of Config. `shown` is how the help and the log show the default."""
    return dataclasses.field(
        default=default, metadata={"parse": parse, "shown": shown, "help": help_text, "metavar": metavar}
    )


@dataclass(frozen=True)
class Config:
    """The effective configuration of a server."""

    host: str = _option(
        "",
        _text,
        "a Unix socket",
        "Address to serve engines on, over TCP. Without it: a Unix socket that only this user can open.",
        "HOST",
    )
    port: int = _option(
        DEFAULT_PORT,
        _integer(1, 65535),
        str(DEFAULT_PORT),
        "TCP port for engines; without --host, the number that names the Unix socket.",
        "PORT",
    )
    allow_remote: bool = _option(
        False,
        _flag,
        "no",
        "Needed for a --host or --http-host other than loopback. Opens the server to every machine that "
        "can reach it, without password or encryption: they can tell what is cached, clear it, and have "
        "the server copy between the cache and processes of this machine.",
    )
    http_host: str = _option(
        "127.0.0.1",
        _text,
        "127.0.0.1",
        "Address of the status page, /metrics, /healthz and the rest.",
        "HOST",
    )
    http_port: int = _option(
        8080,
        _integer(0, 65535),
        "8080",
        "TCP port of the status page and the rest of HTTP; 0 takes a free one and logs it.",
        "PORT",
    )
    chunk_size: int | None = _option(
        None,
        _chunk_size,
        "auto",
        "Tokens in a chunk, the unit of hits and eviction. auto takes what suits each model; a number "
        "must be a multiple of the unified block size of every model.",
        "TOKENS",
    )
    l1_size_gb: float = _option(
        4.0,
        _number(0.001, 100_000),
        "4",
        "Memory for the cache in GB (1 GB = 2**30 bytes), fractions allowed. All of it is taken, in the "
        "background, from the start.",
        "GB",
    )
    eviction_policy: str = _option(
        "LRU",
        _choice("LRU"),
        "LRU",
        "What goes first when the cache is full: LRU, least recently used.",
        "POLICY",
    )
    l1_hugetlb: bool = _option(
        False,
        _flag,
        "no",
        "Take the memory from the huge pages reserved with vm.nr_hugepages. Otherwise the system is "
        "asked for transparent huge pages.",
    )
    l1_path: str = _option(
        "",
        _text,
        "none",
        "File that holds the cache, best in a memory file system such as /dev/shm: after a clean stop the "
        "next server with the same file and --l1-size-gb has the whole cache back. Without it the cache is "
        "memory that ends with the server.",
        "FILE",
    )
    verify: bool = _option(
        False,
        _flag,
        "no",
        "Take a checksum of every stored page and check it before the page is loaded. A damaged page "
        "counts as a miss.",
    )
    lease_s: float = _option(
        120.0,
        _number(1, 86400),
        "120",
        "Seconds for which a hit is kept for an engine that does not come to fetch it.",
        "SECONDS",
    )
    log_level: str = _option(
        "info",
        _choice("debug", "info", "warning", "error"),
        "info",
        "How much to log on stderr: debug, info, warning or error.",
        "LEVEL",
    )
    log_format: str = _option(
        TEXT,
        _choice(*FORMATS),
        TEXT,
        "How to log: text, or json for one object a line, with what the line names as fields.",
        "FORMAT",
    )

    @property
    def l1_size_bytes(self) -> int:
        return int(self.l1_size_gb * GB_BYTES)


OPTIONS = {field.name: field for field in dataclasses.fields(Config)}


def flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable_name(name: str) -> str:
    return ENVIRONMENT_PREFIX + name.upper()


def resolve(
    names: Iterable[str],
    flags: Mapping[str, object],
    environment: Mapping[str, str],
    config_file: str | None = None,
) -> dict[str, Any]:
    """The value of each option in `names`; a flag that is None was not given.

    `config_file` is the value of --config; without it LMCACHE_CONFIG counts. Raises StartError.
    """
    path = config_file or environment.get(CONFIG_VARIABLE) or ""
    in_file = _read_file(Path(path)) if path else {}
    values = {}
    for name in names:
        variable = variable_name(name)
        if flags.get(name) is not None:
            values[name] = _parse(name, flags[name], flag_name(name))
        elif _is_set(name, environment):
            values[name] = _parse(name, environment[variable], f"the environment variable {variable}")
        elif name in in_file:
            values[name] = _parse(name, in_file[name], f"{name} in {path}")
        else:
            values[name] = OPTIONS[name].default
    return values


def load(flags: Mapping[str, object], environment: Mapping[str, str], config_file: str | None) -> Config:
    """The configuration of a server; see `resolve`. Raises StartError."""
    config = Config(**resolve(OPTIONS, flags, environment, config_file))
    for name in ("host", "http_host"):
        host = getattr(config, name)
        if host and not is_loopback(host) and not config.allow_remote:
            raise StartError(
                f"{flag_name(name)} {host} lets other machines connect, without password or encryption: "
                f"add --allow-remote if that is wanted, or use 127.0.0.1"
            )
    if config.l1_path and config.l1_hugetlb:
        raise StartError("--l1-path and --l1-hugetlb exclude each other: leave one of them out")
    if not config.http_host:
        raise StartError("--http-host must name an address, for example 127.0.0.1")
    return config


def describe(config: Config) -> str:
    """The effective configuration in one line."""
    parts = []
    for name, field in OPTIONS.items():
        value = getattr(config, name)
        shown = field.metadata["shown"] if value == field.default else _shown(value)
        parts.append(f"{name}={shown!r}" if " " in shown else f"{name}={shown}")
    return "configuration: " + " ".join(parts)


def _shown(value: object) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def _is_set(name: str, environment: Mapping[str, str]) -> bool:
    value = environment.get(variable_name(name), "")
    # Kubernetes sets LMCACHE_PORT=tcp://… in every pod beside a Service named lmcache; it is not meant.
    return bool(value) and not (name == "port" and value.startswith("tcp://"))


def _parse(name: str, value: object, source: str) -> Any:
    try:
        return OPTIONS[name].metadata["parse"](value)
    except _Unfit as error:
        raise StartError(f"{source} must be {error}, not {value!r}") from None


def _read_file(path: Path) -> dict[str, object]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise StartError(f"the configuration file {path} has more than {MAX_FILE_BYTES} bytes")
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StartError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except ValueError as error:  # not UTF-8, or not TOML
        raise StartError(f"the configuration file {path} is not valid TOML: {error}") from error
    for key in content:
        if key not in OPTIONS:
            raise StartError(f"unknown key {key!r} in {path}: {_suggest(key)}")
    return content


def _suggest(key: str) -> str:
    import difflib

    close = difflib.get_close_matches(key.replace("-", "_").lower(), OPTIONS, n=1)
    return f"did you mean {close[0]}?" if close else f"the keys are {', '.join(OPTIONS)}"
