"""The judgements: what was read of the machine comes in, a line goes out. Nothing is read here."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lmcache_client.contract.version import INSTALL_VLLM, VERSION, VLLM_RANGE, too_old, untested
from lmcache_server.host.units import GB_BYTES, size

OK, WARN, FAIL = "ok", "warn", "fail"
COLOURS = {OK: "green", WARN: "yellow", FAIL: "red"}
UNLIMITED = 1 << 63


@dataclass(frozen=True)
class Check:
    """One line: `fix` is the command that helps, where one does."""

    name: str
    verdict: str
    finding: str
    fix: str = ""


def memlock(limit_bytes: int, l1_bytes: int, num_gpus: int) -> Check:
    """`limit_bytes` is the hard limit of locked memory, UNLIMITED if there is none."""
    shown = "unlimited" if limit_bytes >= UNLIMITED else size(limit_bytes)
    if not num_gpus:
        return Check("memlock", OK, f"{shown}; only GPUs need locked memory")
    if limit_bytes >= l1_bytes:
        return Check("memlock", OK, f"{shown}, for {size(l1_bytes)} of L1")
    return Check(
        "memlock",
        WARN,  # NVIDIA's open driver pins without looking at it
        f"{shown}, and GPUs need all {size(l1_bytes)} of L1 pinned",
        "ulimit -l unlimited  (systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1)",
    )


def transparent_huge_pages(setting: str | None, path: str) -> Check:
    """`setting` is the text of the file `path`, as `always [madvise] never`; None where there is none."""
    name = "huge pages of files" if "shmem" in path else "transparent huge pages"
    if setting is None:
        return Check(name, WARN, "this kernel has none: populating L1 is slower")
    chosen = setting.partition("[")[2].partition("]")[0]
    if chosen in ("never", "deny"):
        advised = f"echo advise | sudo tee {path}" if "shmem" in path else f"echo madvise | sudo tee {path}"
        return Check(name, WARN, f"off ({chosen}): populating L1 is slower", advised)
    return Check(name, OK, chosen)


def reserved_huge_pages(info: Mapping[str, int], l1_bytes: int, wanted: bool, running: bool) -> Check:
    """`info` is /proc/meminfo; `wanted` is --l1-hugetlb, and a `running` server has its pages already."""
    name = "reserved huge pages"
    total = info.get("HugePages_Total", 0)
    free = max(info.get("HugePages_Free", 0) - info.get("HugePages_Rsvd", 0), 0)
    page_bytes = info.get("Hugepagesize", 2 << 20)
    if not wanted:
        return Check(name, OK, f"{total} of {size(page_bytes)}, not used without --l1-hugetlb")
    needed = -(-l1_bytes // page_bytes)
    if running or free >= needed:
        return Check(name, OK, f"{free} of {total} are free, for {size(l1_bytes)} of L1")
    fix = f"sudo sysctl vm.nr_hugepages={total - free + needed}"
    return Check(name, FAIL, f"{free} of {total} are free and L1 needs {needed} of {size(page_bytes)}", fix)


def numa(nodes: Sequence[int], gpu_nodes: Mapping[str, int]) -> Check:
    """`gpu_nodes` has the node of each GPU, -1 where the system does not say."""
    if len(nodes) < 2:
        return Check("NUMA", OK, "one node")
    unknown = [gpu for gpu, node in gpu_nodes.items() if node < 0]
    if unknown:
        return Check(
            "NUMA",
            WARN,
            f"{len(nodes)} nodes, and the system does not say which is near {', '.join(unknown)}",
            f"numactl --cpunodebind={nodes[0]} --membind={nodes[0]} lmcache server  (the GPUs' node)",
        )
    if gpu_nodes:
        near = ", ".join(f"{gpu} at node {node}" for gpu, node in gpu_nodes.items())
        return Check("NUMA", OK, f"{len(nodes)} nodes, {near}: L1 is populated near them")
    return Check("NUMA", OK, f"{len(nodes)} nodes: numactl around the server decides where L1 is")


def ptrace(scope: str | None, failure: str) -> Check:
    """`scope` is kernel.yama.ptrace_scope, None without Yama; `failure` what a copy from another process of
    this user met with, empty when it worked."""
    setting = "no Yama" if scope is None else f"kernel.yama.ptrace_scope={scope}"
    if not failure:
        return Check("ptrace", OK, f"memory of another process was read ({setting})")
    if scope in ("2", "3"):
        fix = "sudo sysctl kernel.yama.ptrace_scope=1"
        if scope == "3":  # cannot be taken back while the kernel runs
            fix = "echo kernel.yama.ptrace_scope=1 | sudo tee /etc/sysctl.d/99-ptrace.conf && sudo reboot"
    else:
        fix = "docker run --cap-add SYS_PTRACE …  (Kubernetes: securityContext.capabilities.add)"
    return Check("ptrace", FAIL, f"memory of another process cannot be read ({setting}): {failure}", fix)


def l1_file(path: str, mount: str, in_memory: bool, room_bytes: int, l1_bytes: int) -> Check:
    """`room_bytes` is what the file of --l1-path takes already and what its file system has left besides;
    `mount` is where that is mounted, empty when there is no directory for the file."""
    name = "shared memory"
    if not path:
        return Check(name, OK, "not used without --l1-path")
    if not mount:
        fix = f'mkdir -p "$(dirname {shlex.quote(path)})"'
        return Check(name, FAIL, f"there is no directory for --l1-path {path}", fix)
    if room_bytes >= l1_bytes:
        return Check(name, OK, f"{size(room_bytes)} for {size(l1_bytes)} of L1 at {mount}")
    gigabytes = -(-l1_bytes // GB_BYTES) + 1
    fix = f"sudo mount -o remount,size={gigabytes}G {mount}  (docker: --shm-size {gigabytes}g)"
    return Check(
        name,
        FAIL,
        f"{size(room_bytes)} are left for {size(l1_bytes)} of L1 at {mount}",
        fix if in_memory else _smaller(room_bytes),
    )


def memory(available_bytes: int, reason: str, populated_bytes: int, l1_bytes: int) -> Check:
    """`populated_bytes` is what a running server has taken of its `l1_bytes` already."""
    missing = max(l1_bytes - populated_bytes, 0)
    need = f"for {size(missing)} of L1" if missing else "beside L1, which has its memory"
    finding = f"{size(available_bytes)} available {need} ({reason})"
    if missing <= available_bytes:
        return Check("memory", OK, finding)
    return Check("memory", FAIL, finding, _smaller(available_bytes + populated_bytes))


def _smaller(room_bytes: int) -> str:
    """With a tenth to spare."""
    return f"lmcache server --l1-size-gb {int(90 * room_bytes / GB_BYTES) / 100:g}"


def open_files(limit: int, least: int) -> Check:
    """`limit` is the hard one: the server makes use of it."""
    if limit >= least:
        return Check("open files", OK, "unlimited" if limit >= UNLIMITED else str(limit))
    return Check(
        "open files",
        WARN,
        f"{limit}: clients that connect very often could end the server",
        "ulimit -n 65536  (systemd: LimitNOFILE=65536; docker: --ulimit nofile=65536)",
    )


def driver(gpus: Sequence[str], version: int, failure: str, has_device_files: bool) -> Check:
    """`version` is the newest CUDA that the driver knows, 12080 for 12.8; `failure` why it does not start."""
    if gpus:
        shown = f"CUDA {version // 1000}.{version % 1000 // 10}, {len(gpus)} GPU(s): {', '.join(gpus)}"
        return Check("driver", OK, shown)
    if has_device_files:
        fix = "nvidia-smi  (must show the GPUs; docker: --gpus all; the driver 525 or newer)"
        return Check("driver", FAIL, f"this machine has a GPU which cannot be used here: {failure}", fix)
    return Check("driver", OK, "no GPU: engines on the CPU are served")


def copy_kernel(num_gpus: int, failure: str, version: int) -> Check:
    """`failure` is why cupy's NVRTC did not compile it, empty when it did."""
    if not num_gpus:
        return Check("copy kernel", OK, "not needed without a GPU")
    if not failure:
        return Check("copy kernel", OK, "compiled by cupy's NVRTC")
    extra = "cuda13" if version >= 13000 else "cuda12"
    return Check("copy kernel", WARN, failure, f"pip install 'lmcache-mp[{extra}]'")


