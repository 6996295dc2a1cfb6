"""The flags of `lmcache server`: the fields of Config define them, the environment, the file and the help.

`l1_size_gb` is the flag `--l1-size-gb`, the variable LMCACHE_L1_SIZE_GB and the key `l1_size_gb`
of the TOML file. The flag wins over the environment, the environment over the file.
"""

import dataclasses
import re
import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import click
from click.core import ParameterSource

from lmcache_client.contract import lmcache_names
from lmcache_client.contract.endpoint import host_name, is_loopback
from lmcache_client.contract.geometry import MAX_CHUNK_TOKENS
from lmcache_client.contract.messages import DEFAULT_PORT
from lmcache_server.errors import StartError
from lmcache_server.host.logs import FORMATS, TEXT
from lmcache_server.host.units import GB_BYTES
from lmcache_server.options import parts

ENVIRONMENT_PREFIX = "LMCACHE_"
CONFIG_VARIABLE = "LMCACHE_CONFIG"
MAX_FILE_BYTES = 1 << 20

NO_FLAGS = (
    *("LMCACHE_RUNTIME_DIR", "LMCACHE_MP_PLUGIN", "LMCACHE_MP_BATCHED_COPIES"),
    *(each for names in parts("flags", "VARIABLES") for each in names),
)
"""Variables that are read where they are needed: a password is never a flag, which would be logged."""
_SET_BY_KUBERNETES = re.compile(r"_SERVICE_(HOST|PORT\w*)$|_PORT_\d+_(TCP|UDP)\w*$")
"""The end of variables that exist in every pod beside a Service whose name begins with lmcache."""

Command = Callable[..., Any]


def _printable(value: str) -> str:
    # No address or path has control characters or bytes that are not UTF-8.
    if not value.isprintable():
        raise ValueError
    return value.strip()


def _chunk_size(value: str) -> Any:
    return None if value.strip().lower() == "auto" else click.IntRange(1, MAX_CHUNK_TOKENS)(value)


def _kind(convert: Callable[[str], Any], fit: str) -> Any:
    """A type for values that `convert` accepts without a ValueError; errors call a valid value `fit`."""
    kind = click.types.FuncParamType(convert)
    kind.name = fit
    return kind


_TEXT = _kind(_printable, "text that can be printed")
_CHUNK_SIZE = _kind(_chunk_size, f"auto, or an integer from 1 to {MAX_CHUNK_TOKENS}")


def _flag(default: Any, kind: Any, help_text: str, **more: Any) -> Any:
    """A field of Config; `more` goes to click.option."""
    return dataclasses.field(default=default, metadata={"type": kind, "help": help_text, **more})


def _of_option(
    default: Any = "", parse: Callable[[str], object] | None = None, fit: str = "", **more: Any
) -> Any:  # fmt: skip
    """A flag of an option: text, which `parse` accepts if there is one and errors call `fit`."""

    def check(value: str) -> str:
        if parse is not None:
            parse(value)
        return _printable(value)

    return _flag(default, _kind(check, fit) if parse else _TEXT, show_default="none", **more)


def _one_of(*names: str) -> Any:
    return click.Choice(names, case_sensitive=False)


