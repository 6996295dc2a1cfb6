"""`lmcache verify --lm-eval TASK`: one task's scores, computed and served from the cache.

Runs the command `lm_eval` (EleutherAI's lm-evaluation-harness, with the extra `api`), which the user has
installed with the task's data. Interface: version 0.4, `--model local-completions`.
"""

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from lmcache_server.commands.verify import engine as vllm
from lmcache_server.commands.verify.engine import Engine, VerifyError

_TAIL_CHARS = 2000


def compare(engine: Engine, task: str, limit: int | None) -> dict[str, Any]:
    """The scores of `task`, first computed, then with what the server has of it, and the tokens served.

    With `limit` only that many questions. Raises VerifyError.
    """
    if shutil.which("lm_eval") is None:
        raise VerifyError("there is no command lm_eval here: pip install 'lm_eval[api]'")
    salt = vllm.new_salt()
    computed = _run(engine, task, limit, salt)
    engine.reset_prefix_cache()
    before = engine.counters()
    served = _run(engine, task, limit, salt)
    tokens = int(engine.counters()[vllm.LOADED_TOKENS] - before[vllm.LOADED_TOKENS])
    return {"task": task, "computed": computed, "served": served, "served_tokens": tokens}


def verdict(scores: dict[str, Any]) -> tuple[bool, str]:
    """Whether both runs have the same scores, and a sentence."""
    task = scores["task"]
    if not scores["served_tokens"]:
        return False, (
            f"{task}: nothing was served in the second run. Tasks that score given answers make vLLM compute "
            "every prompt: choose one that generates"
        )
    if scores["computed"] != scores["served"]:
        return False, f"{task}: scores differ: computed {scores['computed']}, served {scores['served']}"
    return True, f"{task}: {scores['served_tokens']} tokens served, scores equal: {scores['served']}"


def _run(engine: Engine, task: str, limit: int | None, salt: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        command = ["lm_eval", "--model", "local-completions", "--tasks", task, "--output_path", directory]
        arguments = f"model={engine.model},base_url={engine.url}/v1/completions,num_concurrent=1"
        command += ["--model_args", arguments + ",tokenizer_backend=None,max_retries=1"]
        command += ["--gen_kwargs", f"temperature=0,cache_salt={salt}"]
        command += ["--limit", str(limit)] if limit else []
        done = subprocess.run(
            command,
            env={**os.environ, "OPENAI_API_KEY": engine.api_key or os.environ.get("OPENAI_API_KEY", "")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        files = sorted(Path(directory).rglob("results*.json"))
        if done.returncode or not files:
            raise VerifyError(f"lm_eval failed:\n{done.stdout[-_TAIL_CHARS:]}")
        results = json.loads(files[-1].read_text(encoding="utf-8"))["results"]
    return {
        f"{name} {metric}": value
        for name, metrics in results.items()
        for metric, value in metrics.items()
        if isinstance(value, (int, float)) and "stderr" not in metric
    }
