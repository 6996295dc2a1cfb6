"""Prefill and decode in different engines: how long a decode engine waits for what a prefill engine stores.

At the end of its request, a prefill engine says at which token another engine can resume. A router hands that
on as a hint. The decode engine then asks its own server again and again until it has so much, because what
the first one stored may still be on its way, for example through a tier.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from lmcache_client.connector.option import HINT_PREFIX, Engine, Hint, Option
from lmcache_client.connector.request import Promised, Tracked
from lmcache_client.contract.hits import resume_point
from lmcache_client.contract.keys import ROOT_KEY
from lmcache_client.contract.messages import StoreObject

if TYPE_CHECKING:
    from vllm.v1.request import Request

WAIT_TOKENS = f"{HINT_PREFIX}wait_tokens"
MAX_WAIT_TOKENS = 2**31
MIN_PAUSE_S, PAUSE_SHARE = 0.005, 1 / 8
"""Between two questions, a request pauses for this share of the time that it has waited."""
CAUTION_S, CAUTION_SHARE = 30.0, 0.1
"""For so long after a wait in vain, others wait only this share of the timeout: perhaps nothing comes."""
TOLD = "lmcache.told"
"""A key in the kv_transfer_params of a request for which a connector of this engine has answered."""


@dataclass
class _Wait:
    """Until the server can resume at `tokens`. The first question was at `since_s`, the next one is due at
    `until_s`."""

    tokens: int
    since_s: float | None = None
    until_s: float = 0.0


class Handover(Option):
    """What one engine says at the end of prompts, and what it waits for at their beginning."""

    # True is an int, too.
    HINTS: ClassVar[Mapping[str, Hint]] = {
        WAIT_TOKENS: Hint(
            "a number of tokens", lambda value: type(value) is int and 0 <= value <= MAX_WAIT_TOKENS
        )
    }

    def __init__(self, engine: Engine, wanted: Any) -> None:
        self._groups, self._channel, self._loads = engine.groups, engine.client.channel, engine.loads
        self._timeout_s = engine.settings.wait_timeout_s
        self._now_s = engine.system.now_s
        self._waits: dict[str, _Wait] = {}
        """The waits under way, by request."""
        self._stored: dict[str, set[tuple[int, int, int]]] = {}
        """By request that another engine continues: the registration, group and chunk of each object that it
        has offered."""
        self._cautious_until_s = -math.inf
        self._has_paused = False

    def reset(self) -> None:
        self._waits.clear()
        self._stored.clear()

    # -- prefill ----------------------------------------------------------------------------------

    def began(self, tracked: Tracked, hints: Mapping[str, Any]) -> None:
        params, name = _params(tracked.request), tracked.request.request_id
        self._waits.pop(name, None)
        if params.get("do_remote_decode") is True:
            self._stored[name] = set()
        wait_tokens = hints.get(WAIT_TOKENS, 0) if self._loads else 0
        # With another root, this engine has no key in common with any other. NixlConnector, if asked, brings
        # the pages itself.
        if wait_tokens and tracked.root == ROOT_KEY and params.get("do_remote_prefill") is not True:
            self._waits[name], tracked.waits = _Wait(wait_tokens), True
            # Of several connectors in an engine, only the first waits.
            tracked.request.kv_transfer_params = {k: v for k, v in params.items() if k != WAIT_TOKENS}

    def storing(self, requests: Sequence[Tracked], objects: Sequence[StoreObject]) -> None:
        for tracked, each in zip(requests, objects, strict=True):
            if (stored := self._stored.get(tracked.request.request_id)) is not None:
                stored.add((tracked.generation, each.group, each.chunk_index))

    def ended(self, request: "Request", tracked: Tracked | None) -> dict[str, int]:
        """Returns the hint for the decode engine."""
        self._waits.pop(request.request_id, None)
        stored = self._stored.pop(request.request_id, None)
        params = _params(request)
        if params.get("do_remote_decode") is not True or TOLD in params:
            return {}
        # Of several connectors in an engine, only one answers: vLLM fails if two return the same key.
        request.kv_transfer_params = {**params, TOLD: True}
        return {WAIT_TOKENS: self._resume_tokens(tracked, stored) if tracked and stored is not None else 0}

    def _resume_tokens(self, tracked: Tracked, stored: set[tuple[int, int, int]]) -> int:
        """Where the prompt can be resumed once the server has everything that is under way."""
        chunks = tracked.chunks(tracked.request.num_prompt_tokens)
        # What will not come back is not written to tiers.
        if tracked.once or tracked.root != ROOT_KEY:
            return 0
        present = [
            bytes(
                (tracked.generation, group, chunk) in stored or tracked.holds(group, chunk)
                for chunk in range(chunks)
            )
            for group in range(len(self._groups))
        ]
        return resume_point(self._groups, tracked.chunk_size, present, 0, chunks * tracked.chunk_size)

    # -- decode -----------------------------------------------------------------------------------

    def pauses(self, tracked: Tracked) -> bool:
        wait = self._waits.get(tracked.request.request_id)
        pauses = wait is not None and self._now_s() < wait.until_s
        self._has_paused |= pauses
        return pauses

    def goes_on(self, tracked: Tracked, state: Promised | None, computed: int, limit: int) -> bool:
        if (wait := self._waits.get(tracked.request.request_id)) is None:
            return False
        now_s, is_heard = self._now_s(), self._channel.responsive
        wait.since_s = now_s if wait.since_s is None else wait.since_s
        is_cautious, waited_s = now_s < self._cautious_until_s, now_s - wait.since_s
        timeout_s = self._timeout_s * (CAUTION_SHARE if is_cautious else 1)
        wanted = min(wait.tokens, limit) // tracked.chunk_size * tracked.chunk_size
        has_all = max(computed, state.found.resume_tokens if state else 0) >= wanted
        if has_all or not is_heard or waited_s >= timeout_s:
            del self._waits[tracked.request.request_id]
            tracked.waits = False
            if is_heard:
                self._cautious_until_s = -math.inf if has_all else now_s + CAUTION_S
            return False
        pause_s = max(MIN_PAUSE_S, waited_s * PAUSE_SHARE)
        wait.until_s = min(now_s + pause_s, wait.since_s + timeout_s)
        self._has_paused = True
        return True

    def has_paused(self) -> bool:
        has_paused, self._has_paused = self._has_paused, False
        return has_paused


def _params(request: "Request") -> dict[str, Any]:
    params = request.kv_transfer_params
    return params if isinstance(params, dict) else {}


OPTION = Handover
