"""One history: engines, tenants and a server under faults that a seed decides, and what must hold after."""

import functools
import logging
import math
import random
from collections.abc import Callable

from lmcache_client.contract.geometry import CHUNKED_LOCAL, FULL, RECURRENT, SLIDING_WINDOW
from lmcache_client.engine import RELEASE_S
from simulation.engine import LOAD_TIMEOUT_S, Engine, Model
from simulation.machine import TICK_S, Faults, SimulatedServer
from simulation.network import Network
from simulation.tiers import FAULTS, Store, unrest
from simulation.world import Process, World

for _name in ("lmcache_server", "vllm.lmcache_mp", "vllm"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)

FULL_8 = (FULL, 4, 0)
SHAPES = (
    (FULL_8,),
    (FULL_8, (SLIDING_WINDOW, 4, 11)),
    (FULL_8, (RECURRENT, 8, 0)),
    ((CHUNKED_LOCAL, 4, 16), FULL_8),
    ((RECURRENT, 8, 0), (FULL, 8, 0), (SLIDING_WINDOW, 4, 6)),
)
CHUNK_TOKENS = 8
SALTS = ("", "", "tenant a", "tenant b")
TIERED = (1, 3)
"""Which of five seeds have tiers. --max-age, which another one has, cannot be combined with them."""
FAULTY_S = 25.0
SETTLE_S = 900.0
"""Longer than any deadline or silence that the product knows."""


