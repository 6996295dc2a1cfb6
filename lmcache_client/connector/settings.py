"""The `lmcache.mp.*` keys of vLLM's kv_connector_extra_config."""

import difflib
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from lmcache_client.contract.endpoint import address
from lmcache_client.contract.lmcache_names import NO_EFFECT, advice, row
from lmcache_client.contract.messages import DEFAULT_PORT

PREFIX = "lmcache.mp."


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
