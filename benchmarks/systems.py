"""The systems side by side: vLLM alone, with our server, with LMCache's, each as a user would start it."""

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import peer
from harness.processes import ChildProcess, environment, free_port, tail
from harness.waiting import answers

ROOT = Path(__file__).resolve().parent.parent
CHUNK_TOKENS = 256
START_TIMEOUT_S = 600.0
POLL_S = 0.002


class Server(ChildProcess):
    """A server process that answers over HTTP as soon as it is ready; `start_s` says how long that took."""

    def __init__(
        self, name: str, command: list[str], variables: Mapping[str, str], http_port: int, path: str
    ) -> None:
        self.http_port = http_port
        start = time.perf_counter()
        super().__init__(name, command, environment(variables))
        self.wait_until_ready(lambda: answers(self.url(path)), START_TIMEOUT_S, POLL_S)
        self.start_s = time.perf_counter() - start

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.http_port}{path}"


class Probe(ChildProcess):
    """A vLLM engine in a process of its own; see probe.py for its commands. A context manager."""

    def __init__(
        self, name: str, python: str, arguments: Mapping[str, Any], variables: Mapping[str, str]
    ) -> None:
        command = [python, str(Path(__file__).parent / "probe.py"), json.dumps(arguments)]
        super().__init__(f"vLLM {name}", command, environment({**VLLM_VARIABLES, **variables}), pipes=True)
        self._answer()

    def ask(self, command: str, **arguments: Any) -> Any:
        self.say(json.dumps({"command": command, **arguments}))
        return self._answer()

    def _answer(self) -> Any:
        line = self.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended\n{tail(self.log)}")
        return json.loads(line)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.ask("close")
        super().__exit__(kind, error, trace)


VLLM_VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_CI_ENV": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CACHE_ROOT": str(ROOT / ".cache" / "vllm"),
}


@functools.cache
def has_gpu() -> bool:
    """Asked in a process of its own: what has looked at a GPU holds a part of it."""
    command = [sys.executable, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"]
    return subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode == 0


def engine_arguments(model: Path, kv_transfer_config: Mapping[str, Any] | None) -> dict[str, Any]:
    """The same for every system, but for the connector."""
    return {
        "model": str(model),
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 8192,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "kv_cache_memory_bytes": 512 << 20,
        "seed": 0,
        **({} if kv_transfer_config is None else {"kv_transfer_config": kv_transfer_config}),
    }


def server_command(*program: str) -> list[str]:
    return [sys.executable, *(program or ("-m", "lmcache_server", "server"))]


@contextlib.contextmanager
def our_server(
    l1_gb: float, command: Sequence[str] = (), **flags: Any
) -> Iterator[tuple[Server, int, dict[str, str]]]:
    """`lmcache server` with what a user gets by default; also its port and what clients need in their
    environment."""
    port, http_port = free_port(), int(flags.pop("http_port", 0)) or free_port()
    directory = tempfile.mkdtemp(prefix="lmcache-bench-", dir="/tmp")
    variables = {"LMCACHE_RUNTIME_DIR": directory}
    options = {"port": port, "http_port": http_port, "l1_size_gb": l1_gb, **flags}
    command = list(command or server_command())
    for name, value in options.items():
        command += ["--" + name.replace("_", "-"), str(value)]
    try:
        with Server("ours", command, variables, http_port, "/readyz") as server:
            yield server, port, variables
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def lmcache_server(l1_gb: float, *flags: str) -> Iterator[tuple[Server, int]]:
    """LMCache's server, with the flags without which it does not start or is wrong for hybrid models."""
    port, http_port = free_port(), free_port()
    command = [str(peer.SERVER / "bin" / "lmcache"), "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--http-port", str(http_port), "--l1-size-gb", str(l1_gb), "--chunk-size", str(CHUNK_TOKENS)]
    command += ["--eviction-policy", "LRU", "--separate-object-groups", *flags]
    with Server("lmcache", command, peer.VARIABLES, http_port, "/healthcheck") as server:
        yield server, port


@contextlib.contextmanager
def vllm_alone(model: Path) -> Iterator[Probe]:
    with Probe("alone", sys.executable, engine_arguments(model, None), {}) as probe:
        yield probe


@contextlib.contextmanager
def vllm_with_ours(model: Path, l1_gb: float, **flags: Any) -> Iterator[Probe]:
    with our_server(l1_gb, chunk_size=CHUNK_TOKENS, **flags) as (_, port, variables):
        config = {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"lmcache.mp.port": port},
        }
        with Probe("ours", sys.executable, engine_arguments(model, config), variables) as probe:
            yield probe


@contextlib.contextmanager
def vllm_with_offloading(model: Path, l1_gb: float) -> Iterator[Probe]:
    """vLLM's own connector to host memory, which needs a GPU. Like the others it keeps what was decoded."""
    extra = {"cpu_bytes_to_use": int(l1_gb * (1 << 30)), "offload_prompt_only": False}
    config = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    with Probe("offloading", sys.executable, engine_arguments(model, config), {}) as probe:
        yield probe


@contextlib.contextmanager
def vllm_with_lmcache(model: Path, l1_gb: float, *flags: str) -> Iterator[Probe]:
    with lmcache_server(l1_gb, *flags) as (_, port):
        config = {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": port,
                # Without a GPU its default, `auto`, waits for an answer that never comes.
                "lmcache.mp.mp_transfer_mode": "auto" if has_gpu() else "lmcache_driven",
                "lmcache.mp.mq_timeout": 20,
            },
        }
        # Our own plugin would take the connector's name over.
        variables = {**peer.VARIABLES, "VLLM_PLUGINS": ""}
        python = str(peer.ENGINE / "bin" / "python")
        probe = Probe("lmcache", python, engine_arguments(model, config), variables)
        with no_shared_memory_left(), probe:
            yield probe


@contextlib.contextmanager
def no_shared_memory_left() -> Iterator[None]:
    """Removes what LMCache's clients leave behind when they are ended by force."""
    left_before = set(_shared_memory())
    try:
        yield
    finally:
        for left in set(_shared_memory()) - left_before:
            left.unlink(missing_ok=True)


def _shared_memory() -> list[Path]:
    return [path for path in Path("/dev/shm").glob("lmcache_*") if path.stat().st_uid == os.getuid()]
