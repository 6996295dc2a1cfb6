"""What engines of one model name are started with: a configuration, a layout of their pages, and the weights
in a directory in which somebody replaces files now and then. All three decide the bytes of the pages.

The connector's own functions name them: real configurations of vLLM and real files. Of the clock of file
times only the order counts: it goes on whenever a file changes or a process begins.
"""

import copy
import functools
import itertools
import json
import logging
import os
import random
import tempfile
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec

from lmcache_client.connector import translate
from lmcache_client.connector.connector import WEIGHTS_WAIT_S, LMCacheMPConnector
from lmcache_client.connector.worker import WorkerSide
from lmcache_client.contract.keys import ModelTag
from simulation.engine import Engine, Model, Origin
from simulation.world import World

MIXED = (2, 4, 10)
"""Which of thirteen seeds have engines that differ under one model name. No older bug needs one of them."""
SHARDS = ("model-1.safetensors", "model-2.safetensors")
CONTENTS = ("first", "second")
QUANTIZATION = {"quant_method": "fp8", "activation_scheme": "dynamic"}
CONFIGURATIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("plain", {}),
    ("plain", {"max_num_seqs": 7}),  # which changes no page
    ("quantized", {"hf_overrides": {"quantization_config": QUANTIZATION}}),
    ("narrow", {"kv_cache_dtype": "fp8_e4m3"}),
)
"""What each makes of the pages, and vLLM's arguments for it."""
LAYOUTS = ("LBNHC", "LBHNC")
UNSEEN = "tensorizer"
"""A load format whose weights the connector cannot see."""
DUMMY = "dummy"
LOAD_FORMATS = ((UNSEEN,), ("auto", UNSEEN), ("auto", DUMMY))
WAYS = ("overwritten", "put over it", "put over it with an old time", "put over it when it was old")
"""How a file is replaced."""
READING_S = (0.5, 4.0)
"""How long reading the files may take, to name them: on a fast disk, or on a slow one."""
LATEST_S = 12.0
"""Most engines are cached so long after their start."""
ARCHITECTURE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 64,
    "max_position_embeddings": 256,
}


