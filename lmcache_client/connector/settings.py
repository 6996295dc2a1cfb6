"""The `lmcache.mp.*` keys of vLLM's kv_connector_extra_config."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmcache_client.contract.endpoint import address
from lmcache_client.contract.messages import DEFAULT_PORT

PREFIX = "lmcache.mp."
WITHOUT_EFFECT = frozenset(
    {
        "mq_timeout",
        "heartbeat_interval",
        "mp_transfer_mode",
        "nonblocking_lookup_status",
        "eager_prefetch",
        "save_decode_cache",
    }
)
"""Keys that LMCache's users have in their files; here they change nothing."""


@dataclass(frozen=True)
class Settings:
    """`host` empty means the Unix socket of `port`. The deadlines are the engine's own: after
    `lookup_timeout_s` a lookup counts as a miss, after `load_timeout_s` a load is recomputed. With
    `untested_vllm` a vLLM is served that is newer than the newest tested one."""

    host: str = ""
    port: int = DEFAULT_PORT
    lookup_timeout_s: float = 1.0
    load_timeout_s: float = 30.0
    strict_resume_points: bool = False
    untested_vllm: bool = False

    @property
    def address(self) -> str:
        return address(self.host, self.port)


def parse(extra_config: Mapping[str, Any]) -> tuple[Settings, list[str]]:
    """The settings, and the names of keys without effect. Raises ValueError with what to change."""
    known = {name: type(getattr(Settings, name)) for name in Settings.__dataclass_fields__}
    values: dict[str, Any] = {}
    ignored: list[str] = []
    for key, value in extra_config.items():
        name = key.removeprefix(PREFIX)
        if not key.startswith(PREFIX):
            continue
        if name in WITHOUT_EFFECT:
            ignored.append(key)
        elif name not in known:
            raise ValueError(
                f"unknown key {key!r} in kv_connector_extra_config: the keys are "
                + ", ".join(PREFIX + each for each in known)
            )
        else:
            values[name] = _convert(key, known[name], value)
    return Settings(**values), ignored


def _convert(key: str, kind: type, value: Any) -> Any:
    if kind is bool:
        if isinstance(value, bool):
            return value
    elif isinstance(value, (kind, int, str)) and not isinstance(value, bool):
        try:
            converted = kind(value)
        except ValueError:
            pass
        else:
            if kind is str or converted > 0:
                return converted
    raise ValueError(f"{key} in kv_connector_extra_config must be a {kind.__name__}, not {value!r}")
