"""Bugs to put in on purpose, each of which the simulation must find: a check that cannot fail is none."""

from collections.abc import Callable
from typing import Any

from lmcache_client import server_channel
from lmcache_client.connector import lookups, translate, weights
from lmcache_client.connector.connector import LMCacheMPConnector
from lmcache_client.connector.held_blocks import HeldBlocks
from lmcache_client.connector.offers import Offers
from lmcache_client.connector.scheduler import SchedulerSide
from lmcache_client.contract.geometry import SLIDING_WINDOW, GroupSpec
from lmcache_client.server_channel import Channel
from lmcache_client.servers import LookupOfAll, Part
from lmcache_server.core.cache import Cache
from lmcache_server.core.leases import LeaseTable
from lmcache_server.options import NAMES
from lmcache_server.service.engines import Engines
from lmcache_server.service.sessions import Sessions
from simulation.drafts import DraftingEngine
from simulation.engine import Engine
from simulation.network import ClientSystem


def constant(result: Any) -> Callable[[Any], Any]:
    return lambda _: lambda *_, **__: result


def _short_window(first_needed_token: Any) -> Any:
    def short(self: GroupSpec, resume_tokens: int) -> int:
        one_block = self.block_size if self.kind == SLIDING_WINDOW else 0
        return first_needed_token(self, resume_tokens) + one_block  # type: ignore[no-any-return]

    return short


def _forgets_failed_loads(worker_output: Any) -> Any:
    def forgetful(self: SchedulerSide, output: Any) -> None:
        output.failed_recving = set()
        worker_output(self, output)

    return forgetful


def _keeps_its_keys(reset: Any) -> Any:
    def half(self: SchedulerSide) -> None:
        root = self._root
        reset(self)
        self._root = root
        for tracked in self.lookups.requests.values():
            tracked.root = root

    return half


def _keeps_its_promises(reset: Any) -> Any:
    def half(self: SchedulerSide) -> None:
        tracked = dict(self.lookups.requests)
        self.lookups.requests.clear()
        reset(self)
        self.lookups.requests.update(tracked)

    return half


def _unpins_first(drop_owner: Any) -> Any:
    def eager(self: Cache, owner: int) -> int:
        self.unprotect([*self.protected])
        return drop_owner(self, owner)  # type: ignore[no-any-return]

    return eager


def _asks_without_on_late(_of: Any) -> Any:
    @classmethod  # type: ignore[misc]
    def of(cls: type[Part], channel: Channel, message: Any, timeout_s: float) -> Part:
        return cls(channel, channel.submit(message, timeout_s), channel.generation)

    return of


BUGS: dict[str, tuple[Any, ...]] = {
    "blocks_not_held": (4, (HeldBlocks, "hold", lambda hold: lambda self, _, *whose: hold(self, [], *whose))),
    "settled_when_broken": (68, (Channel, "_is_over", constant(True))),
    "no_descriptor_means_dead": (
        68,
        (Channel, "_is_over", lambda _: lambda self, lost: lost.server is None or lost.server.ended()),
        (ClientSystem, "open_process", constant(None)),
    ),
    "settled_by_another_server": (
        107,
        (Channel, "_is_over", lambda right: lambda self, lost: bool(self.boot_id) or right(self, lost)),
    ),
    "welcomed_while_copying": (286, (Sessions, "_copying", constant([]))),
    "answers_believed": (10, (lookups, "fits", constant(True))),
    "engine_ids_not_compared": (12, (Engines, "fits", constant(True))),
    "window_too_short": (13, (GroupSpec, "first_needed_token", _short_window)),
    "failed_store_committed": (0, (Cache, "abort", lambda _: lambda self, it: self.commit(it))),
    "load_of_an_evicted_chunk": (0, (Cache, "_take_refs", constant(None))),
    "late_answer_kept": (38, (Part, "of", _asks_without_on_late)),
    "leases_outlive_sessions": (4, (LeaseTable, "of_owner", constant([]))),
    "overdue_never_noticed": (2, (server_channel, "OVERDUE_S", lambda _: 1e9)),
    "failed_load_offered_again": (18, (SchedulerSide, "worker_output", _forgets_failed_loads)),
    "reset_keeps_the_keys": (1, (SchedulerSide, "reset", _keeps_its_keys)),
    "promise_outlives_a_reset": (73, (SchedulerSide, "reset", _keeps_its_promises)),
    "pins_end_with_their_engine": (1, (Cache, "drop_owner", _unpins_first)),
    "old_chunks_kept": (0, (Cache, "forget_old", constant(0))),
    # Of several servers, the one that gives least is believed to speak for all.
    "one_promise_is_enough": (29, (LookupOfAll, "_agree", constant(True))),
    "promises_kept_when_one_server_fails": (
        857,
        (LookupOfAll, "fail_all", constant(None)),
    ),
    # As the early stages of a pipeline, which learn in the next step which drafts were right.
    "state_stored_before_its_drafts_are_verified": (
        2,
        (DraftingEngine, "_verify", lambda _: Engine._verify),
        (Offers, "_is_final", constant(True)),
    ),
    "configurations_not_in_the_name": (
        2,
        (translate, "named", lambda _: lambda *_: iter(())),
        (translate, "_digest", constant("")),
    ),
    "layouts_not_in_the_name": (4, (translate, "_group_tag", constant(""))),
    "weights_not_in_the_name": (10, (translate, "_weights_mark", constant("the weights"))),
    "late_weights_not_in_the_name": (
        28,
        (LMCacheMPConnector, "_start_late", lambda _: lambda self, _weights: self._worker.start()),
    ),
    "changed_weights_named_by_their_new_content": (36, (weights, "is_older", constant(True))),
    "weights_of_one_engine_only_are_of_all": (36, (translate, "_own", constant("of an engine"))),
}
"""Of each: a seed that finds it, and what it changes: of what, which attribute, and how to spoil it.
When a seed no longer finds its bug, `make simulate-bugs` says which one does."""

if "tiers" in NAMES:
    from simulation.bugs_of_tiers import OF_TIERS

    BUGS |= OF_TIERS


def put_in(bug: str) -> None:
    for owner, name, change in BUGS[bug][1:]:
        setattr(owner, name, change(getattr(owner, name)))