@functools.cache
def configured(number: int, load_format: str) -> Any:
    """A configuration of vLLM. The first one takes seconds."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(ARCHITECTURE))
        arguments = {"load_format": load_format, "max_model_len": 256, **CONFIGURATIONS[number][1]}
        try:
            logging.disable()  # vLLM says much about each
            return EngineArgs(directory, skip_tokenizer_init=True, **arguments).create_engine_config()
        finally:
            logging.disable(logging.NOTSET)


def prepare() -> None:
    """Makes the configurations, which all processes of a simulation then have."""
    for number in range(len(CONFIGURATIONS)):
        for load_format in ("auto", UNSEEN, DUMMY):
            configured(number, load_format)


@functools.cache
def tagged(number: int, load_format: str) -> ModelTag:
    return translate.model_tag(configured(number, load_format))


@functools.cache
def layout_tag(number: int, layout: str) -> str:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
    cache: Any = SimpleNamespace(kv_cache_layout=layout, num_blocks=1)
    return translate._group_tag(configured(number, "auto"), cache, spec, ["layer"], {"layer": torch.zeros(1)})


class Disk:
    """The model directories of a history, and what its engines have to choose from."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.draw = draw = random.Random(f"origins {seed}")
        self._place = Path(tempfile.mkdtemp(prefix="simulation-"))
        self._clock = self._place / "clock"
        self._now_ns = 0
        unlike = draw.choice(("configurations", "configurations", "layouts", "load formats", "weights"))
        self._numbers = draw.sample(range(len(CONFIGURATIONS)), 2 if unlike == "configurations" else 1)
        self._layouts = LAYOUTS if unlike == "layouts" else LAYOUTS[:1]
        self._load_formats = draw.choice(LOAD_FORMATS) if unlike == "load formats" else ("auto",)
        self.reading_s = draw.choice(READING_S)
        self.lives = itertools.count()
        self.is_calm = False
        """Nobody replaces weights while an engine starts."""
        self._ready = {content: self._place / content for content in CONTENTS}
        """Files that have been there for long."""
        self._directories = [self._place / name for name in ("here", "there")]
        for directory in self._directories:
            directory.mkdir()
            for file in SHARDS:
                (directory / file).write_text(CONTENTS[0])
        for content, file in self._ready.items():
            file.write_text(content)

    def close(self) -> None:
        for path in sorted(self._place.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        self._place.rmdir()

    def now_ns(self) -> int:
        """The clock of file times, which has gone on."""
        while True:
            self._clock.touch()
            if (now_ns := self._clock.stat().st_ctime_ns) > self._now_ns:
                self._now_ns = now_ns
                return now_ns

    def origin(self, engine_id: str) -> "DiskOrigin":
        draw = self.draw
        number, load_format = draw.choice(self._numbers), draw.choice(self._load_formats)
        directory = draw.choice(self._directories)
        return DiskOrigin(self, number, draw.choice(self._layouts), load_format, directory, engine_id)

    def replace(self, directory: Path | None = None) -> None:
        """Other weights come to a directory, one file after the other."""
        directory = directory or self.draw.choice(self._directories)
        before = (directory / SHARDS[0]).read_text()
        content = self.draw.choice([each for each in CONTENTS if each != before])
        for file in SHARDS:
            self.world.after(self.draw.uniform(0, 0.4), self._replace, directory / file, content)

    def _replace(self, file: Path, content: str) -> None:
        way = self.draw.choice(WAYS)
        self.world.note(f"{file.parent.name}/{file.name} is {way}: {content}")
        self.world.count("weights replaced")
        self.now_ns()
        if way == "overwritten":
            file.write_text(content)
            return
        new = self._ready[content]
        if way != "put over it when it was old":
            new = self._place / "new"
            new.write_text(content)
        if way == "put over it with an old time":
            os.utime(new, (1, 1))
        new.replace(file)
        self._ready[content].write_text(content)


@dataclass
class Rank:
    """A worker that has begun: when, by the clock of file times, and what stands for its weights."""

    began_ns: int
    details: Any = None
    late: LMCacheMPConnector | None = None
    """Set if its weights had no name when it was registered."""


class DiskOrigin(Origin):
    """Where one engine has its weights from: it reads them after its processes have begun, and they are named
    after that. Meanwhile they may have changed."""

    where = " among unlike ones"

    def __init__(
        self, disk: Disk, number: int, layout: str, load_format: str, directory: Path, engine_id: str
    ) -> None:
        self._disk = disk
        self._number, self._layout, self._load_format = number, layout, load_format
        self._directory = directory
        config = self._config = copy.copy(configured(number, load_format))
        config.model_config = copy.copy(config.model_config)
        config.model_config.model = str(directory)
        config.kv_transfer_config = SimpleNamespace(engine_id=engine_id)
        config.instance_id = f"life {next(disk.lives)}"
        self._ranks: list[Rank] = []

    def tag(self, model: Model) -> ModelTag:
        named = tagged(self._number, self._load_format)
        return ModelTag(model.name, named.details, model.ranks, 1)

    def layout(self) -> str:
        return layout_tag(self._number, self._layout)

    def start(self, engine: Engine) -> None:
        """As vLLM: the processes begin, they load, each makes its connector, and registers."""
        world, draw = engine.world, self._disk.draw
        world.note(f"{engine.engine_id}: {self._directory.name} {self._number} {self._layout}")
        if not self._disk.is_calm and draw.random() < 0.4:
            world.after(draw.uniform(0, 1), self._disk.replace, self._directory)
        for _ in engine.workers:
            self._ranks.append(Rank(self._disk.now_ns()))
            world.sleep(draw.uniform(0, 0.2))
        for rank in range(len(engine.workers)):
            engine.weights[rank] = self._load(world)
        for rank, process in zip(self._ranks, engine.processes[1:], strict=True):
            world.spawn(functools.partial(self._name, world, rank), process)
        world.sleep(draw.uniform(0, 0.5))
        for rank, worker in zip(self._ranks, engine.workers, strict=True):
            self._register(world, rank, worker)

    def _load(self, world: World) -> str:
        """What the pages of a rank depend on."""
        read = []
        for file in SHARDS:
            world.sleep(self._disk.draw.uniform(0, 0.4))
            read.append((self._directory / file).read_text())
        if self._load_format == DUMMY:
            read = [DUMMY]
        return " ".join((CONFIGURATIONS[self._number][0], self._layout, *read))

    def _name(self, world: World, rank: Rank) -> None:
        """Reading the files takes its time; what has changed since then has another time."""
        draw = self._disk.draw
        world.sleep(draw.uniform(0, 0.3))
        with mock.patch.object(translate, "process_started_ns", return_value=rank.began_ns):
            details = translate.weights(self._config)
        is_own = translate._own(self._config) in dict(details).values()
        world.count("weights of one engine only" if is_own else "weights named by their content")
        world.sleep(draw.uniform(0, self._disk.reading_s))
        rank.details = details
        if rank.late is not None:
            named: Future[Any] = Future()
            named.set_result(details)
            rank.late._start_late(named)

    def _register(self, world: World, rank: Rank, worker: WorkerSide) -> None:
        limit_s = world.now_s + WEIGHTS_WAIT_S
        while rank.details is None and world.now_s < limit_s:
            world.sleep(0.02)
        if rank.details is not None:
            worker.start(rank.details)
            return
        world.count("workers that register late")
        rank.late = LMCacheMPConnector.__new__(LMCacheMPConnector)
        rank.late._worker = worker