# fmt: off
@dataclass(frozen=True)
class Config:
    """The effective configuration of a server."""

    host: str = _flag(
        "", _TEXT, "TCP address at which engines reach the server. Without it: a Unix socket that only this "
        "user can open.", show_default="a Unix socket")
    port: int = _flag(
        DEFAULT_PORT, click.IntRange(1, 65535), "TCP port for engines; without --host, the number that names "
        "the Unix socket.")
    allow_remote: bool = _flag(
        False, click.BOOL, "Needed for a --host without --key-file, or an --http-host, other than loopback. "
        "Opens the server to every machine that can reach it, without password or encryption: such a machine "
        "can see what is cached, clear the cache, and make the server copy between the cache and processes "
        "of this machine.")
    key_file: str = _flag(
        "", _TEXT, "File with a key, as `lmcache key` makes it. Then connections over TCP are encrypted, and "
        "only clients with the same key can connect. The Unix socket needs no key and does not use it.",
        metavar="FILE", show_default="none")
    http_host: str = _flag(
        "127.0.0.1", _TEXT, "Address for HTTP: the status page, /metrics, /healthz and the other paths.")
    http_port: int = _flag(
        8080, click.IntRange(0, 65535), "TCP port for HTTP; 0 takes a free port and logs it.")
    chunk_size: int | None = _flag(
        None, _CHUNK_SIZE, "Tokens in a chunk, the unit of hits and eviction. auto chooses a size for each "
        "model. A number must be a multiple of every model's unified block size: the least common multiple "
        "of the block sizes of its groups.",
        metavar="TOKENS", show_default="auto")
    l1_size_gb: float = _flag(
        4.0, click.FloatRange(0.001, 100_000), "Memory for the cache in GB (1 GB = 2**30 bytes), fractions "
        "allowed. The server takes all of it, in the background, as soon as it starts.")
    eviction_policy: str = _flag(
        "LRU", _one_of("LRU"), "Which chunks are evicted first when the cache is full: LRU, the least "
        "recently used.", metavar="POLICY")
    l1_hugetlb: bool = _flag(
        False, click.BOOL, "Take the memory from the huge pages reserved with vm.nr_hugepages. Otherwise the "
        "server asks the system for transparent huge pages.")
    checksums: bool = _flag(
        False, click.BOOL, "Take a checksum of every stored object and check it before the object is "
        "loaded or written to a tier. A request that would load damaged pages is recomputed.")
    gpu_kernel: bool = _flag(
        False, click.BOOL, "Load many small pages with a copy kernel (needs cupy) instead of the GPU's copy "
        "engine. Faster for pages under 28 KiB; it may slow the engine's compute.")
    lease_s: float = _flag(
        120.0, click.FloatRange(1, 86400), "Seconds for which the server keeps a hit for an engine that has "
        "not loaded it yet.", metavar="SECONDS")
    log_level: str = _flag(
        "info", _one_of("debug", "info", "warning", "error"), "How much to log on stderr.")
    log_format: str = _flag(
        TEXT, _one_of(*FORMATS), "json: one object per line, with the event's values as fields.")
    # fmt: on
    of_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The values of the flags that the options add: see lmcache_server/options."""

    @property
    def l1_size_bytes(self) -> int:
        return int(self.l1_size_gb * GB_BYTES)


_OWN = [field for field in dataclasses.fields(Config) if field.metadata]
FLAGS: dict[str, Any] = {field.name: field for field in _OWN}
for _flags in parts("flags", "FLAGS"):
    FLAGS |= {name: _of_option(**flag) for name, flag in _flags.items()}


def values(config: Config) -> dict[str, Any]:
    """The value of every flag, by its name."""
    others = {name: FLAGS[name].default for name in FLAGS} | dict(config.of_options)
    return others | {field.name: getattr(config, field.name) for field in _OWN}


def flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable_name(name: str) -> str:
    return ENVIRONMENT_PREFIX + name.upper()


def flags(*names: str, **helps: str) -> Callable[[Command], Command]:
    """A decorator that gives a command these flags and --config; `helps` replaces help texts.
    The command is called with their values; a bad value raises StartError before that."""

    def decorate(command: Command) -> Command:
        for name in reversed(names):
            default, flag = FLAGS[name].default, flag_name(name)
            settings = {"default": default, "show_default": True, "show_envvar": True}
            if isinstance(default, bool):
                flag = f"{flag}/--no-{flag[2:]}"
            elif not isinstance(FLAGS[name].metadata["type"], click.Choice):
                settings["metavar"] = name.rpartition("_")[2].upper()
            settings |= {"envvar": variable_name(name), **FLAGS[name].metadata}
            settings["help"] = helps.get(name, settings["help"])
            command = click.option(name, flag, cls=_Flag, **settings)(command)
        return click.option(
            "--config", metavar="FILE", envvar=CONFIG_VARIABLE, show_envvar=True, is_eager=True,
            callback=_take_file, expose_value=False,
            help="TOML file; its keys are the flags' names with underscores.",
        )(command)  # fmt: skip

    return decorate


def checked(given: Mapping[str, Any]) -> Config:
    """The configuration with these values. Raises StartError if they contradict each other."""
    own = {field.name for field in _OWN}
    others = {name: given[name] for name in given.keys() - own if given[name] != FLAGS[name].default}
    config = Config(**{name: given[name] for name in given.keys() & own}, of_options=others)
    for flag, host, has_key in (
        ("--host", config.host, bool(config.key_file)),
        ("--http-host", config.http_host, False),
    ):
        if not host_name(host) and (host or flag == "--http-host"):
            raise StartError(f"{flag} must name an address, for example 127.0.0.1")
        if host and not (is_loopback(host) or config.allow_remote or has_key):
            key = "--key-file for a key, or " if flag == "--host" else ""
            raise StartError(
                f"{flag} {host} lets other machines connect, without password or encryption: "
                f"add {key}--allow-remote if you want that, or use 127.0.0.1"
            )
    for check in parts("flags", "check"):
        check(values(config))
    return config


def describe(config: Config) -> str:
    """The effective configuration in one line."""
    shown = (f"{name}={_shown(name, value)}" for name, value in values(config).items())
    return "configuration: " + " ".join(shown)


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """A sentence about each variable that looks like one of ours and sets nothing."""
    known = [*map(variable_name, FLAGS), CONFIG_VARIABLE, *NO_FLAGS]
    return [
        f"the environment variable {name} sets nothing: "
        + (lmcache_names.advice("variables", name) or _suggest(name, known))
        for name, value in sorted(environment.items())
        if name.startswith(ENVIRONMENT_PREFIX) and name not in known
        if not (_SET_BY_KUBERNETES.search(name) or value.startswith("tcp://"))
    ]


def _shown(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = " ".join(value) if isinstance(value, tuple) else str(value)
    text = text.removesuffix(".0" if isinstance(value, float) else "")
    text = FLAGS[name].metadata["show_default"] if value in ("", None, ()) else text
    return repr(text) if " " in text else text


class _Flag(click.Option):
    """A flag whose error says where a bad value came from and what would be valid."""

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        value = super().resolve_envvar_value(ctx)
        # Kubernetes sets LMCACHE_PORT=tcp://… in every pod beside a Service named lmcache.
        return None if value and self.name == "port" and value.startswith("tcp://") else value

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        source, given = ctx.get_parameter_source(self.name or ""), value
        where = self.opts[0]
        if source is ParameterSource.ENVIRONMENT:
            where = f"the environment variable {self.envvar}"
        try:
            if source is ParameterSource.DEFAULT_MAP:
                where = f"{self.name} in {ctx.meta[CONFIG_VARIABLE]}"
                # TOML values have types: true is not a number. Text is read like a flag's.
                kinds = (bool,) if self.is_flag else () if self.type is _TEXT else (int, float)
                if self.multiple and type(value) is list and all(type(each) is str for each in value):
                    given = tuple(value)
                elif type(value) in (str, *kinds):
                    given = (value,) if self.multiple else str(value)
                else:
                    self.type.fail("")
            parsed = super().type_cast_value(ctx, given)
            return parsed if parsed == parsed else self.type.fail("NaN is in no range")  # noqa: PLR0124
        except (click.BadParameter, ValueError):
            raise StartError(f"{where} must be {_fit(self.type)}, not {_excerpt(value)}") from None


def _fit(kind: Any) -> str:
    if isinstance(kind, click.Choice):
        return "one of " * (len(kind.choices) > 1) + ", ".join(kind.choices)
    if isinstance(kind, click.IntRange | click.FloatRange):
        number = "an integer" if isinstance(kind, click.IntRange) else "a number"
        return f"{number} from {kind.min:g} to {kind.max:g}"
    return "true or false" if kind is click.BOOL else str(kind.name)


def _excerpt(value: object) -> str:
    try:
        return reprlib.repr(value)
    except ValueError:
        return "a number this long"


def _take_file(ctx: click.Context, _option: click.Parameter, path: str | None) -> None:
    if not path:
        return
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise StartError(f"the configuration file {path} has more than {MAX_FILE_BYTES} bytes")
        content = tomllib.loads(text.decode())
    except OSError as error:
        raise StartError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, nested too deep
        raise StartError(f"the configuration file {path} is not valid TOML: {error}") from error
    for key in content:
        if key not in FLAGS:
            near = _suggest(key.replace("-", "_").lower(), FLAGS)
            advice = lmcache_names.advice("flags", flag_name(key)) or near
            raise StartError(f"unknown key {key!r:.80} in {path}: {advice}")
    ctx.default_map, ctx.meta[CONFIG_VARIABLE] = content, path


def _suggest(name: str, known: Iterable[str]) -> str:
    import difflib

    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return f"did you mean {close[0]}?" if close else f"the names are {', '.join(known)}"
