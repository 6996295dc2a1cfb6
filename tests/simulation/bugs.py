"""Bugs to put in on purpose, each of which the simulation must find: a check that cannot fail is none."""

from collections.abc import Callable
from typing import Any

from lmcache_client.channel import Channel
from lmcache_client.connector import lookups as lookups_module
from lmcache_client.connector import translate, weights
from lmcache_client.connector.connector import LMCacheMPConnector
from lmcache_client.connector.held_blocks import HeldBlocks
from lmcache_client.connector.offers import Offers
from lmcache_client.connector.scheduler import SchedulerSide
from lmcache_client.contract.geometry import SLIDING_WINDOW, GroupSpec
from lmcache_client.engine import Scheduler
from lmcache_client.servers import Servers, Together
from lmcache_server.core.cache import Cache
from lmcache_server.core.leases import LeaseTable
from lmcache_server.options import NAMES
from lmcache_server.service.registry import Registry
from lmcache_server.service.sessions import Engines
from simulation.drafts import DraftingEngine
from simulation.engine import Engine
from simulation.network import ClientSystem

OF_TIERS: tuple[Callable[[], None], ...] = ()
if "tiers" in NAMES:
    from simulation.bugs_of_tiers import OF_TIERS


def _blocks_not_held() -> None:
    hold = HeldBlocks.hold

    def careless(self: HeldBlocks, block_ids: list[int]) -> int:
        return hold(self, [])

    HeldBlocks.hold = careless  # type: ignore[method-assign]


def _settled_when_broken() -> None:
    Channel._is_over = lambda self, lost: True  # type: ignore[method-assign]


def _no_descriptor_means_dead() -> None:
    Channel._is_over = lambda self, lost: lost.server is None or lost.server.ended()  # type: ignore[method-assign]
    ClientSystem.open_process = lambda self, pid: None  # type: ignore[method-assign]


def _settled_by_another_server() -> None:
    is_over = Channel._is_over
    Channel._is_over = lambda self, lost: bool(self.boot_id) or is_over(self, lost)  # type: ignore[method-assign]


def _welcomed_while_copying() -> None:
    Registry._copying = lambda self, client_id: []  # type: ignore[method-assign]


def _answers_believed() -> None:
    lookups_module.fits = lambda *_: True  # type: ignore[attr-defined]


def _engine_ids_not_compared() -> None:
    Engines.fits = lambda self, engine_id, rank, model, ephemeral: True  # type: ignore[method-assign]


def _window_too_short() -> None:
    first_needed_token = GroupSpec.first_needed_token

    def short(self: GroupSpec, resume_tokens: int) -> int:
        one_block = self.block_size if self.kind == SLIDING_WINDOW else 0
        return first_needed_token(self, resume_tokens) + one_block

    GroupSpec.first_needed_token = short  # type: ignore[method-assign]


def _failed_store_committed() -> None:
    def trusting(self: Cache, reservation: Any) -> None:
        self.commit(reservation)

    Cache.abort = trusting  # type: ignore[method-assign]


def _load_of_an_evicted_chunk() -> None:
    def blind(self: Cache, _chunk: Any) -> None:
        return None

    Cache._take_refs = blind  # type: ignore[method-assign]


def _late_answer_kept() -> None:
    Scheduler._release_late = lambda self, reply: None  # type: ignore[method-assign]


def _leases_outlive_sessions() -> None:
    LeaseTable.of_owner = lambda self, owner: []  # type: ignore[method-assign]


def _overdue_never_noticed() -> None:
    import lmcache_client.channel

    lmcache_client.channel.OVERDUE_S = 1e9


def _failed_load_offered_again() -> None:
    worker_output = SchedulerSide.worker_output

    def forgetful(self: SchedulerSide, output: Any) -> None:
        output.failed_recving = set()
        worker_output(self, output)

    SchedulerSide.worker_output = forgetful  # type: ignore[method-assign]


def _reset_keeps_the_keys() -> None:
    reset = SchedulerSide.reset

    def half(self: SchedulerSide) -> None:
        root = self._root
        reset(self)
        self._root = root
        for tracked in self.lookups.requests.values():
            tracked.root = root

    SchedulerSide.reset = half  # type: ignore[method-assign]


def _promise_outlives_a_reset() -> None:
    reset = SchedulerSide.reset

    def half(self: SchedulerSide) -> None:
        tracked = dict(self.lookups.requests)
        self.lookups.requests.clear()
        reset(self)
        self.lookups.requests.update(tracked)

    SchedulerSide.reset = half  # type: ignore[method-assign]


