"""The checks that only `lmcache doctor` makes: pure functions from figures to a finding and its fix.

The checks that the server's start makes, too, are in `host/preflight.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from lmcache_client.contract.endpoint import KEY_FILE
from lmcache_client.contract.version import INSTALL_VLLM, VERSION, VLLM_RANGE, too_old, untested
from lmcache_server.host.machine import UNLIMITED
from lmcache_server.host.preflight import FAIL, OK, WARN, Check
from lmcache_server.host.units import size

ORIGIN = "PATH_OF_ITS_CLONE_OR_WHEEL"
"""Where lmcache-mp is installed from: no package index has it."""
_UNSEEN = (
    "an engine that reaches no server cannot be seen from here: its log has lines about 'the server at', and "
    "its metric vllm:lmcache_mp_connected is 0"
)
UNLOCK = "ulimit -l unlimited  (systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1)"
NAMED = {"weights": "detail weights", "layout": "rank 0 group 0 layout"}
COLOURS = {OK: "green", WARN: "yellow", FAIL: "red"}


def memlock(limit_bytes: int, l1_bytes: int, num_gpus: int) -> Check:
    """`limit_bytes` is the hard limit of locked memory, or UNLIMITED."""
    shown = "unlimited" if limit_bytes >= UNLIMITED else size(limit_bytes)
    if not num_gpus:
        return Check("memlock", OK, f"{shown}; only GPUs need locked memory")
    if limit_bytes >= l1_bytes:
        return Check("memlock", OK, f"{shown}, for {size(l1_bytes)} of L1")
    # No failure: NVIDIA's open driver ignores the limit.
    return Check("memlock", WARN, f"{shown}, but GPUs need all {size(l1_bytes)} of L1 pinned", UNLOCK)


def transparent_huge_pages(setting: str | None, path: str) -> Check:
    """`setting` is the text of the file `path`, such as `always [madvise] never`; None without that file."""
    name = "huge pages of files" if "shmem" in path else "transparent huge pages"
    if setting is None:
        return Check(name, WARN, "not in this kernel: populating L1 is slower")
    chosen = setting.partition("[")[2].partition("]")[0]
    if chosen in ("never", "deny"):
        advised = "advise" if "shmem" in path else "madvise"
        fix = f"echo {advised} | sudo tee {path}"
        return Check(name, WARN, f"off ({chosen}): populating L1 is slower", fix)
    return Check(name, OK, chosen)


def numa(nodes: Sequence[int], gpu_nodes: Mapping[str, int]) -> Check:
    """`gpu_nodes` has the node of each GPU, or -1 if the system does not say."""
    if len(nodes) < 2:
        return Check("NUMA", OK, "one node")
    unknown = [gpu for gpu, node in gpu_nodes.items() if node < 0]
    if unknown:
        finding = f"{len(nodes)} nodes, but the system does not say which is near {', '.join(unknown)}"
        fix = f"numactl --cpunodebind={nodes[0]} --membind={nodes[0]} lmcache server  (the GPUs' node)"
        return Check("NUMA", WARN, finding, fix)
    if gpu_nodes:
        near = ", ".join(f"{gpu} at node {node}" for gpu, node in gpu_nodes.items())
        return Check("NUMA", OK, f"{len(nodes)} nodes, {near}: L1 is populated near them")
    return Check("NUMA", OK, f"{len(nodes)} nodes: numactl around the server decides where L1 is")


def ptrace(scope: str | None, failure: str) -> Check:
    """`scope` is kernel.yama.ptrace_scope, or None without Yama. `failure` is the error of a copy by another
    process of this user, empty if it worked."""
    setting = "no Yama" if scope is None else f"kernel.yama.ptrace_scope={scope}"
    if not failure:
        return Check("ptrace", OK, f"memory of another process was read ({setting})")
    if scope in ("2", "3"):
        fix = "sudo sysctl kernel.yama.ptrace_scope=1"
        if scope == "3":  # cannot be changed while the kernel runs
            fix = "echo kernel.yama.ptrace_scope=1 | sudo tee /etc/sysctl.d/99-ptrace.conf && sudo reboot"
    else:
        fix = "docker run --security-opt seccomp=unconfined …  (or a profile that allows process_vm_readv)"
    return Check("ptrace", FAIL, f"memory of another process cannot be read ({setting}): {failure}", fix)


def driver(gpus: Sequence[str], version: int, failure: str, has_device_files: bool) -> Check:
    """`version` is the driver's newest CUDA, 12080 for 12.8; `failure` is why the driver does not start."""
    if gpus:
        shown = f"CUDA {version // 1000}.{version % 1000 // 10}, {len(gpus)} GPU(s): {', '.join(gpus)}"
        return Check("driver", OK, shown)
    if has_device_files:
        fix = "nvidia-smi && nvidia-modprobe -u -c 0  (on the host; docker: --gpus all; driver 525 or newer)"
        return Check("driver", FAIL, f"this machine has a GPU that cannot be used here: {failure}", fix)
    return Check("driver", OK, "no GPU: engines on the CPU are served")


