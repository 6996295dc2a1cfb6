"""`make test-versions`: runs the tests that depend on vLLM with the oldest and the newest supported version.

    python scripts/test_versions.py [VERSION…]

Each version gets a thin environment (thin_vllm.py). It runs the table of what the connector uses, the hit
tests against vLLM's own coordinator, simulated histories of the real connector, and real engines: one model
of each kind, another process, a shared prefix, a failed load, adapters, two ranks, a server that restarts.
`make test` runs everything with the version in between. Exits with the code of the first failure.
"""

import itertools
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST, NEWEST = "0.31.0", "0.33.0"
HISTORIES = 40
TESTS_AT_A_TIME = 2
"""Of each version, because tests also wait."""
WORKERS = ["-n", str(TESTS_AT_A_TIME), "--dist", "loadfile", "--no-loadscope-reorder"]
MODELS = ("llama", "gemma3", "gemma4-32", "gptoss", "llama4", "qwen3next", "qwen35", "falconh1")
SECOND = ("llama", "gemma3", "qwen3next")
TESTS = (
    "test_versions.py",
    "test_account.py",
    "test_families.py",
    "test_hits_agree_with_vllm.py",
    "test_inputs.py",
    "test_layout.py",
    "test_geometry.py",
    "test_kv_events.py",
    *(f"test_models.py::test_model_is_restored_exactly[{model}]" for model in MODELS),
    "test_models.py::test_mla_is_stored_as_it_was_computed",
    "test_models.py::test_groups_that_no_other_request_may_use_are_left_out[llama-ring-replayed]",
    "test_models.py::test_a_conversation_a_new_answer_and_a_second_fork_are_served[qwen3next]",
    "test_speculation.py::test_target_and_drafter_are_restored_exactly[llama, EAGLE]",
    "test_resets.py::test_a_reset_succeeds_while_the_server_is_stopped_and_holds_a_store",
    "test_resets.py::test_engines_share_the_pages_of_a_weight_version",
    "test_serving.py::test_three_processes_find_the_connector_by_its_bare_name",
    "test_serving.py::test_salts_and_equal_prompts_share_only_with_themselves",
    "test_serving.py::test_an_engine_outlives_the_server_and_uses_it_when_it_is_there",
    "test_serving.py::test_a_promise_that_is_broken_is_recomputed[first]",
    "test_traps.py::test_recurrent_prompts_that_share_prefixes_of_many_lengths",
    "test_traps.py::test_pages_that_vllm_damages_where_it_resumes_inside_a_block_reach_no_other_engine",
    "test_traps.py::test_preemption_under_load_finishes_and_leaks_no_block[first]",
    "test_roles.py::test_an_adapter_never_gets_the_kv_of_another_or_of_the_base_model",
    "test_parallel.py::test_ranks_and_stages_store_and_restore_their_shards[qwen3next-tensor_parallel_size]",
    "test_context_parallel.py",
    "test_handover.py::test_a_decode_engine_goes_on_where_a_prefill_engine_ended[qwen3next-apart]",
    "test_several_servers.py::test_servers_that_disagree_are_of_use_as_far_as_both_go",
    "test_once.py::test_a_batch_that_will_not_come_back_leaves_the_chats_where_they_are",
    "test_statistics.py::test_loads_and_stores_are_in_vllms_log_and_metrics",
)

OF_NEWEST = (
    "test_other_vllm.py",
    # vLLM's second model runner, which `make test` also runs.
    "test_second_runner.py",
    *(f"test_models.py::test_model_is_restored_exactly[{model}-second]" for model in SECOND),
    "test_serving.py::test_a_promise_that_is_broken_is_recomputed[second]",
    "test_traps.py::test_preemption_under_load_finishes_and_leaks_no_block[second]",
)


def main() -> int:
    versions = sys.argv[1:] or (OLDEST, NEWEST)
    subprocess.run([sys.executable, str(ROOT / "scripts" / "thin_vllm.py"), *versions], check=True)
    started_s = time.monotonic()
    codes = []
    # Side by side, so that two processors are busy.
    with ThreadPoolExecutor(len(versions)) as pool:
        for code, said in pool.map(run, versions, itertools.count(0, TESTS_AT_A_TIME)):
            codes.append(code)
            print(said, flush=True)
    print(f"all versions: {(time.monotonic() - started_s) / 60:.1f} minutes")
    return next((code for code in codes if code), 0)


def run(version: str, first_worker: int) -> tuple[int, str]:
    """The tests, then the simulated histories, in the environment of one version: the first exit code that is
    not 0, or 0, and what was said. The workers of runs side by side have numbers of their own, for their
    ports."""
    python = str(ROOT / ".venv" / "thin" / version / "bin" / "python")
    tests = [f"tests/engine/{test}" for test in (*TESTS, *(OF_NEWEST if version == NEWEST else ()))]
    histories = ["--seeds", str(HISTORIES), "--jobs", "1"]
    code, said = 0, f"== vLLM {version}\n"
    for directory, module in (
        (ROOT, ["pytest", "-q", *WORKERS, "--durations=10", *tests]),
        (ROOT / "tests", ["simulation", *histories]),
    ):
        done = subprocess.run(
            [python, "-m", *module],
            cwd=directory,
            env={**os.environ, "LMCACHE_TEST_FIRST_WORKER": str(first_worker)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        code, said = code or done.returncode, said + done.stdout.decode(errors="replace")
    return code, said


if __name__ == "__main__":
    sys.exit(main())
