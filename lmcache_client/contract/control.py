"""Messages that change no page, and their replies. messages.py lists all messages."""

from typing import Annotated

from msgspec import Meta

from lmcache_client.contract.codec import Natural, Text, Wire
from lmcache_client.contract.geometry import MAX_GROUPS
from lmcache_client.contract.keys import Keys, TenantId

MAX_PAUSE_S, MAX_PRIORITY = 86400, 100
Pause = Annotated[int, Meta(ge=0, le=MAX_PAUSE_S)]
Missed = Annotated[tuple[tuple[Annotated[str, Meta(max_length=32)], Natural], ...], Meta(max_length=16)]
Ends = Annotated[tuple[tuple[Natural, Natural, tuple[Natural, ...]], ...], Meta(max_length=MAX_GROUPS)]


class Inspect(Wire, frozen=True, tag=27):
    """Asks what a Lookup of `keys` by this engine would find. Nothing is leased, counted or marked as used.
    The reply is Inspected. `limit_tokens` is that of Lookup."""

    engine_id: Text
    keys: Keys
    limit_tokens: Natural


class Inspected(Wire, frozen=True, tag=28):
    """`resume_tokens` and `held` are those of Found. `missed` has the tokens between there and the limit by
    reason, as (reason, tokens) pairs. `ends` has the groups that end the hit before the limit, as (group,
    tokens, ranks): how far the group alone could be restored, and which ranks lack their part of the first
    chunk behind that of which others have theirs."""

    resume_tokens: Natural
    held: tuple[bytes, ...]
    missed: Missed
    ends: Ends = ()


class Follow(Wire, frozen=True, tag=32):
    """Asks how far this chain of chunks can be restored now, and what the server has forgotten of the
    scheduler's namespace since this session's last Follow. `keys` may be empty. Nothing is leased, counted or
    marked as used. The reply is Followed."""

    keys: Keys


class Followed(Wire, frozen=True, tag=33):
    """The chain can be restored up to `resume_tokens`. `gone` has the keys of forgotten chunks; some of them
    may have been stored again meanwhile. With `missed`, the server does not know what it has forgotten: this
    is the session's first Follow, or there was too much of it."""

    resume_tokens: Natural
    gone: Keys
    missed: bool


class Retain(Wire, frozen=True, tag=34):
    """Asks to evict others before the chunks of this chain, for so many seconds, as far as there is room for
    that. Those with a larger priority stay longest. If `prefetch_s` is not 0, the chain is brought from the
    tiers into L1 after so many seconds. `tenant` is that of StoreObject. The reply is Done."""

    keys: Keys
    seconds: Pause
    priority: Annotated[int, Meta(ge=0, le=MAX_PRIORITY)] = 0
    prefetch_s: Pause = 0
    tenant: TenantId = b""


class Status(Wire, frozen=True, tag=17):
    """Asks what the server holds and, with `explain`, what the namespaces of live engines are made of."""

    explain: bool = False


class StatusReport(Wire, frozen=True, tag=18):
    """The JSON object that the HTTP endpoint /status returns, in pieces of at most MAX_TEXT."""

    pieces: tuple[Text, ...]