def vllm(version: str) -> Check:
    """`version` is the vLLM of this Python environment, empty if there is none."""
    if not version:
        return Check("vLLM", OK, f"not in this Python environment; the connector is for {VLLM_RANGE}")
    if refusal := too_old(version):
        return Check("vLLM", FAIL, refusal, INSTALL_VLLM)
    if reason := untested(version):
        return Check("vLLM", FAIL, f"engines here are not cached, because they have {reason}", INSTALL_VLLM)
    return Check("vLLM", OK, f"{version}, which the connector works with")


def plugin(vllm_version: str, failure: str, allowed: str | None) -> Check:
    """`failure` is why vLLM's entry point for the connector does not load; `allowed` is VLLM_PLUGINS."""
    if not vllm_version:
        return Check("plugin", OK, "not needed without vLLM")
    if failure:
        return Check("plugin", FAIL, failure, f"pip install --force-reinstall --no-deps {ORIGIN}")
    if allowed is not None and "lmcache_mp" not in allowed.split(","):
        names = ",".join(filter(None, [*allowed.split(","), "lmcache_mp"]))
        return Check("plugin", FAIL, "VLLM_PLUGINS leaves lmcache_mp out", f"export VLLM_PLUGINS={names}")
    return Check("plugin", OK, "vLLM finds the connector by its name")


def command(beside_lmcache: bool) -> Check:
    """Whether LMCache, whose command has the same name, is in this Python environment."""
    if not beside_lmcache:
        return Check("command", OK, "LMCache is not in this Python environment")
    finding = "LMCache is here, too, and pip let the later of the two overwrite the command lmcache"
    fix = f"pip uninstall lmcache; pip install --force-reinstall --no-deps {ORIGIN}"
    return Check("command", WARN, finding, fix)


def server(version: str, where: str) -> Check:
    """`version` is that of the server at `where`."""
    if version != VERSION:
        fix = f"stop that server and run 'lmcache server' of {VERSION}, or install {version} here"
        return Check("server", FAIL, f"{version} at {where}, but {VERSION} here", fix)
    if where.startswith("tcp") and KEY_FILE not in where:
        finding = f"{version} at {where}, without a key: whoever reaches that address can clear the cache"
        return Check("server", WARN, finding, "add --key-file at its next start, or leave out its --host")
    return Check("server", OK, f"{version} at {where}, the same version as here")


def connectors(server_version: str, sessions: Sequence[Mapping[str, Any]]) -> Check:
    """`sessions` come from the server's status; `server_version` is empty without a server."""
    name = "connectors"
    if not server_version:
        return Check(name, OK, "unknown without a server")
    vllms = sorted({session["vllm_version"] for session in sessions} - {""})
    running = f", in vLLM {' and '.join(vllms)}" if vllms else ""
    # Both sides of a connector can be in one process, each with its own session.
    versions = {
        f"engine {session['engine_id']}, pid {session['pid']}": session["client_version"]
        for session in sessions
        if session["engine_id"]
    }
    others = [f"{engine} has {version}" for engine, version in versions.items() if version != server_version]
    if others:
        fix = f"pip install {ORIGIN}  (of {server_version}, where vLLM is installed)"
        return Check(name, WARN, f"the server has {server_version}, {', '.join(others)}{running}", fix)
    reasons = {session["engine_id"]: session["not_cached"] for session in sessions if session["not_cached"]}
    if reasons:
        texts = [f"engine {engine} is not cached, because it has {why}" for engine, why in reasons.items()]
        return Check(name, WARN, "; ".join(texts))
    engines = sorted({session["engine_id"] for session in sessions if session["engine_id"]})
    listed = f"{', '.join(engines)}, all of the server's version{running}" if engines else "none is connected"
    return Check(name, OK, f"{listed}; {_UNSEEN}")


def names(explained: Sequence[Mapping[str, Any]]) -> Check:
    """What names the pages of each engine. `explained` comes from the server's status."""
    texts = [
        f"engine {each['engine']}: model {each['model']}, namespace {each['namespace'][:16]}"
        + "".join(f", {name} {each['fields'].get(field, '')}" for name, field in NAMED.items())
        for each in explained
    ]
    return Check("names of pages", OK, "; ".join(texts) or "no engine is known")
