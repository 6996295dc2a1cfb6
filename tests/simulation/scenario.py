"""One history: engines, tenants and a server under faults that a seed decides, and what must hold after.

In some histories each engine has ranks on three hosts, with a server each. Any of them may fail.
"""

import functools
import logging
import math
import random
from collections.abc import Callable
from dataclasses import replace

from lmcache_client.contract.geometry import CHUNKED_LOCAL, FULL, RECURRENT, SLIDING_WINDOW
from lmcache_client.servers import RELEASE_S
from lmcache_server.options import NAMES
from simulation.drafts import DraftingEngine
from simulation.engine import LOAD_TIMEOUT_S, Engine, Model, Origin
from simulation.machine import TICK_S, Faults, Setup, SimulatedServer
from simulation.network import Link, Network
from simulation.origins import LATEST_S, MIXED, Disk
from simulation.world import Process, World

if "tiers" in NAMES:
    from simulation.tiers import FAULTS, Store, unrest
else:

    def unrest(_server: SimulatedServer) -> list[str]:
        """Without tiers, nothing else can be in their hands."""
        return []


FULL_8 = (FULL, 4, 0)
SHAPES = (
    (FULL_8,),
    (FULL_8, (SLIDING_WINDOW, 4, 11)),
    (FULL_8, (RECURRENT, 8, 0)),
    ((CHUNKED_LOCAL, 4, 16), FULL_8),
    ((RECURRENT, 8, 0), (FULL, 8, 0), (SLIDING_WINDOW, 4, 6)),
)
RECURRENT_SHAPES = tuple(shape for shape in SHAPES if any(kind == RECURRENT for kind, _, _ in shape))
DIVIDING = (4, 5, 6, 10)
"""In which of eleven seeds ranks may divide the tokens of blocks. No older bug needs one of them."""
DIVIDED_SHAPES = ((FULL_8,), (FULL_8, (RECURRENT, 8, 0)), (FULL_8, (RECURRENT, 4, 0)))
"""Those of which two ranks may divide the tokens of full blocks among them."""
CHUNK_TOKENS = 8
SALTS = ("", "", "tenant a", "tenant b")
TIERED = (1, 3) if "tiers" in NAMES else ()
"""Which of five seeds have tiers. --max-age, which another one has, cannot be combined with them."""
DRAFTING = 2
"""Which of three seeds have engines with drafters."""
FAULTY_S = 25.0
SHORT_S = 15.0
"""That of histories in which more is asked at the end."""
SETTLE_S = 900.0
"""Longer than any deadline or silence that the product knows."""


SPLIT = 6
"""Every sixth seed has three servers, and engines with ranks at each of them."""
REPLACING = 11
"""Every eleventh seed has servers that live on while others have their address."""


