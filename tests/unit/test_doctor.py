"""Every judgement of `lmcache doctor`, of machines that are not here."""

import os

import pytest

from lmcache_client.contract.version import VERSION
from lmcache_server.commands.doctor import devices, verdicts
from lmcache_server.errors import StartError
from lmcache_server.host import preflight
from lmcache_server.host.preflight import FAIL, OK, UNLIMITED, WARN

GB = 1 << 30
NOBODY = 1 << 22
"""No process has this number: it is the kernel's limit."""
THP, SHMEM = "/sys/thp/enabled", "/sys/thp/shmem_enabled"
PAGES = {"HugePages_Total": 10, "HugePages_Free": 8, "HugePages_Rsvd": 3, "Hugepagesize": 2 << 20}
EPERM = "the kernel does not let the server"


def session(**changed: object) -> dict[str, object]:
    same = {"engine_id": "a", "pid": 7, "client_version": "1", "vllm_version": "", "not_cached": ""}
    return {**same, **changed}


connectors, thp, memory = verdicts.connectors, verdicts.transparent_huge_pages, preflight.memory
NAMED = {
    "engine": "one",
    "namespace": "0123456789abcdef01",
    "model": "m",
    "fields": {"detail weights": "f00d", "rank 0 group 0 layout": "layout=L"},
}
CASES = [
    (devices.compute_mode("1", 0), OK, "default", ""),
    (devices.compute_mode("1", 2), WARN, "allows no process", "nvidia-smi -c 0"),
    (devices.compute_mode("1", 3), WARN, "only one process", "start the MPS daemon before"),
    (devices.instances("1", None), OK, "not supported", ""),
    (devices.instances("1", False), OK, "off", ""),
    (devices.instances("1", True), WARN, "one instance only", "CUDA_VISIBLE_DEVICES=MIG-"),
    (devices.memory("1", None, False), OK, "unknown", ""),
    (devices.memory("1", (GB, 8 * GB), False), OK, "1024 of 8192 MiB are free", ""),
    (devices.memory("1", (GB - 1, 8 * GB), True), OK, "1023 of 8192 MiB are free", ""),
    (devices.memory("1", (GB - 1, 8 * GB), False), WARN, "needs a context", "--gpu-memory-utilization"),
    (devices.namespaces(0, []), OK, "unknown without a server", ""),
    (devices.namespaces(NOBODY, []), WARN, "not in this process namespace", "beside the server"),
    (devices.namespaces(os.getpid(), [session(pid=os.getpid())]), OK, "its 1 worker(s) share one", ""),
    (
        devices.namespaces(os.getpid(), [session(pid=NOBODY)]),
        WARN,
        "engine a: in another process",
        "--pid=host",
    ),
    (verdicts.memlock(64 << 10, GB, 0), OK, "64.0 KiB; only GPUs", ""),
    (verdicts.memlock(UNLIMITED, GB, 1), OK, "unlimited, for 1.0 GiB", ""),
    (verdicts.memlock(GB, GB, 1), OK, "1.0 GiB", ""),
    (verdicts.memlock(GB - 1, GB, 1), WARN, "need all 1.0 GiB", "ulimit -l unlimited"),
    (thp(None, THP), WARN, "not in this kernel", ""),
    (thp("always [madvise] never", THP), OK, "madvise", ""),
    (thp("[always] madvise never", THP), OK, "always", ""),
    (thp("always madvise [never]", THP), WARN, "off (never)", "echo madvise | sudo tee /sys/thp/enabled"),
    (
        thp("always advise never [deny]", SHMEM),
        WARN,
        "off (deny)",
        "echo advise | sudo tee /sys/thp/shmem_enabled",
    ),
    (preflight.huge_pages(PAGES, 10 << 20), OK, "5 of 10 are free", ""),
    (preflight.huge_pages(PAGES, 11 << 20), FAIL, "needs 6 huge pages of 2.0 MiB", "vm.nr_hugepages=11"),
    (preflight.huge_pages({}, GB), FAIL, "needs 512 huge pages of 2.0 MiB", "vm.nr_hugepages=512"),
    (verdicts.numa([0], {"GPU": -1}), OK, "one node", ""),
    (verdicts.numa([0, 1], {}), OK, "2 nodes: numactl", ""),
    (verdicts.numa([0, 1], {"a": 1, "b": 0}), OK, "a at node 1, b at node 0", ""),
    (verdicts.numa([0, 1], {"a": 1, "b": -1}), WARN, "near b", "numactl --cpunodebind=0 --membind=0 lmcache"),
    (verdicts.ptrace(None, ""), OK, "no Yama", ""),
    (verdicts.ptrace("1", ""), OK, "kernel.yama.ptrace_scope=1", ""),
    (verdicts.ptrace("2", EPERM), FAIL, EPERM, "sudo sysctl kernel.yama.ptrace_scope=1"),
    (verdicts.ptrace("3", EPERM), FAIL, EPERM, "sudo reboot"),
    (verdicts.ptrace("1", EPERM), FAIL, EPERM, "--security-opt seccomp=unconfined"),
    (verdicts.ptrace(None, EPERM), FAIL, EPERM, "--security-opt seccomp=unconfined"),
    (preflight.disk_file("/disk/x", False, "6.8.0-45-generic"), OK, "on a disk", ""),
    (preflight.disk_file("/disk/x", True, "5.15.0-1"), OK, "on a disk", ""),
    (preflight.disk_file("/disk/x", True, "6.5.0"), FAIL, "Linux 6.5 and newer do not", "put it in /dev/shm"),
    (preflight.no_directory("/a b/c"), FAIL, "no directory", "mkdir -p '/a b'"),
    (preflight.l1_file("/dev/shm/x", "/dev/shm", True, GB, 1, GB - 1), OK, "1.0 GiB for 1.0 GiB", ""),
    (
        preflight.l1_file("/dev/shm/x", "/dev/shm", True, GB, GB // 2, GB // 4),
        FAIL,
        "--l1-size-gb asks for 1.00 GB, of which 0.50 GB are still missing, but 0.25 GB are available (the "
        "file system of /dev/shm/x, /dev/shm)",
        "size=2G /dev/shm",
    ),
    (
        preflight.l1_file("/disk/x", "/disk", False, 11 * GB, 9 * GB, GB),
        FAIL,
        "file system of /disk/x, /disk",
        "--l1-size-gb 9  (or",
    ),
    (memory(GB, 0, GB + GB // 200, "the limit"), OK, "1.0 GiB available for 1.0 GiB of L1 (the limit)", ""),
    (
        memory(1000 * GB, 0, 1004 * GB, "the limit"),
        FAIL,
        "asks for 1000.00 GB and takes 5.0 GiB more for page tables and the index, but 1004.00 GB are",
        "pass --l1-size-gb 502  (half, because engines need some, too; or free memory)",
    ),
    (memory(GB, GB // 2, GB, "the limit"), OK, "1.0 GiB available for 512.0 MiB more of L1 (the", ""),
    (memory(GB, GB, 0, "the limit"), OK, "0 B available beside L1, which has its memory", ""),
    (memory(GB, GB - 65535, 0, "the limit"), OK, "0 B available beside L1, which has", ""),
    (
        memory(100 * GB, 2 * GB, 8 * GB, "the limit"),
        FAIL,
        "asks for 100.00 GB, of which 98.00 GB are still missing, but 8.00 GB are available (the limit)",
        "pass --l1-size-gb 5  (half, because engines need some, too; or free memory)",
    ),
    (memory(GB, 0, 1 << 20, "the limit"), FAIL, "0.00 GB are available", "free memory"),
    (preflight.open_files(4096), OK, "4096", ""),
    (preflight.open_files(UNLIMITED), OK, "unlimited", ""),
    (preflight.open_files(4095), WARN, "the limit of open files is 4095, so clients", "ulimit -n 65536"),
    (preflight.open_files(255), FAIL, "the limit of open files is 255, so clients", "ulimit -n 65536"),
    (verdicts.driver([], 0, "no libcuda.so.1", False), OK, "no GPU: engines on the CPU are served", ""),
    (verdicts.driver([], 0, "no libcuda.so.1", True), FAIL, "no libcuda.so.1", "nvidia-modprobe -u -c 0"),
    (verdicts.driver(["0000:01:00.0"], 12080, "", True), OK, "CUDA 12.8, 1 GPU(s): 0000:01:00.0", ""),
    (verdicts.vllm(""), OK, "not in this Python environment; the connector is for 0.31 to 0.33", ""),
    (verdicts.vllm("0.32.1"), OK, "0.32.1", ""),
    (verdicts.vllm("0.30.0"), FAIL, "this is vLLM 0.30.0", "pip install 'vllm==0.33.*'"),
    (
        verdicts.vllm("0.34.0"),
        FAIL,
        "not cached, because they have vLLM 0.34.0",
        "pip install 'vllm==0.33.*'",
    ),
    (verdicts.names(()), OK, "no engine is known", ""),
    (
        verdicts.names([NAMED]),
        OK,
        "one: model m, namespace 0123456789abcdef, weights f00d, layout layout=L",
        "",
    ),
    (verdicts.plugin("", "not installed", None), OK, "not needed", ""),
    (verdicts.plugin("0.32.0", "not installed", None), FAIL, "not installed", "--force-reinstall"),
    (verdicts.plugin("0.32.0", "", None), OK, "finds the connector", ""),
    (verdicts.plugin("0.32.0", "", "a,lmcache_mp"), OK, "finds the connector", ""),
    (verdicts.plugin("0.32.0", "", "a,b"), FAIL, "leaves lmcache_mp out", "VLLM_PLUGINS=a,b,lmcache_mp"),
    (verdicts.plugin("0.32.0", "", ""), FAIL, "leaves lmcache_mp out", "VLLM_PLUGINS=lmcache_mp"),
    (verdicts.server(VERSION, "port 1"), OK, f"{VERSION} at port 1", ""),
    (verdicts.server(VERSION, "tcp://h:1?key_file=/k"), OK, "the same version as here", ""),
    (verdicts.server(VERSION, "tcp://h:1"), WARN, "reaches that address can clear the cache", "--key-file"),
    (verdicts.server("9.9", "port 1"), FAIL, f"9.9 at port 1, but {VERSION}", "install 9.9 here"),
    (verdicts.command(False), OK, "not in this", ""),
    (verdicts.command(True), WARN, "overwrite the command", "pip uninstall lmcache; pip install --force-"),
    (connectors("", []), OK, "unknown without", ""),
    (connectors("1", []), OK, "none is connected; an engine that reaches no server", ""),
    (
        connectors("1", [session(), session(), session(engine_id="")]),
        OK,
        "a, all of the server's version; an",
        "",
    ),
    (
        connectors("1", [session(vllm_version="3"), session(engine_id="b", vllm_version="2", pid=8)]),
        OK,
        "a, b, all of the server's version, in vLLM 2 and 3; an engine",
        "",
    ),
    (
        connectors("1", [session(), session(not_cached="vLLM 9")]),
        WARN,
        "engine a is not cached, because it has vLLM 9",
        "",
    ),
    (
        connectors("1", [session(), session(engine_id="b", client_version="2")]),
        WARN,
        "the server has 1, engine b, pid 7 has 2",
        "pip install PATH_OF_ITS_CLONE_OR_WHEEL  (of 1, ",
    ),
]


@pytest.mark.parametrize(("check", "verdict", "finding", "fix"), CASES, ids=[str(case[0]) for case in CASES])
def test_a_check(check: preflight.Check, verdict: str, finding: str, fix: str) -> None:
    assert check.verdict == verdict
    assert finding in check.finding
    assert fix in check.fix
    assert bool(fix) == bool(check.fix)
    assert "\n" not in check.finding + check.fix


def test_what_fails_keeps_the_server_from_starting_and_a_warning_does_not() -> None:
    assert memory(GB, 0, 1 << 20, "the limit").fix == "free memory", "no size is advised"
    preflight.require(preflight.open_files(1024))
    with pytest.raises(StartError, match=r"needs 6 huge pages .* are free: sudo sysctl vm.nr_hugepages=11"):
        preflight.require(preflight.huge_pages(PAGES, 11 << 20))