def vllm(version: str) -> Check:
    """`version` of the vLLM in this Python environment, empty if there is none."""
    if not version:
        return Check("vLLM", OK, f"not in this Python environment; the connector is for {VLLM_RANGE}")
    if refusal := too_old(version):
        return Check("vLLM", FAIL, refusal, INSTALL_VLLM)
    if reason := untested(version):
        return Check("vLLM", FAIL, f"engines here are not cached, because they have {reason}", INSTALL_VLLM)
    return Check("vLLM", OK, f"{version}, which the connector works with")


def plugin(vllm_version: str, failure: str, allowed: str | None) -> Check:
    """`failure` is why the entry point by which vLLM finds the connector does not load; `allowed` is
    VLLM_PLUGINS."""
    if not vllm_version:
        return Check("plugin", OK, "not needed without vLLM")
    if failure:
        return Check("plugin", FAIL, failure, "pip install --force-reinstall --no-deps lmcache-mp")
    if allowed is not None and "lmcache_mp" not in allowed.split(","):
        names = ",".join(filter(None, [*allowed.split(","), "lmcache_mp"]))
        return Check("plugin", FAIL, "VLLM_PLUGINS leaves lmcache_mp out", f"export VLLM_PLUGINS={names}")
    return Check("plugin", OK, "vLLM finds the connector by its name")


def server(version: str, where: str, failure: str, unreachable: bool) -> Check:
    """`version` of the server that answers; else `failure`."""
    if unreachable:
        return Check("server", WARN, f"none answers at {where}", "lmcache server")
    if failure:
        return Check("server", FAIL, failure)
    if version != VERSION:
        fix = f"pip install lmcache-mp=={version}  (or restart the server with this one)"
        return Check("server", FAIL, f"{version} at {where}, and {VERSION} here", fix)
    return Check("server", OK, f"{version} at {where}, as here")


def connectors(
    server_version: str, versions: Mapping[str, str], vllms: Sequence[str], not_cached: Mapping[str, str]
) -> Check:
    """`versions` has the connector's by engine and process, as far as any is connected; `vllms` are the
    versions of vLLM that they run in; `not_cached` has, by engine, why it does not use the server."""
    if not server_version:
        return Check("connectors", OK, "none known without a server")
    running = f", in vLLM {' and '.join(vllms)}" if vllms else ""
    others = [f"{who} has {version}" for who, version in versions.items() if version != server_version]
    if others:
        finding = f"the server has {server_version}, {', '.join(others)}{running}"
        fix = f"pip install lmcache-mp=={server_version}  (where vLLM is installed)"
        return Check("connectors", WARN, finding, fix)
    if not_cached:
        findings = [f"{who} is not cached, because it has {reason}" for who, reason in not_cached.items()]
        return Check("connectors", WARN, "; ".join(findings))
    return Check("connectors", OK, f"{len(versions)} connected, of no other version{running}")
