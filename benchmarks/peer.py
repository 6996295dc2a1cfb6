"""LMCache 0.5.6 for the comparison, in environments of its own: nothing of it is needed by this project.

Its server and vLLM's worker need different versions of the same packages. So the server has an environment
of its own, and the engine one that has LMCache's client beside the very vLLM that the others run. What it
requires for storage and clouds that the comparison does not touch is left out.
"""

import json
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from harness.processes import environment

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENTS = ROOT / ".cache" / "bench" / "lmcache"
SERVER = ENVIRONMENTS / "server"
ENGINE = ENVIRONMENTS / "engine"
LMCACHE = "lmcache==0.5.6"
VARIABLES = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1", "LMCACHE_LOG_LEVEL": "WARNING"}
# fmt: off
SERVER_NEEDS = (
    "aiofile", "aiofiles", "aiohttp", "blake3", "cachetools", "cryptography", "fastapi", "grpcio",
    "httptools", "httpx", "huggingface_hub>=1.5", "msgspec", "numba", "numpy<=2.2.6", "nvtx",
    "opentelemetry-api<=1.40.0", "opentelemetry-sdk", "opentelemetry-exporter-otlp",
    "opentelemetry-exporter-prometheus<=0.61b0", "prometheus_client<=0.24.1", "protobuf<7", "psutil",
    "py-cpuinfo", "pyyaml", "pyzmq", "redis", "safetensors", "sortedcontainers", "transformers>=5.4",
    "uvicorn",
)
# fmt: on
ENGINE_NEEDS = ("sortedcontainers",)


def install() -> None:
    """Make both environments unless they are there (some three minutes)."""
    sys.path.insert(0, str(ROOT / "scripts"))
    from install_vllm_cpu import TORCH

    _environment(SERVER, "LMCache's server", [(TORCH,), ("--no-deps", LMCACHE), SERVER_NEEDS])
    _environment(ENGINE, "LMCache's connector", [("--no-deps", LMCACHE, *ENGINE_NEEDS)])


def bench(port: int, http_port: int, shape: str, tokens: int, requests: range) -> dict[str, float]:
    """What `lmcache bench server` of LMCache measured, by name, times in seconds. `shape` is its specification of
    a KV cache, (2, blocks, tokens of a block, heads, head size):dtype:layers. Every request is stored, looked up
    and retrieved."""
    _, blocks, block_tokens, *_ = shape.removeprefix("(").partition(")")[0].split(",")
    command = [str(SERVER / "bin" / "lmcache"), "bench", "server", "--mode", "cpu", "--format", "json"]
    command += ["--rpc-url", f"tcp://127.0.0.1:{port}", "--url", f"http://127.0.0.1:{http_port}"]
    command += ["--transfer-mode", "lmcache_driven", "--num-tokens", str(tokens), "--interval", "0"]
    command += ["--num-blocks", blocks, "--block-size", block_tokens, "--kvcache-shape-spec", shape]
    command += ["--start", str(requests.start), "--end", str(requests.stop)]
    result = subprocess.run(
        command, env=environment(VARIABLES), capture_output=True, text=True, timeout=300, check=False
    )
    try:
        found = json.loads(result.stdout[result.stdout.index("\n{") :].removesuffix("\nDone.\n"))["metrics"]
        return {
            "store": found["cold_store"]["cold_store_p50"] / 1e3,
            "retrieve": found["warm_retrieve"]["warm_retrieve_p50"] / 1e3,
            "lookup": found["warm_lookup"]["warm_lookup_p50"] / 1e3,
        }
    except (ValueError, KeyError):
        raise RuntimeError(
            f"LMCache's bench failed:\n{result.stdout[-1500:]}{result.stderr[-1500:]}"
        ) from None


def _environment(path: Path, what: str, installs: list[tuple[str, ...] | list[str]]) -> None:
    done = path / "complete"
    if done.exists():
        return
    print(f"installing {what} ({LMCACHE}) for the comparison ...", flush=True)
    venv.create(path, with_pip=True, clear=True)
    python = str(path / "bin" / "python")
    if path == ENGINE:
        site = subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"], text=True
        ).strip()
        (Path(site) / "vllm.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    for packages in installs:
        command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise RuntimeError(f"installing {what} failed:\n{result.stderr[-2000:]}")
    done.touch()


if __name__ == "__main__":
    install()
