"""Every judgement of `lmcache doctor`, of machines that are not here."""

import pytest

from lmcache_client.contract.version import VERSION
from lmcache_server.commands.doctor import checks
from lmcache_server.commands.doctor.checks import FAIL, OK, UNLIMITED, WARN

GB = 1 << 30
THP, SHMEM = "/sys/thp/enabled", "/sys/thp/shmem_enabled"
PAGES = {"HugePages_Total": 10, "HugePages_Free": 8, "HugePages_Rsvd": 3, "Hugepagesize": 2 << 20}
EPERM = "the kernel does not let the server"

CASES = [
    (checks.memlock(64 << 10, GB, 0), OK, "64.0 KiB; only GPUs", ""),
    (checks.memlock(UNLIMITED, GB, 1), OK, "unlimited, for 1.0 GiB", ""),
    (checks.memlock(GB, GB, 1), OK, "1.0 GiB", ""),
    (checks.memlock(GB - 1, GB, 1), WARN, "need all 1.0 GiB", "ulimit -l unlimited"),
    (checks.transparent_huge_pages(None, THP), WARN, "this kernel has none", ""),
    (checks.transparent_huge_pages("always [madvise] never", THP), OK, "madvise", ""),
    (checks.transparent_huge_pages("[always] madvise never", THP), OK, "always", ""),
    (
        checks.transparent_huge_pages("always madvise [never]", THP),
        WARN,
        "off (never)",
        "echo madvise | sudo tee /sys/thp/enabled",
    ),
    (
        checks.transparent_huge_pages("always within_size advise never [deny] force", SHMEM),
        WARN,
        "off (deny)",
        "echo advise | sudo tee /sys/thp/shmem_enabled",
    ),
    (checks.reserved_huge_pages(PAGES, GB, False, False), OK, "10 of 2.0 MiB, not used", ""),
    (checks.reserved_huge_pages(PAGES, 10 << 20, True, False), OK, "5 of 10 are free", ""),
    (checks.reserved_huge_pages(PAGES, 11 << 20, True, False), FAIL, "L1 needs 6", "vm.nr_hugepages=11"),
    (checks.reserved_huge_pages(PAGES, GB, True, True), OK, "5 of 10", ""),
    (checks.reserved_huge_pages({}, GB, True, False), FAIL, "needs 512 of 2.0 MiB", "vm.nr_hugepages=512"),
    (checks.numa([0], {"GPU": -1}), OK, "one node", ""),
    (checks.numa([0, 1], {}), OK, "2 nodes: numactl", ""),
    (checks.numa([0, 1], {"a": 1, "b": 0}), OK, "a at node 1, b at node 0", ""),
    (checks.numa([0, 1], {"a": 1, "b": -1}), WARN, "near b", "numactl --cpunodebind=0 --membind=0 lmcache"),
    (checks.ptrace(None, ""), OK, "no Yama", ""),
    (checks.ptrace("1", ""), OK, "kernel.yama.ptrace_scope=1", ""),
    (checks.ptrace("2", EPERM), FAIL, EPERM, "sudo sysctl kernel.yama.ptrace_scope=1"),
    (checks.ptrace("3", EPERM), FAIL, EPERM, "sudo reboot"),
    (checks.ptrace("1", EPERM), FAIL, EPERM, "--cap-add SYS_PTRACE"),
    (checks.ptrace(None, EPERM), FAIL, EPERM, "--cap-add SYS_PTRACE"),
    (checks.l1_file("", "", True, 0, GB), OK, "not used", ""),
    (checks.l1_file("/a/b c", "", True, 0, GB), FAIL, "no directory", "mkdir -p \"$(dirname '/a/b c')\""),
    (checks.l1_file("/dev/shm/x", "/dev/shm", True, GB, GB), OK, "1.0 GiB for 1.0 GiB", ""),
    (checks.l1_file("/dev/shm/x", "/dev/shm", True, GB - 1, GB), FAIL, "are left", "size=2G /dev/shm"),
    (checks.l1_file("/disk/x", "/disk", False, 10 * GB, 11 * GB), FAIL, "at /disk", "--l1-size-gb 9"),
    (checks.memory(GB, "the limit", 0, GB), OK, "1.0 GiB available for 1.0 GiB of L1 (the limit)", ""),
    (checks.memory(0, "the limit", GB, GB), OK, "0 B available beside L1, which has its memory", ""),
    (checks.memory(8 * GB, "the limit", 2 * GB, 100 * GB), FAIL, "for 98.0 GiB", "--l1-size-gb 9"),
    (checks.open_files(4096, 4096), OK, "4096", ""),
    (checks.open_files(UNLIMITED, 4096), OK, "unlimited", ""),
    (checks.open_files(1024, 4096), WARN, "1024: clients", "ulimit -n 65536"),
    (
        checks.driver([], 0, "no libcuda.so.1", False),
        OK,
        "no GPU: engines on the CPU are served",
        "",
    ),
    (
        checks.driver([], 0, "no libcuda.so.1", True),
        FAIL,
        "no libcuda.so.1",
        "nvidia-smi",
    ),
    (checks.driver(["0000:01:00.0"], 12080, "", True), OK, "CUDA 12.8, 1 GPU(s): 0000:01:00.0", ""),
    (checks.copy_kernel(0, "", 0), OK, "not needed", ""),
    (checks.copy_kernel(1, "", 13000), OK, "compiled", ""),
    (checks.copy_kernel(1, "no cupy", 13000), WARN, "no cupy", "pip install 'lmcache-mp[cuda13]'"),
    (checks.copy_kernel(1, "no cupy", 12080), WARN, "no cupy", "pip install 'lmcache-mp[cuda12]'"),
    (checks.vllm(""), OK, "not in this Python environment; the connector is for 0.31 to 0.33", ""),
    (checks.vllm("0.32.1"), OK, "0.32.1", ""),
    (checks.vllm("0.30.0"), FAIL, "this is vLLM 0.30.0", "pip install 'vllm==0.33.*'"),
    (
        checks.vllm("0.34.0"),
        FAIL,
        "are not cached, because they have vLLM 0.34.0",
        "pip install 'vllm==0.33.*'",
    ),
    (checks.plugin("", "not installed", None), OK, "not needed", ""),
    (checks.plugin("0.32.0", "not installed", None), FAIL, "not installed", "--force-reinstall"),
    (checks.plugin("0.32.0", "", None), OK, "finds the connector", ""),
    (checks.plugin("0.32.0", "", "a,lmcache_mp"), OK, "finds the connector", ""),
    (checks.plugin("0.32.0", "", "a,b"), FAIL, "leaves lmcache_mp out", "VLLM_PLUGINS=a,b,lmcache_mp"),
    (checks.plugin("0.32.0", "", ""), FAIL, "leaves lmcache_mp out", "VLLM_PLUGINS=lmcache_mp"),
    (checks.server("", "port 1", "", True), WARN, "none answers at port 1", "lmcache server"),
    (checks.server("", "port 1", "another protocol: install …", False), FAIL, "another protocol", ""),
    (checks.server(VERSION, "port 1", "", False), OK, f"{VERSION} at port 1", ""),
    (
        checks.server("9.9", "port 1", "", False),
        FAIL,
        f"9.9 at port 1, and {VERSION}",
        "lmcache-mp==9.9",
    ),
    (checks.connectors("", {}, [], {}), OK, "none known", ""),
    (checks.connectors("1", {}, [], {}), OK, "0 connected", ""),
    (checks.connectors("1", {"a": "1"}, [], {}), OK, "1 connected", ""),
    (
        checks.connectors("1", {"a": "1"}, ["2", "3"], {}),
        OK,
        "1 connected, of no other version, in vLLM 2 and 3",
        "",
    ),
    (
        checks.connectors("1", {"a": "1"}, [], {"engine a": "vLLM 9"}),
        WARN,
        "engine a is not cached, because it has vLLM 9",
        "",
    ),
    (
        checks.connectors("1", {"a": "1", "b": "2"}, [], {}),
        WARN,
        "the server has 1, b has 2",
        "lmcache-mp==1",
    ),
]


@pytest.mark.parametrize(("check", "verdict", "finding", "fix"), CASES, ids=[str(case[0]) for case in CASES])
def test_a_check(check: checks.Check, verdict: str, finding: str, fix: str) -> None:
    assert check.verdict == verdict
    assert finding in check.finding
    assert fix in check.fix
    assert bool(fix) == bool(check.fix)
    assert "\n" not in check.finding + check.fix
