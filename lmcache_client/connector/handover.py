"""Prefill and decode in different engines: how long a decode engine waits for what a prefill engine stores.

At the end of its request, a prefill engine says at which token another engine can resume. A router hands that
on as a hint. The decode engine then asks its own server again and again until it has so much, because what
the first one stored may still be on its way, for example through a tier.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lmcache_client.connector.hints import WAIT_TOKENS
from lmcache_client.connector.request import Promised, Tracked, Wait
from lmcache_client.contract.geometry import GroupSpec
from lmcache_client.contract.hits import resume_point
from lmcache_client.contract.keys import ROOT_KEY
from lmcache_client.contract.messages import StoreObject

if TYPE_CHECKING:
    from vllm.v1.request import Request

MIN_PAUSE_S, PAUSE_SHARE = 0.005, 1 / 8
"""Between two questions, a request pauses for this share of the time that it has waited."""
CAUTION_S, CAUTION_SHARE = 30.0, 0.1
"""So long after a wait in vain, others wait for this share of the timeout: perhaps nothing comes any more."""
TOLD = "lmcache.told"
"""A key in the kv_transfer_params of a request for which a connector of this engine has answered."""


class Handover:
    """What one engine says at the end of prompts and waits for at their beginning, at most `timeout_s`."""

    def __init__(self, groups: Sequence[GroupSpec], timeout_s: float, now_s: Callable[[], float]) -> None:
        self._groups = groups
        self._timeout_s = timeout_s
        self._now_s = now_s
        self._cautious_until_s = -math.inf
        self._has_paused = False

    # -- prefill ----------------------------------------------------------------------------------

    def begin(self, tracked: Tracked, wait_tokens: int) -> None:
        """A request has arrived with this hint."""
        params = _params(tracked.request)
        if params.get("do_remote_decode") is True:
            tracked.stored = set()
        # With another root, this engine has no key in common with any other. NixlConnector, if asked, brings
        # the pages itself.
        if wait_tokens and tracked.root == ROOT_KEY and params.get("do_remote_prefill") is not True:
            tracked.wait = Wait(wait_tokens)
            # Of several connectors in an engine, only the first waits.
            tracked.request.kv_transfer_params = {k: v for k, v in params.items() if k != WAIT_TOKENS}

    def storing(self, requests: Sequence[Tracked], objects: Sequence[StoreObject]) -> None:
        """These objects, each of one request, are being stored."""
        for tracked, each in zip(requests, objects, strict=True):
            if tracked.stored is not None:
                tracked.stored.add((each.group, each.chunk_index))

    def told(self, request: "Request", tracked: Tracked | None) -> dict[str, int] | None:
        """What the prefill engine answers at the end of a request: the hint for the decode engine, or None if
        it was an ordinary request. `tracked` is None without a server."""
        params = _params(request)
        if params.get("do_remote_decode") is not True or TOLD in params:
            return None
        # Of several connectors in an engine, only one answers: vLLM fails if two return the same key.
        request.kv_transfer_params = {**params, TOLD: True}
        return {WAIT_TOKENS: self._resume_tokens(tracked) if tracked is not None else 0}

    def _resume_tokens(self, tracked: Tracked) -> int:
        """Where the prompt can be resumed when all is stored that the server has or gets."""
        stored, chunks = tracked.stored, tracked.chunks(tracked.request.num_prompt_tokens)
        # What will not come back is not written to tiers.
        if stored is None or tracked.once or tracked.root != ROOT_KEY:
            return 0
        present = [
            bytes((group, chunk) in stored or tracked.holds(group, chunk) for chunk in range(chunks))
            for group in range(len(self._groups))
        ]
        return resume_point(self._groups, tracked.chunk_size, present, 0, chunks * tracked.chunk_size)

    # -- decode -----------------------------------------------------------------------------------

    def pauses(self, tracked: Tracked) -> bool:
        """Whether it is too early to ask the server again."""
        pauses = tracked.wait is not None and self._now_s() < tracked.wait.until_s
        self._has_paused |= pauses
        return pauses

    def goes_on(
        self, tracked: Tracked, state: Promised | None, computed: int, limit: int, is_heard: bool
    ) -> bool:
        """Whether to ask again later, after the answer `state`. `is_heard` says that the server answers."""
        wait, now_s = tracked.wait, self._now_s()
        if wait is None:
            return False
        wait.since_s = now_s if wait.since_s is None else wait.since_s
        is_cautious, waited_s = now_s < self._cautious_until_s, now_s - wait.since_s
        timeout_s = self._timeout_s * (CAUTION_SHARE if is_cautious else 1)
        wanted = min(wait.tokens, limit) // tracked.chunk_size * tracked.chunk_size
        has_all = max(computed, state.found.resume_tokens if state else 0) >= wanted
        if has_all or not is_heard or waited_s >= timeout_s:
            tracked.wait = None
            if is_heard:
                self._cautious_until_s = -math.inf if has_all else now_s + CAUTION_S
            return False
        pause_s = max(MIN_PAUSE_S, waited_s * PAUSE_SHARE)
        wait.until_s = min(now_s + pause_s, wait.since_s + timeout_s)
        self._has_paused = True
        return True

    def has_paused(self) -> bool:
        """Whether a request has paused since the last call. An engine that has nothing else to do would spin
        until it may ask again."""
        has_paused, self._has_paused = self._has_paused, False
        return has_paused


def _params(request: "Request") -> dict[str, Any]:
    params = request.kv_transfer_params
    return params if isinstance(params, dict) else {}
