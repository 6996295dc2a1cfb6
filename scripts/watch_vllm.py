"""Shows what changed between two versions of vLLM in the code that the connector relies on.

`python watch_vllm.py NEW [--against OLD]`; OLD defaults to the installed version. vLLM is read, never
imported; a version that is not installed is downloaded. Comments and docstrings do not count. Exit status:
0 if nothing changed, 1 if something changed, 2 if a name of WATCHED is in neither version.
"""

import argparse
import ast
import difflib
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from importlib import metadata, util
from pathlib import Path

from pip_quietly import pip_download

Tree = Path | zipfile.Path
"""The directory `vllm`, installed or in a wheel."""

ALL = ("*",)

# File below vllm/ → names whose code matters: `Class.method`, `*` for the whole file, `~text` for its lines
# with that text, where the code around them is long and changes with every version.
WATCHED: dict[str, tuple[str, ...]] = {
    # What the connector overrides and inherits: when each method is called, what its arguments mean.
    "distributed/kv_transfer/kv_connector/v1/base.py": ALL,
    # How an engine comes by its connector: names, the plugin's entry, what the configuration may ask for.
    "distributed/kv_transfer/kv_connector/factory.py": ALL,
    "distributed/kv_transfer/kv_transfer_state.py": ALL,
    "plugins/__init__.py": ("load_plugins_by_group", "load_general_plugins"),
    "config/kv_transfer.py": ALL,
    "config/vllm.py": ("VllmConfig._verify_kv_transfer_compat", "~kv_transfer_config"),
    # Workers' reports: added up over the ranks, and not lost in steps that compute nothing.
    "distributed/kv_transfer/kv_connector/utils.py": ("KVOutputAggregator",),
    "v1/outputs.py": ("KVConnectorOutput",),
    # When a worker calls the connector. Memory must be registered once, before the first step; nothing may be
    # stored before it is computed; both runners must collect in every step.
    "v1/worker/kv_connector_model_runner_mixin.py": ALL,
    "v1/worker/gpu_model_runner.py": ("~kv_connector", "~kv_transfer_group"),
    "v1/worker/gpu/kv_connector.py": ALL,
    "v1/worker/gpu/model_runner.py": ("GPUModelRunner.sample_tokens", "~kv_connector"),
    "v1/worker/gpu_worker.py": ("~kv_transfer",),
    "v1/engine/core.py": ("~kv_connector",),
    # When the scheduler calls the connector, and what becomes of a request whose load ended or failed, is
    # preempted or aborted.
    "v1/core/sched/scheduler.py": (
        "~self.connector",
        "Scheduler.add_request",
        "Scheduler.has_finished_requests",
        "Scheduler.has_requests",
        "Scheduler.reset_connector_cache",
        "Scheduler.reset_prefix_cache",
        "Scheduler._build_kv_connector_meta",
        "Scheduler._connector_finished",
        "Scheduler._get_new_block_ids_to_zero",
        "Scheduler._handle_failed_recving",
        "Scheduler._handle_invalid_blocks",
        "Scheduler._mamba_block_aligned_split",
        "Scheduler._preempt_request",
        "Scheduler._update_after_schedule",
        "Scheduler._update_from_kv_xfer_finished",
        "Scheduler._update_waiting_for_remote_kv",
    ),
    # What a step's stores are made of.
    "v1/core/sched/output.py": (
        "CachedRequestData",
        "KVConnectorBlockState",
        "NewRequestData",
        "SchedulerOutput",
    ),
    "v1/request.py": ("Request",),
    # What must be in the key of a chunk, or wrong bytes are served.
    "v1/core/kv_cache_utils.py": (
        "generate_block_hash_extra_keys",
        "_gen_lora_extra_hash_keys",
        "_gen_mm_extra_hash_keys",
        "_gen_prompt_embeds_extra_hash_keys",
        "~kv_transfer_config",
    ),
    # Which blocks a load fills and a store reads, and that a held block keeps its bytes.
    "v1/core/block_pool.py": ("BlockPool.free_blocks", "BlockPool.get_new_blocks", "BlockPool.touch"),
    "v1/core/kv_cache_manager.py": (
        "KVCacheBlocks",
        "KVCacheManager.allocate_slots",
        "KVCacheManager.take_boundary_state_offloads",
    ),
    "v1/core/single_type_kv_cache_manager.py": (
        "ChunkedLocalAttentionManager.get_num_skipped_tokens",
        "MambaManager.cache_blocks",
        "MambaManager.get_num_skipped_tokens",
        "MambaManager._cache_partial_tail_block",
        "SingleTypeKVCacheManager.allocate_external_computed_blocks",
        "SingleTypeKVCacheManager.remove_skipped_blocks",
        "SlidingWindowManager.get_num_skipped_tokens",
    ),
    # Which states of a recurrent model exist, and where: the end of a block, in steps that end there.
    "v1/worker/mamba_utils.py": ALL,
    "config/cache.py": ("CacheConfig",),
    "platforms/cpu.py": ("CpuPlatform.check_and_update_config", "CpuPlatform.update_block_size_for_backend"),
    "platforms/interface.py": ("Platform._align_hybrid_block_size", "Platform.update_block_size_for_backend"),
    # Where a page lies, how long it is, and how its group resumes.
    "v1/kv_cache_layout.py": ALL,
    "v1/kv_cache_interface.py": (
        "AttentionSpec",
        "ChunkedLocalAttentionSpec",
        "FullAttentionSpec",
        "KVCacheConfig",
        "KVCacheGroupSpec",
        "KVCacheSpec",
        "KVCacheTensor",
        "MLAAttentionSpec",
        "MambaSpec",
        "SlidingWindowSpec",
        "UniformTypeKVCacheSpecs",
    ),
    # Statistics: how they are added up, logged and published.
    "distributed/kv_transfer/kv_connector/v1/metrics.py": ALL,
    "v1/metrics/cache_hit_source.py": ALL,
    "v1/metrics/utils.py": ALL,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="What changed in the parts of vLLM that the connector uses.")
    parser.add_argument("version", metavar="VERSION", help="such as 0.34.0")
    parser.add_argument(
        "--against", metavar="OLD", help="the version to compare with; default: the installed one"
    )
    given = parser.parse_args()
    here, new = installed_version(), given.version
    old = given.against or here
    if not old:
        sys.exit("no vLLM is installed here to compare with: run `make install`, or give --against")
    with ExitStack() as stack:
        before, after = (installed() if v == here else downloaded(v, stack) for v in (old, new))
        print(f"vLLM {old} and {new}:")
        code = report(before, after, WATCHED)
    sys.exit(code)


