"""The requests of an engine, and what the server promises to each: a resume point, and a lease on it.

Nothing here blocks vLLM's scheduler, except for at most a millisecond for each lookup. After a wait in vain,
no other lookup of the step waits.
"""

from logging import DEBUG
from typing import TYPE_CHECKING

from msgspec.structs import replace

from lmcache_client.connector import stats
from lmcache_client.connector.early_lookups import FRESH_S, EarlyLookups, is_enough, is_stale
from lmcache_client.connector.log import logger, trace
from lmcache_client.connector.option import Engine, Option, Options, replaced
from lmcache_client.connector.request import Asking, PrefillSpeed, Promised, Tracked, fits, why_not_more
from lmcache_client.connector.stats import TransferStats
from lmcache_client.contract.admission import known_chunks
from lmcache_client.contract.geometry import RECURRENT
from lmcache_client.contract.hits import fetch_patience_s
from lmcache_client.contract.messages import Found, Joined, Lookup

if TYPE_CHECKING:
    from vllm.v1.request import Request

LOOKUP_WAIT_S, FRESH_LOOKUP_S = 0.001, 0.01


class Lookups:
    """Asks the server about an engine's requests."""

    def __init__(self, engine: Engine, options: Options, counts: TransferStats) -> None:
        self.requests: dict[str, Tracked] = {}
        """By its id, each request that has not ended."""
        self.early, self.prefill = EarlyLookups(), PrefillSpeed()
        self.chunk_size = 0
        self.may_wait = True
        """False after a wait without an answer, until the next step: the server is slow, or gone."""
        self._fetches = False
        """Whether the server has tiers, so that its answers may take longer."""
        self._client, self._channel = engine.client, engine.client.channel
        self._groups, self._loads, self._now_s = engine.groups, engine.loads, engine.system.now_s
        self._has_states = any(group.kind == RECURRENT for group in engine.groups)
        self._timeout_s = engine.settings.lookup_timeout_s
        self._told, self._stats = replaced(options, Option.answered), counts
        self._pauses, self._goes_on = replaced(options, Option.pauses), replaced(options, Option.goes_on)

    def joined(self, joined: Joined) -> None:
        """The engine is registered, perhaps anew."""
        self.chunk_size, self._fetches = joined.chunk_size, joined.fetches

    def arrived(self, tracked: Tracked) -> None:
        """A request has arrived. Asks the server, if that is likely to be of use before vLLM asks."""
        request = tracked.request
        self.requests[request.request_id] = tracked
        # A tier should not fetch what the engine has itself, which nobody knows yet.
        is_read = self._loads and not request.skip_reading_prefix_cache and not self._fetches
        if not is_read or not self._channel.responsive or self.current(request.request_id) is None:
            return
        keys = tracked.keys_of(tracked.chunks(request.num_tokens))
        if self.early.wants(request.request_id, keys):
            self._send(tracked, 0, len(keys) * self.chunk_size, early=True)

    def matched_tokens(self, request: "Request", computed: int) -> tuple[int | None, bool]:
        """As SchedulerSide.matched_tokens."""
        self.early.asked(request.request_id)
        tracked = self.current(request.request_id)
        if tracked is None or not self._loads or request.skip_reading_prefix_cache:
            return 0, False
        limit = tracked.chunks(request.num_tokens) * self.chunk_size
        if tracked.no_load or limit <= computed:
            self.forget(tracked)
            return 0, False
        if any(pauses(tracked) for pauses in self._pauses):
            return None, False
        if isinstance(state := self._ask(tracked, computed, limit), Asking):
            return None, False
        if any(goes_on(tracked, state, computed, limit) for goes_on in self._goes_on):
            self.release(tracked)
            return None, False
        if self._has_states:
            tracked.end_a_step_at_the_fork(computed)
        if state is None or state.found.resume_tokens <= computed:
            if state and state.is_early:
                self.early.accept(tracked.name, computed)
            self.release(tracked)
            if state:  # vLLM asks again in every step as long as the request waits for blocks
                found = replace(state.found, lease_id=0)
                tracked.state = state._replace(found=found, computed=computed, is_early=False)
            return 0, False
        return state.found.resume_tokens - computed, True

    def _ask(self, tracked: Tracked, computed: int, limit: int) -> Asking | Promised | None:
        """The state of the request's lookup: Asking until the next step, Promised with the answer, or None
        if there is no answer."""
        state, now_s = tracked.state, self._now_s()
        if isinstance(state, Promised):
            until_s = state.since_s + state.found.lease_s / 2
            if not state.found.lease_id:  # a miss: the server may have more by now
                until_s = state.answered_s + FRESH_S
            # If the engine has computed more tokens since, the promise covers more than it needs.
            if computed >= state.computed and now_s < until_s:
                return state
            self.release(tracked)
            state = None
        elif state and state.is_early and is_stale(tracked, state, limit, now_s):
            self.forget(tracked)
            state = None
        if state is None:
            if not self._channel.responsive:
                return None
            state = self._send(tracked, computed, limit, self.early.repeats(tracked, limit))
        if not state.lookup.advance():
            # A lookup that waits for a tier holds up no step, and no other lookup.
            waits = self.may_wait and not (self._fetches and now_s - state.since_s > FRESH_LOOKUP_S)
            self._channel.poll(state.lookup, LOOKUP_WAIT_S if waits else 0.0)
            if not state.lookup.advance():
                self.may_wait &= not waits
                return state
        return self._answered(tracked, state, computed)

    def _send(self, tracked: Tracked, computed: int, limit: int, early: bool = False) -> Asking:
        keys, num_tokens = tuple(tracked.keys_of(limit // self.chunk_size)), tracked.request.num_tokens
        name, tenant, speed = tracked.name, tracked.tenant, 0 if tracked.waits else self.prefill.tokens_per_s
        # Asked again after a preemption, for its own answer, it is no later prompt.
        once = tracked.once or tracked.request.num_output_tokens > 0
        question = Lookup(name, keys, computed, limit, num_tokens, speed, early, tenant, tracked.why, once)
        patience_s = fetch_patience_s(num_tokens) if self._fetches else 0
        lookup = self._client.lookup(question, self._timeout_s + patience_s)
        tracked.state = asking = Asking(lookup, computed, limit, self._now_s(), early)
        return asking

    def _answered(self, tracked: Tracked, asked: Asking, computed: int) -> Asking | Promised | None:
        tracked.state, found, answered_s = None, asked.lookup.reply, self._now_s()
        for told in self._told:
            told(tracked, asked, answered_s)
        if not isinstance(found, Found):
            self._stats.count(stats.LATE_LOOKUPS)
            trace(tracked.request.request_id, "not looked up: %s", asked.lookup.error)
            return None
        if not fits(found, self._groups, self.chunk_size, asked.limit):
            # Whatever a server says, the engine goes on: this is a miss.
            trace(tracked.request.request_id, "not looked up: the answer does not fit the question")
            self._client.forget(asked.lookup)
            return None
        tracked.held, tracked.known = found.held, known_chunks(self._groups, found.held)
        tracked.state = promised = Promised(found, asked.computed, asked.since_s, answered_s, asked.is_early)
        if logger.isEnabledFor(DEBUG):
            why = why_not_more(self._groups, self.chunk_size, found, asked)
            text, resume = "can be resumed at %d of %d tokens" + (why and ": " + why), found.resume_tokens
            trace(tracked.request.request_id, text, resume, asked.limit)
        if computed < asked.computed:
            # The engine has lost tokens meanwhile, so the promise is too small: ask again.
            self.release(tracked)
            return asked
        if asked.is_early and not is_enough(self._groups, tracked, found, computed, asked):
            self.release(tracked)
            return self._ask(tracked, computed, asked.limit)
        return promised

    def current(self, request_id: str) -> Tracked | None:
        """The request, without any promises from before the current registration; None without a server."""
        tracked = self.requests.get(request_id)
        if tracked is None or not self._channel.ready:
            return None
        if tracked.generation != self._channel.generation:
            self.forget(tracked)
            tracked.reset(self._channel.generation, self.chunk_size)
        return tracked

    def forget(self, tracked: Tracked) -> None:
        """Gives up the server's promise to this request, or the lookup that still asks for one."""
        if isinstance(tracked.state, Asking):
            self._client.forget(tracked.state.lookup)
            tracked.state = None
        self.release(tracked)

    def release(self, tracked: Tracked) -> None:
        """Gives up the lease of a promise that will not be used any more."""
        if isinstance(state := tracked.state, Promised):
            tracked.state = None
            if state.found.lease_id:
                self._client.release((state.found.lease_id,))