def _pins_end_with_their_engine() -> None:
    drop_owner = Cache.drop_owner

    def eager(self: Cache, owner: int) -> int:
        for name in list(self.named_pins.names):
            self.unpin(name)
        return drop_owner(self, owner)

    Cache.drop_owner = eager  # type: ignore[method-assign]


def _old_chunks_kept() -> None:
    Cache.forget_old = lambda self, namespace, before_s, most: 0  # type: ignore[method-assign]


def _one_promise_is_enough() -> None:
    """Of several servers, the one that gives least is believed to speak for all."""
    Servers._agree = staticmethod(lambda found, least: True)  # type: ignore[method-assign]


def _promises_kept_when_one_server_fails() -> None:
    made = Together.__init__

    def without_failure(self: Together, parts: Any, merge: Any, _: Any = None) -> None:
        made(self, parts, merge)

    Together.__init__ = without_failure  # type: ignore[method-assign]


def _state_stored_before_its_drafts_are_verified() -> None:
    # As the early stages of a pipeline, which learn in the next step which drafts were right.
    DraftingEngine._verify = Engine._verify  # type: ignore[method-assign]
    Offers._is_final = lambda *_: True  # type: ignore[method-assign]


def _configurations_not_in_the_name() -> None:
    translate.named = lambda *_: iter(())  # type: ignore[attr-defined]
    translate._digest = lambda hf_config: ""


def _layouts_not_in_the_name() -> None:
    translate._group_tag = lambda *_: ""


def _weights_not_in_the_name() -> None:
    translate._weights_mark = lambda *_: "the weights"


def _late_weights_not_in_the_name() -> None:
    def early(self: LMCacheMPConnector, weights: Any) -> None:
        assert self._worker is not None
        self._worker.start()

    LMCacheMPConnector._start_late = early


def _changed_weights_named_by_their_new_content() -> None:
    weights.is_older = lambda *_: True


def _weights_of_one_engine_only_are_of_all() -> None:
    translate._own = lambda _: "of an engine"


BUGS: dict[str, Callable[[], None]] = {
    bug.__name__.strip("_"): bug
    for bug in (
        _blocks_not_held,
        _settled_when_broken,
        _no_descriptor_means_dead,
        _settled_by_another_server,
        _welcomed_while_copying,
        _answers_believed,
        _engine_ids_not_compared,
        _window_too_short,
        _failed_store_committed,
        _load_of_an_evicted_chunk,
        _late_answer_kept,
        _leases_outlive_sessions,
        _overdue_never_noticed,
        _failed_load_offered_again,
        _reset_keeps_the_keys,
        _promise_outlives_a_reset,
        _pins_end_with_their_engine,
        _old_chunks_kept,
        _one_promise_is_enough,
        _promises_kept_when_one_server_fails,
        _state_stored_before_its_drafts_are_verified,
        _configurations_not_in_the_name,
        _layouts_not_in_the_name,
        _weights_not_in_the_name,
        _late_weights_not_in_the_name,
        _changed_weights_named_by_their_new_content,
        _weights_of_one_engine_only_are_of_all,
        *OF_TIERS,
    )
}

FOUND_BY = {
    "blocks_not_held": 4,
    "settled_when_broken": 68,
    "no_descriptor_means_dead": 68,
    "settled_by_another_server": 107,
    "welcomed_while_copying": 286,
    "answers_believed": 10,
    "engine_ids_not_compared": 12,
    "window_too_short": 13,
    "failed_store_committed": 0,
    "load_of_an_evicted_chunk": 0,
    "late_answer_kept": 38,
    "leases_outlive_sessions": 4,
    "overdue_never_noticed": 2,
    "failed_load_offered_again": 18,
    "reset_keeps_the_keys": 1,
    "promise_outlives_a_reset": 38,
    "pins_end_with_their_engine": 1,
    "old_chunks_kept": 0,
    "one_promise_is_enough": 29,
    "promises_kept_when_one_server_fails": 1403,
    "state_stored_before_its_drafts_are_verified": 203,
    "configurations_not_in_the_name": 2,
    "layouts_not_in_the_name": 4,
    "weights_not_in_the_name": 10,
    "late_weights_not_in_the_name": 28,
    "changed_weights_named_by_their_new_content": 36,
    "weights_of_one_engine_only_are_of_all": 36,
    "records_not_checked": 31,
    "failed_fetches_keep_their_frames": 18,
    "calls_that_hang_are_given_up": 133,
    "written_while_evicted": 13,
    "lookups_wait_for_whole_fetches": 3,
}
"""A seed that finds each. When none of another version does, `make simulate-bugs` says which one does now."""