def installed_version() -> str:
    """The installed version, or nothing. A CPU build counts as its version: it has the same Python code."""
    for distribution in metadata.packages_distributions().get("vllm", ()):
        return metadata.version(distribution).partition("+")[0]
    return ""


def installed() -> Path:
    spec = util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def downloaded(version: str, stack: ExitStack) -> zipfile.Path:
    """The GPU wheel: every version has one, and its Python code is the CPU build's except for platforms/."""
    directory = stack.enter_context(tempfile.TemporaryDirectory())
    wheel = stack.enter_context(zipfile.ZipFile(pip_download("vllm", version, directory)))
    return zipfile.Path(wheel, "vllm/")


def report(old: Tree, new: Tree, watched: Mapping[str, tuple[str, ...]]) -> int:
    """Print every difference and their numbers; returns the exit status."""
    counts: Counter[str] = Counter()
    for file, names in watched.items():
        before, after = parsed(old / file), parsed(new / file)
        for name in names:
            one, other = code_of(before, name), code_of(after, name)
            verdict = compared(one, other)
            counts[verdict] += 1
            if verdict != "same":
                print(f"\n{verdict}: {file} {name}")
                lines = difflib.unified_diff(one.splitlines(), other.splitlines(), lineterm="")
                print("".join(f"    {line}\n" for line in list(lines)[2:]), end="")
    print("\n" + ", ".join(f"{counts[kind]} {kind}" for kind in ("same", "changed", "gone", "new")))
    if counts["in neither"]:
        print(f"{counts['in neither']} in neither version: correct WATCHED in scripts/watch_vllm.py")
        return 2
    return int(counts["same"] < counts.total())


def compared(old: str, new: str) -> str:
    if not old:
        return "new" if new else "in neither"
    if not new:
        return "gone"
    return "same" if old == new else "changed"


def parsed(file: Tree) -> ast.Module:
    """The module of a file without docstrings; an empty module if there is no such file."""
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    module = ast.parse(text)
    _WithoutDocstrings().visit(module)
    return module


class _WithoutDocstrings(ast.NodeTransformer):
    """Removes strings that are statements, also below fields. (ast drops comments.)"""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        value = node.value
        return None if isinstance(value, ast.Constant) and isinstance(value.value, str) else node


def code_of(module: ast.Module, name: str) -> str:
    """The code of a name of WATCHED, in one style; empty if it does not exist."""
    if name == "*":
        return ast.unparse(module)
    if name.startswith("~"):
        return "\n".join(line for line in ast.unparse(module).splitlines() if name[1:] in line)
    nodes: list[ast.AST] = [module]
    for part in name.split("."):
        # More than one: a property and its setter, overloads.
        nodes = [
            node
            for scope in nodes
            for node in ast.iter_child_nodes(scope)
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == part
        ]
    return "\n\n".join(map(ast.unparse, nodes))


if __name__ == "__main__":
    main()