class Host:
    """Where one server at a time runs. All lives stay: memory of the dead is still copied."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.lives: list[SimulatedServer] = []

    @property
    def server(self) -> SimulatedServer | None:
        return self.lives[-1] if self.lives and not self.lives[-1].process.killed else None


class Scenario:
    """See the module. `run` raises AssertionError with what went wrong."""

    def __init__(self, seed: int, trace: bool = False) -> None:
        for name in ("lmcache_server", "vllm.lmcache_mp", "vllm"):
            # Here, because vLLM sets them when it makes a configuration.
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self.world = World(seed)
        if trace:
            self.world.trace = []
        draw = self.world.random
        self.is_split = seed % SPLIT == SPLIT - 1
        names = [f"host{at}" for at in range(3)] if self.is_split else ["simulated"]
        self.hosts = [Host(Network(self.world, name)) for name in names]
        self.faults = Faults()
        self.engines: list[Engine] = []
        frames, lease_s = draw.choice((6, 12, 24, 60)), draw.choice((2.0, 20.0, 120.0))
        self.same_ids = draw.choice((0.0, 0.0, 0.0, 0.5))
        """How many engines have the engine_id of another one that runs."""
        shapes = draw.sample(SHAPES, 2)
        self.models = [
            Model("one", "one", shapes[0], draw.choice((3, 3, 4) if self.is_split else (1, 1, 2))),
            Model("two", "two", shapes[draw.choice((0, 1))], 3 if self.is_split else 1),
        ]
        if seed % 3 == DRAFTING:
            shape = draw.choice((*SHAPES, *RECURRENT_SHAPES))
            speculation = {"drafts": draw.choice((1, 2, 3)), "lookahead": draw.choice((0, 0, 1))}
            self.models[0] = replace(self.models[0], groups=shape, **speculation)
        elif seed % 11 in DIVIDING and seed % 13 not in MIXED and not self.is_split:
            self._divide(random.Random(f"divided blocks {seed}"))
        self.disk = Disk(self.world, seed) if seed % 13 in MIXED else None
        if self.disk is not None:
            # Only what their origins make of them differs.
            del self.models[1:]
        self.prompts = _prompts(draw)
        self._requests = 0
        self.pins = seed % 3 == 1 and "pins" in NAMES
        self._to_pin: list[str] = []
        """Requests that were watched for, the latest last."""
        self._next_pid = 100
        self.replaces = seed % REPLACING == REPLACING - 3
        self.stores = _stores(self.world) if seed % 5 in TIERED and not self.replaces else []
        self.salts = SALTS[1::2] if self.stores else SALTS
        frames = max(frames, 24) if self.stores else frames
        del self.prompts[3 if self.stores else 5 :]
        if self.disk is not None:
            # So that an engine finds what others have stored.
            self.salts = SALTS[:1]
            frames = 60
            del self.prompts[2:]
        ephemeral, max_age_s = "" if seed % 4 else "two", math.inf if seed % 5 else 3.0
        self.setup = Setup(frames, CHUNK_TOKENS, lease_s, self.faults, ephemeral, max_age_s, self.stores)

    def _divide(self, draw: random.Random) -> None:
        """Two ranks divide the tokens of a block; those of other engines do so in another way, or not."""
        one = replace(self.models[0], groups=draw.choice(DIVIDED_SHAPES), ranks=2, dcp=2)
        self.models = [one, replace(one, name="two", **draw.choice(({"interleave": 2}, {"dcp": 1})))]
        self.world.count("ranks that divide blocks")

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

    def start_server(self, host: Host, beside: bool = False) -> None:
        if host.lives and not host.lives[-1].process.exited and not beside:
            return
        process = self._process(f"server {len(host.lives)} of {host.network.host}")
        self.world.note(f"start {process.name}")
        host.lives.append(SimulatedServer(host.network, process, self.setup, len(host.lives)))

    @property
    def servers(self) -> list[SimulatedServer]:
        return [host.server for host in self.hosts if host.server is not None]

    @property
    def links(self) -> list[Link]:
        return [link for host in self.hosts for link in host.network.links]

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
        networks = [host.network for host in self.hosts]
        kind = DraftingEngine if model.drafts else Engine
        origin = self.disk.origin(name) if self.disk is not None else Origin()
        num_blocks = draw.choice((24, 40, 80) if self.disk is None else (80, 120))
        engine = kind(networks, model, name, processes, num_blocks, origin)
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

    def request(self, prompt: list[int] | None = None, engine: Engine | None = None) -> None:
        """To some engine, or to this one, which then gets all of the prompt that it can take."""
        if not self.running:
            return
        draw = self.world.random
        least = 60 if engine is not None else 1
        engine = engine or draw.choice(self.running)
        # A request must fit into the engine, or it waits for ever, with or without a cache.
        limit = 4 * (engine.pool.num_gpu_blocks // len(engine.groups) - 3)
        prompt = prompt or draw.choice(self.prompts)
        most = max(1, min(len(prompt), limit - 12))
        tokens = prompt[: draw.randint(min(least, most), most)]
        if isinstance(engine, DraftingEngine) and engine.conversations and self.world.chance(0.4):
            # A conversation goes on, so its answer is read again.
            self.world.count("conversations that go on")
            grown = [*draw.choice(engine.conversations[-4:]), *tokens[-5:]]
            tokens = grown[: limit - 12]
        self._requests += 1
        self.world.count("requests")
        name = f"request {self._requests:08d}"
        if self.pins and (server := self._who_hears()) and self.world.chance(0.2):
            server.pin("", name)
            self._to_pin.append(name)
        engine.add(name, tokens, draw.choice(self.salts), draw.randint(1, 10))

    def abort(self) -> None:
        for engine in self.running:
            engine.abort_one()

    def reset_engine(self) -> None:
        if self.running:
            self.world.random.choice(self.running).reset_soon()

    def kill_server(self) -> None:
        host = self.world.random.choice(self.hosts)
        if (server := host.server) is not None:
            self.world.count("servers killed")
            # The next one can have the address as soon as this one has exited.
            later_s = self.world.random.choice((0.0, 0.05, 0.5, 8.0))
            server.process.at_exit.append(lambda: self.world.after(later_s, self.start_server, host))
            if self.world.chance(0.5):
                server.at_next_load = server.process.kill
            else:
                server.process.kill()

    def stop_server(self) -> None:
        """SIGTERM, and at the same moment every client connects anew."""
        host = self.world.random.choice(self.hosts)
        if (server := host.server) is not None:
            self.world.count("servers ended")
            server.process.at_exit.append(lambda: self.world.after(0.05, self.start_server, host))
            server.stop()
            for link in list(host.network.links):
                link.break_off()

    def replace_server(self) -> None:
        """Another server takes the address of one that is frozen in a load, and later goes on with it."""
        host = self.world.random.choice(self.hosts)

        def replace_it(server: SimulatedServer) -> None:
            self.world.count("servers replaced")
            frozen_s = self.world.random.choice((0.5, 5.0, 20.0))
            server.freeze(frozen_s)
            server.stop_listening()
            # Before a client that cannot see it takes it for gone.
            self.world.after(frozen_s + self.world.random.uniform(0, 3), server.process.kill)
            if host.server is server:
                self.start_server(host, beside=True)

        if (server := host.server) is not None:
            server.at_next_load = functools.partial(replace_it, server)

    def freeze_server(self) -> None:
        if self.servers:
            self.world.count("servers stopped")
            server = self.world.random.choice(self.servers)
            server.freeze(self.world.random.choice((0.01, 0.5, 2.0, 12.0)))

    def cut_off_host(self) -> None:
        """Nothing reaches one of the hosts for a while."""
        host = self.world.random.choice(self.hosts)
        self.world.count("hosts cut off")
        host.network.cut_off(self.world.random.choice((0.3, 3.0, 20.0)))

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
        if self.links:
            self.world.count("connections broken")
            self.world.random.choice(self.links).break_off()

    def clear(self) -> None:
        if (server := self._who_hears()) is not None:
            server.cache.clear()

    def lose_tier(self) -> None:
        self.world.random.choice(self.stores).lose()

    def tier_goes_away(self) -> None:
        draw = self.world.random
        draw.choice(self.stores).go_away(draw.choice((0.5, 3.0, 12.0)))

    def _who_hears(self) -> SimulatedServer | None:
        server = self.world.random.choice(self.hosts).server
        return server if server is not None and not server.frozen_s() else None

    def pin(self) -> None:
        """A user pins a request that he has sent, or unpins a name."""
        if (server := self._who_hears()) is None:
            return
        name = self.world.random.choice(("mine", "yours"))
        if self.world.chance(0.15):
            server.unpin(name)
        elif self._to_pin and server.pin(name, self._to_pin.pop()):
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
        faulty_s = FAULTY_S if self.disk is None else SHORT_S
        end_s = world.now_s + faulty_s
        for host in self.hosts:
            world.after(draw.uniform(0, 3) if world.chance(0.2) else 0.0, self.start_server, host)
        for _ in range(draw.choice((1, 2, 2, 3))):
            self.start_engine()
        if self.disk is not None:
            self.start_engine()
            self._every(8.0, self.disk.replace, end_s)
            self._every(8.0, self.kill_engine, end_s)
        mean_s = draw.choice((0.15, 0.3, 0.8))
        self._every(mean_s if self.disk is None else 0.25, self.request, end_s)
        menu = (
            (4.0, self.kill_server), (5.0, self.freeze_server), (5.0, self.kill_engine),
            (5.0, self.pause_engine), (1.0, self.break_link), (3.0, self.clear), (0.7, self.abort),
            (12.0, self.jump), (3.0, self.reset_engine), (6.0, self.stop_server),
            *(((5.0, self.cut_off_host),) if self.is_split else ()),
        )  # fmt: skip
        if self.pins:
            self._every(0.8, self.pin, end_s)
        if self.replaces:  # and no clock jumps, by which a client would take a frozen server for gone
            menu = tuple(each for each in menu if each[1] != self.jump)
            self._every(2.0, self.replace_server, end_s)
        for mean_s, fault in menu:
            # With tiers there is less of all else: what has left L1 must be asked for again. Engines that are
            # unlike must find what others have stored.
            if world.chance(0.15 if self.stores or self.disk is not None else 0.4):
                self._every(mean_s * draw.choice((0.5, 1, 3)), fault, end_s)
        reply_loss = draw.choice((0.002, 0.05)) if world.chance(0.3) else 0.0
        nonsense = draw.choice((0.002, 0.05)) if world.chance(0.2) else 0.0
        delay_s = draw.choice((0.00002, 0.0002, 0.002))
        for host in self.hosts:
            host.network.reply_loss, host.network.nonsense = reply_loss, nonsense
            host.network.delay_s = delay_s
        if world.chance(0.4):
            self.faults.copy_failure = draw.choice((0.01, 0.2))
        if world.chance(0.3):
            self.faults.hung_copy = draw.choice((0.005, 0.05))
        if world.chance(0.4):
            self.faults.slow_copy = draw.choice((0.01, 0.1))
        self.faults.piece_s = draw.choice((0.0001, 0.001, 0.01))
        if self.stores and world.chance(0.5):
            self._every(4.0, self.kill_server, end_s)
        for mean_s, fault in ((8.0, self.lose_tier), (5.0, self.tier_goes_away)):
            if self.stores and world.chance(0.4):
                self._every(mean_s * draw.choice((0.5, 1, 3)), fault, end_s)
        world.run(lambda: False, faulty_s)
        self._calm_down()
        world.is_over = True
        return world.counts

    def _unheard(self) -> int:
        """How many replies did not reach their client as they were."""
        return self.world.counts.get("replies lost", 0) + self.world.counts.get("replies of nonsense", 0)

    def _calm_down(self) -> None:
        """No more faults: everything must come to an end, and nothing be left."""
        world = self.world
        for host in self.hosts:
            for life in host.lives:
                life.at_next_load = None
            host.network.reply_loss = host.network.nonsense = host.network.cut_off_until_s = 0.0
        self.faults.copy_failure = self.faults.slow_copy = self.faults.hung_copy = 0.0
        self.faults.return_all()
        for store in self.stores:
            store.recover()
        world.run(lambda: False, 12.0)
        for host in self.hosts:
            self.start_server(host)
        back = world.run(
            lambda: all(host.server and not host.server.is_ending for host in self.hosts), SETTLE_S
        )
        assert back, "a server never ended"
        self._come_to_rest()
        if self.disk is not None:
            self._ask_new_engines()
        if self.stores and world.chance(0.5):
            self._ask_a_new_server()
        for server in self.servers:
            self._is_left_clean(server)
        for engine in self.running:
            world.spawn(engine.close, engine.processes[0])
        all_sessions = [server.router.sessions for server in self.servers]
        gone = world.run(lambda: not any(sessions.by_identity for sessions in all_sessions), 30.0)
        assert gone, "a session outlives its client"
        for server in self.servers:
            assert not list(server.router.sessions.engines)
            assert all(copier.closed for copier in server.copiers), "a copy thread outlives its session"

    def _is_left_clean(self, server: SimulatedServer) -> None:
        world = self.world
        # The last words of the engines arrive; leases of those that were killed are over.
        limit_s = SETTLE_S if self._unheard() else RELEASE_S + TICK_S
        tiers_rest = world.run(lambda: not unrest(server), SETTLE_S)
        assert tiers_rest, f"tiers are not at rest: {unrest(server)}"
        still = world.run(functools.partial(_is_at_rest, server), limit_s)
        assert still, f"the server holds {server.cache.num_leases} leases, {server.cache.num_readers} readers"
        server.cache.check_integrity()

    def _ask_new_engines(self) -> None:
        """One alone after the other. Each finds what engines like itself have stored, and nothing else."""
        assert self.disk is not None
        self.disk.is_calm = True
        for _ in range(3):
            for engine in self.running:
                for process in engine.processes:
                    process.kill()
            self.start_engine()
            channel = self.engines[-1].scheduler.channel
            self.world.run(lambda channel=channel: channel.ready, LATEST_S)  # type: ignore[misc]
            for prompt in self.prompts * 2:
                # Some engines store only what has been asked for before.
                self.request(prompt, self.engines[-1])
                self._come_to_rest()

    def _ask_a_new_server(self) -> None:
        """The server is killed, and a new one has what the tiers have: good records, and those that faults
        have left."""
        for host in self.hosts:
            for life in host.lives:
                life.at_next_load = None
                life.process.kill()
            self.world.after(8.0, self.start_server, host)
        self.world.run(lambda: False, 12.0)
        if self.disk is not None:
            self._ask_new_engines()
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


def _stores(world: World) -> "list[Store]":
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
    used = engine.pool.num_gpu_blocks - 1 - engine.pool.get_num_free_blocks()
    return used, len(engine.scheduler.held._jobs)


def _is_at_rest(server: SimulatedServer) -> bool:
    cache = server.cache
    return not (cache.num_leases or cache.num_readers or unrest(server))


assert LOAD_TIMEOUT_S < SETTLE_S