class Scenario:
    """See the module. `run` raises AssertionError with what went wrong."""

    def __init__(self, seed: int, trace: bool = False) -> None:
        self.world = World(seed)
        if trace:
            self.world.trace = []
        draw = self.world.random
        self.network = Network(self.world)
        self.faults = Faults()
        self.engines: list[Engine] = []
        self.lives: list[SimulatedServer] = []
        """All there were: memory of the dead must stay for copies that are under way."""
        self.frames = draw.choice((6, 12, 24, 60))
        self.ephemeral = "" if seed % 4 else "two"
        self.max_age_s = math.inf if seed % 5 else 3.0
        self.lease_s = draw.choice((2.0, 20.0, 120.0))
        self.same_ids = draw.choice((0.0, 0.0, 0.0, 0.5))
        """How many engines have the engine_id of another one that runs."""
        shapes = draw.sample(SHAPES, 2)
        self.models = [
            Model("one", "one", shapes[0], draw.choice((1, 1, 2))),
            Model("two", "two", shapes[draw.choice((0, 1))], 1),
        ]
        self.prompts = _prompts(draw)
        self._requests = 0
        self.pins = seed % 3 == 1
        self._to_pin: list[str] = []
        """Requests that were watched for, the latest last."""
        self._next_pid = 100
        self.stores = _stores(self.world) if seed % 5 in TIERED else []
        self.salts = SALTS[1::2] if self.stores else SALTS
        self.frames = max(self.frames, 24) if self.stores else self.frames
        del self.prompts[3 if self.stores else 5 :]

    # -- who there is -----------------------------------------------------------------------------

    def _process(self, name: str) -> Process:
        """A process; sometimes with the id of one that has exited."""
        free = [pid for pid, process in self.world.processes.items() if process.exited]
        if free and self.world.chance(0.5):
            pid = self.world.random.choice(free)
        else:
            self._next_pid += 1
            pid = self._next_pid
        self.world.processes[pid] = Process(self.world, pid, name)
        return self.world.processes[pid]

    def start_server(self) -> None:
        if self.lives and not self.lives[-1].process.exited:
            return
        process = self._process(f"server {len(self.lives)}")
        self.world.note(f"start {process.name}")
        self.lives.append(
            SimulatedServer(
                self.network,
                process,
                self.frames,
                CHUNK_TOKENS,
                self.lease_s,
                self.faults,
                self.ephemeral,
                self.max_age_s,
                self.stores,
                len(self.lives),
            )
        )

    @property
    def server(self) -> SimulatedServer | None:
        return self.lives[-1] if self.lives and not self.lives[-1].process.killed else None

    @property
    def running(self) -> list[Engine]:
        return [engine for engine in self.engines if not engine.processes[0].killed and not engine.closing]

    def start_engine(self) -> None:
        draw = self.world.random
        model = draw.choice(self.models)
        name = f"engine {len(self.engines)}"
        if self.running and self.world.chance(self.same_ids):
            self.world.count("engine ids given twice")
            name = draw.choice(self.running).engine_id
        processes = [self._process(f"{name}.{index}") for index in range(1 + model.ranks)]
        self.world.note(f"start {name}")
        engine = Engine(self.network, model, name, processes, draw.choice((24, 40, 80)))
        self.engines.append(engine)
        self.world.spawn(lambda: self._live(engine), processes[0])

    def _live(self, engine: Engine) -> None:
        """Runs the engine to its end, in a task. A nonce that is nonsense makes an honest server refuse the
        engine: its process then ends, and another is started."""
        try:
            engine.run()
        except ValueError:
            if not self.world.counts.get("replies of nonsense"):
                raise
            self.world.count("starts refused")
            self.world.after(0.0, lambda: self._end(engine))

    # -- what happens -----------------------------------------------------------------------------

    def request(self, prompt: list[int] | None = None) -> None:
        if not self.running:
            return
        draw = self.world.random
        engine = draw.choice(self.running)
        # A request must fit into the engine, or it waits for ever, with or without a cache.
        limit = 4 * (engine.pool.num_gpu_blocks // len(engine.groups) - 3)
        prompt = prompt or draw.choice(self.prompts)
        tokens = prompt[: draw.randint(1, max(1, min(len(prompt), limit - 12)))]
        self._requests += 1
        self.world.count("requests")
        name = f"request {self._requests:08d}"
        if self.pins and self._hears and self.world.chance(0.2):
            self.server.pin("", name)
            self._to_pin.append(name)
        engine.add(name, tokens, draw.choice(self.salts), draw.randint(1, 10))

    def abort(self) -> None:
        for engine in self.running:
            engine.abort_one()

    def reset_engine(self) -> None:
        if self.running:
            self.world.random.choice(self.running).reset_soon()

    def kill_server(self) -> None:
        if self.server is not None:
            self.world.count("servers killed")
            # The next one can have the address as soon as this one has exited.
            later_s = self.world.random.choice((0.0, 0.05, 0.5, 8.0))
            self.server.process.at_exit.append(lambda: self.world.after(later_s, self.start_server))
            if self.world.chance(0.5):
                self.server.dies_at_next_load = True
            else:
                self.server.process.kill()

    def stop_server(self) -> None:
        """SIGTERM, and at the same moment every client connects anew."""
        if self.server is not None:
            self.world.count("servers ended")
            self.server.process.at_exit.append(lambda: self.world.after(0.05, self.start_server))
            self.server.stop()
            for link in list(self.network.links):
                link.break_off()

    def freeze_server(self) -> None:
        if self.server is not None:
            self.world.count("servers stopped")
            self.server.freeze(self.world.random.choice((0.01, 0.5, 2.0, 12.0)))

    def kill_engine(self) -> None:
        if self.running:
            self.world.count("engines killed")
            self._end(self.world.random.choice(self.running))

    def _end(self, engine: Engine) -> None:
        for process in engine.processes:
            process.kill()
        self.world.after(self.world.random.choice((0.0, 0.1, 3.0)), self.start_engine)

    def pause_engine(self) -> None:
        if self.running:
            self.world.random.choice(self.running).pause(self.world.random.choice((0.3, 3.0, 20.0)))

    def break_link(self) -> None:
        if self.network.links:
            self.world.count("connections broken")
            self.world.random.choice(self.network.links).break_off()

    def clear(self) -> None:
        if self.server is not None and not self.server.frozen_s():
            self.server.cache.clear()

    def lose_tier(self) -> None:
        self.world.random.choice(self.stores).lose()

    def tier_goes_away(self) -> None:
        draw = self.world.random
        draw.choice(self.stores).go_away(draw.choice((0.5, 3.0, 12.0)))

    @property
    def _hears(self) -> bool:
        return self.server is not None and not self.server.frozen_s()

    def pin(self) -> None:
        """A user pins a request that he has sent, or unpins a name."""
        if not self._hears:
            return
        name = self.world.random.choice(("mine", "yours"))
        if self.world.chance(0.15):
            self.server.unpin(name)
        elif self._to_pin and self.server.pin(name, self._to_pin.pop()):
            self.world.count("pins")

    def jump(self) -> None:
        self.world.count("clock jumps")
        self.world.jump(self.world.random.choice((1.0, 20.0, 400.0)))

    def _every(self, mean_s: float, what: Callable[[], None], until_s: float) -> None:
        def happen() -> None:
            if self.world.now_s < until_s:
                what()
                self.world.after(self.world.random.expovariate(1 / mean_s), happen)

        self.world.after(self.world.random.expovariate(1 / mean_s), happen)

    # -- the whole --------------------------------------------------------------------------------

    def run(self) -> dict[str, int]:
        """Returns what was counted."""
        draw, world = self.world.random, self.world
        end_s = world.now_s + FAULTY_S
        if world.chance(0.8):
            self.start_server()
        else:
            world.after(draw.uniform(0, 3), self.start_server)
        for _ in range(draw.choice((1, 2, 2, 3))):
            self.start_engine()
        self._every(draw.choice((0.15, 0.3, 0.8)), self.request, end_s)
        menu = (
            (4.0, self.kill_server), (5.0, self.freeze_server), (5.0, self.kill_engine),
            (5.0, self.pause_engine), (1.0, self.break_link), (3.0, self.clear), (0.7, self.abort),
            (12.0, self.jump), (3.0, self.reset_engine), (6.0, self.stop_server),
        )  # fmt: skip
        if self.pins:
            self._every(0.8, self.pin, end_s)
        for mean_s, fault in menu:
            # With tiers there is less of all else: what has left L1 must be asked for again.
            if world.chance(0.15 if self.stores else 0.4):
                self._every(mean_s * draw.choice((0.5, 1, 3)), fault, end_s)
        if world.chance(0.3):
            self.network.reply_loss = draw.choice((0.002, 0.05))
        if world.chance(0.4):
            self.faults.copy_failure = draw.choice((0.01, 0.2))
        if world.chance(0.2):
            self.network.nonsense = draw.choice((0.002, 0.05))
        if world.chance(0.3):
            self.faults.hung_copy = draw.choice((0.005, 0.05))
        if world.chance(0.4):
            self.faults.slow_copy = draw.choice((0.01, 0.1))
        self.faults.piece_s = draw.choice((0.0001, 0.001, 0.01))
        self.network.delay_s = draw.choice((0.00002, 0.0002, 0.002))
        if self.stores and world.chance(0.5):
            self._every(4.0, self.kill_server, end_s)
        for mean_s, fault in ((8.0, self.lose_tier), (5.0, self.tier_goes_away)):
            if self.stores and world.chance(0.4):
                self._every(mean_s * draw.choice((0.5, 1, 3)), fault, end_s)
        world.run(lambda: False, FAULTY_S)
        self._calm_down()
        world.is_over = True
        return world.counts

    def _unheard(self) -> int:
        """How many replies did not reach their client as they were."""
        return self.world.counts.get("replies lost", 0) + self.world.counts.get("replies of nonsense", 0)

    def _calm_down(self) -> None:
        """No more faults: everything must come to an end, and nothing be left."""
        world = self.world
        for life in self.lives:
            life.dies_at_next_load = False
        self.network.reply_loss = self.faults.copy_failure = self.faults.slow_copy = 0.0
        self.network.nonsense = self.faults.hung_copy = 0.0
        self.faults.return_all()
        for store in self.stores:
            store.recover()
        world.run(lambda: False, 12.0)
        self.start_server()
        back = world.run(lambda: self.server is not None and not self.server.is_ending, SETTLE_S)
        assert back, "a server never ended"
        self._come_to_rest()
        if self.stores and world.chance(0.5):
            self._ask_a_new_server()
        server = self.server
        assert server is not None
        # The last words of the engines arrive; leases of those that were killed are over.
        limit_s = SETTLE_S if self._unheard() else RELEASE_S + TICK_S
        tiers_rest = world.run(lambda: not unrest(server), SETTLE_S)
        assert tiers_rest, f"tiers are not at rest: {unrest(server)}"
        still = world.run(functools.partial(_is_at_rest, server), limit_s)
        assert still, f"the server holds {server.cache.num_leases} leases, {server.cache.num_readers} readers"
        server.cache.check_integrity()
        for engine in self.running:
            world.spawn(engine.close, engine.processes[0])
        gone = world.run(lambda: not server.router.registry.sessions, 30.0)
        assert gone, "a session outlives its client"
        assert not list(server.router.registry.engines)
        assert all(copier.closed for copier in server.copiers), "a copy thread outlives its session"

    def _ask_a_new_server(self) -> None:
        """The server is killed, and a new one has what the tiers have: good records, and those that faults
        have left."""
        self.kill_server()
        for life in self.lives:
            life.dies_at_next_load = False
            life.process.kill()
        self.world.run(lambda: False, 12.0)
        for prompt in self.prompts * 2:
            self.request(prompt)
        self._come_to_rest()

    def _come_to_rest(self) -> None:
        world = self.world
        idle = world.run(lambda: all(engine.idle for engine in self.running), SETTLE_S)
        assert idle, "a request never ended"
        for engine in self.running:
            engine.forget_prefixes()
        settled = world.run(lambda: all(map(_is_whole, self.running)), SETTLE_S)
        assert settled, "an engine holds blocks for ever: " + str([*map(_held, self.running)])


def _stores(world: World) -> list[Store]:
    """One tier or two, each with its own weaknesses."""
    draw, stores = world.random, []
    for _ in range(draw.choice((1, 1, 2))):
        store = Store(world, world.chance(0.3), draw.choice((0.0002, 0.005, 0.1)))
        for fault in FAULTS:
            if world.chance(0.3):
                store.chances[fault] = draw.choice((0.02, 0.2))
        stores.append(store)
    return stores


def _prompts(draw: random.Random) -> list[list[int]]:
    """Prompts that share prefixes of many lengths."""
    prompts = [[draw.randrange(50) for _ in range(60)]]
    while len(prompts) < 5:
        stem = draw.choice(prompts)[: draw.randrange(40)]
        prompts.append(stem + [draw.randrange(50) for _ in range(60 - len(stem))])
    return prompts


def _is_whole(engine: Engine) -> bool:
    return engine.pool.get_num_free_blocks() == engine.pool.num_gpu_blocks - 1


def _held(engine: Engine) -> tuple[int, int]:
    return engine.pool.num_gpu_blocks - 1 - engine.pool.get_num_free_blocks(), len(engine.scheduler.held)


def _is_at_rest(server: SimulatedServer) -> bool:
    cache = server.cache
    return not (cache.num_leases or cache.num_readers or unrest(server))


assert LOAD_TIMEOUT_S < SETTLE_S
