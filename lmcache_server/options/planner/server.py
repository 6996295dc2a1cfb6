"""The hit rates that more or less memory would have had, from the lookups that this server answers."""

import functools
from typing import Any

from prometheus_client import Gauge

from lmcache_client.contract.geometry import FULL, RECURRENT
from lmcache_client.contract.messages import Lookup, Release
from lmcache_server.core.cache import Hit, Layout
from lmcache_server.core.pool import FRAME_BYTES
from lmcache_server.options.planner.demand import SIZES, WINDOWS, Demand, Sizes, rates
from lmcache_server.options.planner.recording import Event, EventKind, Recorder, shortened
from lmcache_server.service.option import Base, Option
from lmcache_server.service.requests_of_tests import is_test
from lmcache_server.telemetry.metrics import Metric

MAX_ASKED = 16_384
HIT_RATIO = Metric(
    Gauge,
    "lmcache_demand_hit_ratio",
    "Hit rate that an L1 of so many times the size would have had in the last hour.",
    {"l1": SIZES},
)


class Server(Option):
    """Counts every lookup in `demand`, and reports hit rates at other sizes of L1."""

    METRICS = (HIT_RATIO,)

    def __init__(self, base: Base) -> None:
        super().__init__(base)
        path = base.config.of_options.get("record")
        self._recorder = Recorder(path) if path else None
        self.demand = Demand()
        self._now_s = 0.0
        self._cache = base.cache
        for size in SIZES:
            base.metrics.gauge(HIT_RATIO.name, functools.partial(self.hit_ratio, size), l1=size)
        self._sizes: dict[bytes, Sizes] = {}
        self._asked: dict[tuple[int, str], None] = {}
        """Requests that were counted and have not ended: the engine may ask again in every step."""

    def looked_up(
        self, session_id: int, layout: Layout, message: Lookup, hit: Hit, fetched: int, now_s: float
    ) -> None:
        request = (session_id, message.request_id)
        if is_test(layout, message.request_id) or request in self._asked:
            return
        if message.request_id:
            self._asked[request] = None
            if len(self._asked) > MAX_ASKED:
                del self._asked[next(iter(self._asked))]
        self._now_s = now_s
        tokens = message.computed_tokens, message.limit_tokens
        sizes, keys = self._sizes_of(layout), message.keys
        self.demand.looked_up(layout.namespace, sizes, keys, *tokens, now_s)
        self._record("lookup", layout, sizes, keys, tokens)

    def released(self, session_id: int, layout: Layout, message: Release) -> None:
        """A request may have ended. It has computed or loaded the chain of the message's keys."""
        self._asked.pop((session_id, message.request_id), None)
        if message.keys and not is_test(layout, message.request_id):
            sizes = self._sizes_of(layout)
            self.demand.completed(layout.namespace, sizes, message.keys)
            self._record("end", layout, sizes, message.keys, (0, 0))

    def _record(
        self, kind: EventKind, layout: Layout, sizes: Sizes, keys: tuple[bytes, ...], tokens: tuple[int, int]
    ) -> None:
        if self._recorder is None:
            return
        time_s, namespace = round(self._now_s, 3), layout.namespace.hex()[:16]
        frames = round(sizes.chunk_frames * self._factor())
        shape = (sizes.chunk_size, frames, sizes.sparse, sizes.states)
        self._recorder.add(Event(time_s, kind, namespace, *shape, *tokens, shortened(keys)))

    def tick(self, now_s: float) -> None:
        """Takes over the time and the size of L1, which may still grow, and writes the record to its file."""
        self._now_s = now_s
        # The demand counts full attention only, but windows and states take room, too.
        self.demand.l1_frames = self._cache.total_frames / self._factor()
        if self._recorder is not None:
            self._recorder.flush()

    def stop(self) -> None:
        self.tick(self._now_s)

    def _sizes_of(self, layout: Layout) -> Sizes:
        if layout.namespace not in self._sizes:
            known = self._cache.namespaces()
            self._sizes = {name: sizes for name, sizes in self._sizes.items() if name in known}
            self._sizes[layout.namespace] = _sizes(layout)
        return self._sizes[layout.namespace]

    def report(self, now_s: float) -> dict[str, Any]:
        """A hit rate is a share of the tokens that engines looked up and did not hold."""
        self._now_s = now_s
        exact = self.demand.exact_frames()
        exact_bytes = None if exact is None else int(exact * self._factor()) * FRAME_BYTES
        windows = {name: self._window(name) for name in WINDOWS}
        return {"demand": {"exact_bytes": exact_bytes, "windows": windows}}

    def hit_ratio(self, size: str) -> float:
        """The hit rate that an L1 of this size, one of SIZES, would have had in the last hour."""
        return float(rates(self.demand.window("hour", self._now_s).values())["hit_rates"][size])

    def _window(self, name: str) -> dict[str, Any]:
        counts = self.demand.window(name, self._now_s)
        namespaces = {name.hex()[:16] or "others": rates([counted]) for name, counted in counts.items()}
        return {**rates(counts.values()), "namespaces": namespaces}

    def _factor(self) -> float:
        """The frames in use, divided by those of full attention: above 1 if there are windows or states."""
        chunks = self._cache.namespaces()
        plain = sum(
            sizes.chunk_frames * len(chunks.get(namespace, ())) for namespace, sizes in self._sizes.items()
        )
        return max(self._cache.used_frames / plain, 1.0) if plain else 1.0


def _sizes(layout: Layout) -> Sizes:
    has_full = any(group.kind == FULL for group in layout.groups)
    frames = sum(
        len(ranks) * -(-group.block_bytes * (layout.chunk_size // group.block_size) // FRAME_BYTES)
        for group, ranks in zip(layout.groups, layout.holders, strict=True)
        if group.kind == FULL or not has_full
    )
    sparse = has_full and any(group.kind != FULL for group in layout.groups)
    # By default vLLM offers the states of prompts, but none of answers.
    states = any(group.kind == RECURRENT for group in layout.groups)
    return Sizes(layout.chunk_size, max(frames, 1), sparse, states)
