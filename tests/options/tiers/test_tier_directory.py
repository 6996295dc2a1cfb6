"""The tier in a directory, on real file systems."""

import contextlib
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from harness.disks import largest_file, mounted
from harness.processes import ChildProcess, as_user, root, rss_bytes
from harness.tiers import TierContract, all_kept, fails, fill, in_threads, kept, memory, same
from harness.waiting import wait_until

from lmcache_server.options.tiers import directory as module
from lmcache_server.options.tiers import folders
from lmcache_server.options.tiers.directory import Directory
from lmcache_server.options.tiers.pieces import PAGE_BYTES

MIB = 1 << 20
Open = Callable[..., Directory]


@pytest.fixture
def open_at(tmp_path: Path) -> Iterator[Open]:
    """Opens the directory of this test (or another one), ready to write."""
    opened = []

    def open_it(path: Path = tmp_path / "tier", size_bytes: int = 64 * MIB, **more) -> Directory:
        tier = Directory(str(path), size_bytes, **more)
        opened.append(tier)
        wait_until(lambda: tier._listed)
        return tier

    yield open_it
    for tier in opened:
        tier.close()


@pytest.fixture(params=["own", "shared", "buffered"])
def tier(request, open_at: Open, monkeypatch) -> Directory:
    if request.param == "buffered":
        # As file systems do that have none.
        refusing = failing(os.open, errno.EINVAL, lambda _, flags: bool(flags & os.O_DIRECT))
        monkeypatch.setattr(os, "open", refusing)
    tier = open_at(shared=request.param == "shared")
    assert bool(tier._files.direct) == (request.param != "buffered")
    return tier


def failing(real: Callable[..., int], code: int, when: Callable[[object, int], bool]) -> Callable[..., int]:
    """os.open, but for the paths and flags of which `when` is true."""

    def refusing(path, flags, *more, **named):
        if when(path, flags):
            raise OSError(code, os.strerror(code))
        return real(path, flags, *more, **named)

    return refusing


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    with mounted(tmp_path / "small", "size=16m,mode=700") as place:
        yield place


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file() and path.parent != root)


class TestContract(TierContract):
    pass


def test_only_its_user_can_read_it(open_at, tmp_path):
    old = os.umask(0)
    try:
        tier = open_at()
        assert tier.write("a/b", memory(1))
        tier.close()
        open_at()
    finally:
        os.umask(old)
    for path in [tmp_path / "tier", *(tmp_path / "tier").rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_it_says_how_much_it_holds_and_what_it_has_evicted(open_at):
    tier = open_at(size_bytes=4 * MIB)
    for number in range(6):
        assert tier.write(f"a/{number}", memory(256))
    assert sum(tier.present([f"a/{number}" for number in range(6)])) == 4
    assert tier.usage[:4] == (4 * MIB, 4 * MIB, 4, 2)
    tier.close()
    # What does not fit into a smaller directory is evicted at once.
    tier = open_at(size_bytes=MIB)
    wait_until(lambda: tier.usage.evicted_records == 3)
    wait_until(lambda: sum(tier.present([f"a/{number}" for number in range(6)])) == 1)
    assert open_at(tier._path + "-shared", shared=True).usage is None


def test_it_says_for_how_long_the_record_that_goes_next_was_not_used(open_at, tmp_path):
    names = [f"a/{number}" for number in range(6)]
    tier = open_at()
    assert tier.usage.oldest_age_seconds == 0, "there is none"
    for name in names[:3]:
        assert tier.write(name, memory(256))
    tier.close()
    for path in files(tmp_path / "tier"):
        os.utime(path, (1, time.time() - 5000))
    tier = open_at(size_bytes=3 * MIB)
    ages_s = []
    for name in names[3:]:
        assert tier.read(names[0], memory(256))
        ages_s.append(tier.usage.oldest_age_seconds)
        assert tier.write(name, memory(256))
    assert list(tier.present(names)) == [True, False, False, False, True, True]
    assert all(5000 <= age_s < 8000 for age_s in ages_s[:2]), "since the start nobody has used them"
    assert ages_s[2] < 3000, "these were read or written"


def test_one_that_may_take_more_than_there_is_warns_once(small_disk, open_at, caplog):
    open_at(small_disk / "tier", 8 * MIB)
    assert "has room for" not in caplog.text
    open_at(small_disk / "large", 1 << 30)
    wait_until(lambda: "may take 1.0 GiB, but its file system has room for 15." in caplog.text)


def test_a_directory_whose_parent_is_not_there_is_not_made(open_at, tmp_path):
    """An NVMe that is not mounted must not become the disk of the system."""
    assert f"there is no directory {tmp_path}/nvme: mount or make it" in fails(
        partial(open_at, tmp_path / "nvme/lmcache")
    )
    assert not (tmp_path / "nvme").exists()


def test_one_that_is_made_on_the_root_disk_warns(small_disk, open_at, tmp_path, caplog):
    """Perhaps the disk that should be there is not mounted, and the system's would fill."""
    if os.stat(tmp_path).st_dev != os.stat("/").st_dev:
        pytest.skip("the temporary directory is not on the root file system")
    warning = "is on the root file system: if its own disk is not mounted"
    open_at(small_disk / "tier")
    assert warning not in caplog.text
    open_at(tmp_path / "tier").close()
    assert caplog.text.count(warning) == 1
    open_at(tmp_path / "tier")
    assert caplog.text.count(warning) == 1, "it was not made now"


def test_what_is_no_directory_or_one_that_others_may_change_or_own_is_refused(open_at, tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file/below"):
        assert str(path) in fails(partial(open_at, path))
    (tmp_path / "tier").mkdir(mode=0o700)
    (tmp_path / "tier").chmod(0o777)
    subdirectory = f"name a new subdirectory of it, such as {tmp_path}/tier/lmcache"
    for mode in (0o777, 0o1777, 0o2775):  # as /tmp and /var/local, which nobody should close
        (tmp_path / "tier").chmod(mode)
        assert fails(open_at).endswith(f" and so change records: {subdirectory}")
    if os.geteuid() == 0:  # only root can give a directory away
        (tmp_path / "tier").chmod(0o755)
        os.chown(tmp_path / "tier", 65534, 65534)
        assert fails(open_at) == (
            f"the directory {tmp_path}/tier belongs to user nobody, who may change records: name another "
            "one, or start the server as that user"
        )
        os.chown(tmp_path / "tier", os.geteuid(), -1)
    else:
        (tmp_path / "tier").chmod(0o700)
    open_at()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_of_a_directory_that_may_not_be_used_the_owner_is_named(open_at):
    with as_user(65534) as path:

        def refused(name: str, whose: str) -> None:
            assert fails(partial(open_at, path / name)) == (
                f"cannot use the directory {path}/{name} (permission denied; {whose}): name one that user "
                "nobody may write to"
            )

        refused("new", f"{path} belongs to user root and has mode 755")
        with root():
            for name, mode in {"closed": 0o700, "own": 0o500, "open": 0o755}.items():
                (path / name).mkdir(mode=mode)
            os.chown(path / "own", 65534, -1)
        refused("closed", f"{path}/closed belongs to user root and has mode 700")
        refused("closed/below", f"{path}/closed belongs to user root and has mode 700")
        refused("own", f"{path}/own belongs to user nobody and has mode 500")
        refused("open", f"{path}/open belongs to user root and has mode 755")
        (path / "own").chmod(0o700)
        with root():
            (path / "own/lock").touch(0o600)
        refused("own", f"{path}/own/lock belongs to user root and has mode 600")
        (path / "own/lock").unlink()
        tier = open_at(path / "own")
        assert tier.write("a", memory(1))
        folder = (path / "own" / folders.path_of("a")).parent
        folder.chmod(0o500)  # its files can still be read and written
        whose = f"(permission denied; {folder} belongs to user nobody and has mode 500): name one"
        assert f"cannot delete from the directory {path}/own {whose}" in fails(lambda: tier.remove(["a"]))
        tier.close()


def put_in_place_of(record: Path, what: str) -> None:
    """What cannot be read as a record, where one was."""
    aside = record.with_name("aside")
    record.rename(aside)
    if what == "a FIFO":
        os.mkfifo(record)
    elif what == "a link":
        record.symlink_to(aside)
    elif what == "a directory":
        record.mkdir()
        (record / "file").write_text("x")
    else:
        aside.rename(record)


def test_what_is_no_plain_file_is_none_and_is_moved_away(tier, tmp_path, monkeypatch):
    assert tier.write("1", memory(1, seed=1))
    for what in ("a FIFO", "a link", "a directory", "not to be opened"):
        assert tier.write("0", memory(1, seed=0))
        (record,) = (tmp_path / "tier").glob("*/0.kv")
        put_in_place_of(record, what)
        if what == "not to be opened":
            monkeypatch.setattr(os, "open", failing(os.open, errno.EIO, lambda path, _: "/0.kv" in str(path)))
        assert not tier.read("0", memory(1)), what
        assert kept(tier, "1", memory(1, seed=1)), "the others are still read"
        tier.remove(["0"])
        assert list(tier.present(["0", "1"])) == [False, True], what
    monkeypatch.undo()
    assert tier.write("0", memory(1, seed=2))
    assert kept(tier, "0", memory(1, seed=2))


def test_the_size_is_kept_and_the_least_recently_used_goes(open_at, tmp_path):
    tier, names = open_at(size_bytes=8 * MIB), [f"{number}" for number in range(9)]
    fill(tier, names[:8], 256)
    assert kept(tier, "0", memory(256, seed=0)), "and so it is used"
    old = {path.stat().st_ino for path in files(tmp_path / "tier")}
    assert tier.write("8", memory(256, seed=8))
    assert list(tier.present(names)) == [True, False] + [True] * 7
    assert {path.stat().st_ino for path in files(tmp_path / "tier")} == old, "a victim's file is overwritten"
    assert tier.write("9", memory(512, 100, seed=9)), "three must go for this one"
    assert list(tier.present(names)) == [True, False, False, False, False, True, True, True, True]
    assert sum(path.stat().st_size for path in files(tmp_path / "tier")) <= 8 * MIB
    assert not tier.write("a", memory(2049)), "larger than all"
    assert all(kept(tier, f"{number}", memory(256, seed=number)) for number in (0, 5, 6, 7, 8))


def test_two_percent_of_the_file_system_stay_free(open_at, small_disk):
    tier, names = open_at(small_disk / "tier", size_bytes=1 << 40), [f"{number}" for number in range(40)]
    fill(tier, names, 256)  # others go for it
    space = os.statvfs(small_disk)
    assert space.f_bavail >= 0.02 * space.f_blocks
    assert kept(tier, "39", memory(256, seed=39))
    assert 10 <= sum(tier.present(names)) <= 15


@pytest.mark.parametrize("shared", [False, True])
def test_a_full_disk_has_no_room_and_leaves_nothing_behind(open_at, small_disk, shared, monkeypatch):
    tier = open_at(small_disk / "tier", size_bytes=1 << 40, shared=shared)
    assert tier.write("a", memory(256, seed=1))
    (small_disk / "other").write_bytes(bytes(14 * MIB + MIB // 2))
    assert not tier.write("b", memory(512)), "below the floor"
    monkeypatch.setattr(module, "FREE_PART", -1.0)
    before = files(small_disk / "tier")
    assert not tier.write("b", memory(512)), "the file system says so"
    # As with a quota of its user: what is oldest goes, or nothing would ever be written again.
    assert files(small_disk / "tier") == (before if shared else [])
    assert kept(tier, "a", memory(256, seed=1)) == shared
    (small_disk / "other").unlink()
    assert tier.write("b", memory(512, seed=2))
    assert kept(tier, "b", memory(512, seed=2))
    tier.close()


def test_a_limit_of_file_sizes_is_one_clear_error(open_at, tmp_path):
    tier = open_at()
    with largest_file(65536):
        assert "cannot write to the directory" in fails(lambda: tier.write("a", memory(256)))
    assert not any(tier.present(["a"]))
    assert files(tmp_path / "tier") == []


def test_a_read_only_file_system_can_be_read(open_at, small_disk, monkeypatch):
    # An open file would keep the test, but no failing disk, from making it read-only.
    monkeypatch.setattr(folders, "_lock", lambda *_: True)
    tier = open_at(small_disk / "tier")
    assert tier.write("a", memory(3, seed=1))
    # Used long ago: a read would note it.
    os.utime(small_disk / "tier" / folders.path_of("a"), (1, time.time()))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert "read-only: name another one, remount it or, under systemd, add it to ReadWritePaths=" in fails(
        lambda: tier.write("b", memory(1))
    )
    assert "read-only" in fails(lambda: tier.remove(["a"]))
    assert kept(tier, "a", memory(3, seed=1))
    assert list(tier.present(["a", "b"])) == [True, False]
    tier.close()
    assert "read-only" in fails(lambda: Directory(str(small_disk / "tier"), MIB))


def test_files_that_somebody_deletes_while_it_runs_are_none(open_at, tmp_path):
    tier, names = open_at(size_bytes=4 * MIB), ["0", "1", "2", "3"]
    fill(tier, names, 256)
    subprocess.run(f"rm -r {tmp_path / 'tier'}/??", shell=True, check=True)
    assert not any(tier.read(name, memory(256)) for name in names)
    assert not any(tier.present(names))
    fill(tier, names, 256)
    assert all_kept(tier, names, 256)


def test_a_truncated_file_is_none_and_one_of_whole_pages_comes_as_it_is(open_at, tmp_path):
    tier = open_at()
    assert tier.write("a", memory(3, seed=1))
    (path,) = files(tmp_path / "tier")
    with path.open("r+b") as file:
        file.write(b"changed")
    into = memory(3)
    assert tier.read("a", into), "what it contains is checked by its trailer, not here"
    assert bytes(into[0][:7]) == b"changed"
    os.truncate(path, 2 * 4096)
    assert tier.read("a", memory(3)) == 2 * 4096
    for num_bytes in (2 * 4096 - 1, 1, 0):
        os.truncate(path, num_bytes)
        assert not tier.read("a", memory(3))

    def cut(_: os.stat_result) -> bool:
        os.truncate(path, 4096)
        return True

    os.truncate(path, 3 * 4096)
    assert not tier._files.read(folders.path_of("a"), memory(3), cut), "cut after its size was seen"


@pytest.mark.parametrize("shared", [False, True])
def test_the_next_server_finds_everything_but_leftovers(open_at, tmp_path, shared):
    tier, names = open_at(shared=shared), [f"{number}/f" for number in range(20)]
    fill(tier, names, 5)
    tier.close()
    leftovers = [tmp_path / "tier" / f"{number:02x}" / f"~{number:016x}" for number in range(256)]
    others = [tmp_path / "tier" / "~$report", tmp_path / "tier" / "~backup" / "file"]
    for path in (*leftovers, *others):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"half")
        os.utime(path, (1, 1))
    tier = open_at(shared=shared)
    wait_until(lambda: not any(path.exists() for path in leftovers))
    assert all(path.exists() for path in others)
    assert all(tier.present(names))
    assert all_kept(tier, names, 5)


def test_files_of_others_are_left_alone(open_at, tmp_path, monkeypatch):
    root = tmp_path / "tier"
    tier = open_at()
    assert tier.write("0", memory(256, seed=0))
    tier.close()
    (one,) = files(root)
    for name in ("Notes.kv", "0 .kv", "0.txt", "a" * 210 + ".kv", ".kv", "1.kv", "kv"):
        (one.parent / name).write_bytes(bytes(MIB))
    (root / "order").write_text("of the day")
    others = set(files(root)) - {one}
    tier = open_at(size_bytes=MIB)
    assert kept(tier, "0", memory(256, seed=0))
    assert tier.write("2", memory(256, seed=2))
    assert list(tier.present(["0", "1", "2"])) == [False, False, True]
    tier.clear("")
    assert set(files(root)) == others
    tier.close()
    assert (root / "order").read_text() == "of the day"


def test_the_order_of_use_outlives_the_server(open_at, tmp_path, monkeypatch):
    tier, written_s = open_at(), time.time() - 5000
    names = [f"{number:02x}" for number in range(32)]
    fill(tier, names, 256)
    for number, name in enumerate(names):
        os.utime(tmp_path / "tier" / folders.path_of(name), (1, written_s + number))
    used, noted, utime = random.Random(1).sample(names, 8), [], os.utime
    with monkeypatch.context() as patched:
        # The file system may note an access by itself.
        patched.setattr(os, "utime", lambda *call, **more: (noted.append(call), utime(*call, **more)))
        for name in used:
            assert tier.read(name, memory(256))
    assert len(noted) == len(used)
    expected = [name for name in names if name not in used] + used
    for kept_records in (16, 4):
        tier.close()
        tier = open_at(size_bytes=kept_records * MIB)
        wait_until(lambda tier=tier, count=kept_records: sum(tier.present(names)) == count)
        assert all(tier.present(expected[-kept_records:]))
    wait_until(lambda: len(files(tmp_path / "tier")) == 4, what="the removal of the victims' files")
    for path in files(tmp_path / "tier"):
        assert path.stat().st_mtime < written_s + 32, "nothing is younger because it was read"
    noted = []
    monkeypatch.setattr(os, "utime", lambda file, *_, **__: noted.append(file))
    assert tier.read(used[-1], memory(256))
    assert noted == [], "not again so soon"


def test_old_records_are_gone(open_at, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SWEEP_EVERY_S", 0.05)
    for shared in (False, True):
        path = tmp_path / f"{shared}"
        tier = open_at(path, shared=shared, max_age_s=3600.0)
        assert tier.write("0", memory(1))
        assert tier.write("1", memory(1))
        tier.close()
        old, young = files(path)
        os.utime(old, (1, time.time() - 4000))
        tier = open_at(path, shared=shared, max_age_s=3600.0)
        assert sum(tier.present(["0", "1"])) == 1
        assert [tier.read(name, memory(1)) > 0 for name in "01"].count(True) == 1
        wait_until(lambda old=old: not old.exists())
        assert young.exists()


@pytest.mark.parametrize("shared", [False, True])
def test_a_clock_that_is_set_deletes_nothing(open_at, tmp_path, monkeypatch, caplog, shared):
    """That of the machine, or that of the file server, forward or back."""
    monkeypatch.setattr(module, "SWEEP_EVERY_S", 0.02)
    tier = open_at(shared=shared, max_age_s=3600.0)
    assert tier.write("0", memory(1))
    now_s = time.time()
    leftover = tmp_path / "tier" / "00" / "~0123456789abcdef"
    leftover.parent.mkdir(exist_ok=True)
    leftover.touch()
    for of, name in ((module.time, "time"), (folders, "now_s")):
        for moved_s in (-1e6, 1e6):
            with monkeypatch.context() as patch:
                patch.setattr(of, name, lambda *_, moved_s=moved_s: now_s + moved_s)
                for _ in range(2):
                    caplog.clear()
                    wait_until(lambda: "correct it, then restart this server" in caplog.text, what="a sweep")
    assert list(tier.present(["0"])) == [True]
    assert leftover.exists()


def test_two_servers_need_shared(open_at, tmp_path):
    first = open_at()
    assert "add shared=1" in fails(open_at)
    assert "add shared=1" in fails(lambda: open_at(shared=True))
    first.close()
    second, third = open_at(shared=True), open_at(shared=True)
    assert "add shared=1" in fails(open_at)
    assert second.write("a", memory(2, seed=1))
    assert list(third.present(["a", "b"])) == [True, False]
    assert kept(third, "a", memory(2, seed=1))
    third.remove(["a"])
    assert list(second.present(["a"])) == [False]


def test_one_of_several_servers_evicts_for_all(open_at, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SWEEP_EVERY_S", 0.05)
    first, second = open_at(size_bytes=4 * MIB, shared=True), open_at(size_bytes=4 * MIB, shared=True)
    now_s = time.time()

    def write_eight(tier: Directory, start: int) -> None:
        for number in range(start, start + 8):
            before = set(files(tmp_path / "tier"))
            assert tier.write(f"{number}", memory(256, seed=number))
            for path in set(files(tmp_path / "tier")) - before:
                if not path.name.startswith("~"):
                    with contextlib.suppress(FileNotFoundError):
                        os.utime(path, (now_s, now_s - 1000 + 10 * number))

    def left(start: int) -> list[bool]:
        return list(second.present([f"{number}" for number in range(start, start + 8)]))

    write_eight(second, 0)
    wait_until(lambda: sum(left(0)) <= 4)
    assert kept(second, "7", memory(256, seed=7))
    first.close()
    write_eight(second, 8)
    wait_until(lambda: sum(left(8)) <= 4 and not any(left(0)), what="the other server took over")
    assert kept(second, "15", memory(256, seed=15))


def test_a_record_being_read_is_no_victim(open_at, tmp_path):
    """Its file would be overwritten under the reader."""
    tier = open_at(size_bytes=2 * MIB)
    assert tier.write("0", memory(256, seed=0))
    assert tier.write("1", memory(256, seed=1))
    tier._catalog.use("0")
    tier._catalog.use("1")
    assert not tier.write("2", memory(256, seed=2))
    tier._catalog.release("1")
    assert tier.write("2", memory(256, seed=2))
    assert list(tier.present(["0", "1", "2"])) == [True, False, True]


def test_eviction_under_readers_never_mixes_records(open_at):
    """Many threads read and write more than there is room for, so that files are recycled under way."""
    tier = open_at(size_bytes=4 * MIB)
    patterns = {f"{number:x}": memory(64, 64, seed=number) for number in range(16)}
    read = []

    def work(seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(150):
            name = choose.choice(list(patterns))
            into = memory(64, 64)
            if tier.read(name, into):
                assert same(into, patterns[name]), "a part of it is another record's"
                read.append(name)
            else:
                tier.write(name, patterns[name])

    in_threads(6, work)
    assert read
    assert tier._catalog.used_bytes <= 4 * MIB


def test_writers_at_the_same_time_evict_no_more_than_they_need(open_at):
    tier = open_at(size_bytes=32 * MIB)
    for turn in range(3):
        names = [f"{turn}/{number:x}" for number in range(128)]

        def work(thread: int, names: list[str] = names) -> None:
            piece = memory(64)
            for name in names[thread::8]:
                tier.write(name, piece)

        in_threads(8, work)
        assert all(tier.present(names)), "there is room for exactly these"
        assert tier._catalog.used_bytes == 32 * MIB
        assert tier._arriving_bytes == 0


WRITER = """
import mmap, sys, time
from lmcache_server.options.tiers.directory import Directory
tier = Directory(sys.argv[1], 64 << 20)
while not tier._listed: time.sleep(.001)
memory = memoryview(mmap.mmap(-1, 16 << 20))
pieces = [memory[start : start + 4096] for start in range(0, 16 << 20, 4096)]  # in several system calls
print("ready", flush=True)
number = 0
while True:
    number += 1
    memory[:] = bytes([number % 251]) * memory.nbytes
    tier.write(f"{number % int(sys.argv[2])}", pieces)
"""


def test_a_server_killed_while_it_writes_leaves_whole_records_only(open_at, tmp_path):
    found = 0
    for turn in range(4):
        # There is room for four: three are overwritten, of five the files are recycled.
        command = [sys.executable, "-c", WRITER, str(tmp_path / "tier"), "3" if turn % 2 else "5"]
        with ChildProcess("tier-writer", command, pipes=True) as writer:
            assert writer.stdout.readline() == b"ready\n"
            time.sleep(0.3 + 0.05 * turn)  # some records, and a part of one
            os.kill(writer.pid, signal.SIGKILL)
            writer.popen.wait()
        tier = open_at(size_bytes=64 * MIB)
        for number in range(5):
            (into,) = memory(4096)
            if tier.read(f"{number}", [into]):
                found += 1
                content = bytes(into)
                assert content == content[:1] * len(content), "a part of it is another record's"
        assert not [path for path in files(tmp_path / "tier") if path.name.startswith("~")]
        tier.close()
    assert found


def test_nothing_is_written_before_the_directory_is_listed(tmp_path, monkeypatch):
    listed, let = Directory._list, threading.Event()

    def slow(self):
        let.wait()
        listed(self)

    monkeypatch.setattr(Directory, "_list", slow)
    tier = Directory(str(tmp_path / "tier"), MIB)
    try:
        assert not tier.write("a", memory(1))
        let.set()
        wait_until(lambda: tier.write("a", memory(1)))
    finally:
        let.set()
        tier.close()


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Path]:
    """A directory that pytest should not keep."""
    yield tmp_path / "tier"
    shutil.rmtree(tmp_path / "tier")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_million_records(large):
    """They are answered for while they are listed, then from memory; and of the next server, with less room,
    as many go as are too many."""
    path, count = large, 1_000_000
    names = [f"{number:06x}" for number in range(count)]
    for folder in folders.FOLDERS:
        (path / folder).mkdir(0o700, parents=True)
    for name in names:
        file = os.open(f"{path}/{folders.path_of(name)}", os.O_WRONLY | os.O_CREAT, 0o600)
        os.ftruncate(file, PAGE_BYTES)
        os.close(file)
    before = rss_bytes()
    with contextlib.closing(Directory(str(path), count * PAGE_BYTES)) as tier:
        assert all(tier.present(names[:: count // 100]))
        wait_until(lambda: tier._listed)
        assert all(tier.present(names))
        assert not any(tier.present([f"{name}-" for name in names[:1000]]))
        assert rss_bytes() - before < 700 * count, "a record costs some 450 bytes"
    with contextlib.closing(Directory(str(path), count // 10 * 9 * PAGE_BYTES)) as tier:
        wait_until(lambda: tier._listed and tier.usage.used_bytes <= tier.usage.capacity_bytes)
        assert tier.usage.records == sum(tier.present(names)) == count // 10 * 9
        fill(tier, ["ffffff", "fffffe"])
        assert all_kept(tier, ["ffffff", "fffffe"])
        assert tier.usage.records == count // 10 * 9


def test_only_tier_errors_are_raised(tier, monkeypatch):
    def broken(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    assert tier.write("a", memory(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", broken)
        patch.setattr(os, "pwritev", broken)
        for call, name in ((tier.read, "a"), (tier.write, "b")):
            assert "dmesg" in fails(partial(call, name, memory(1)))
    assert tier.write("a", memory(1, seed=2)), "and nothing is left of the failure"
    assert kept(tier, "a", memory(1, seed=2))
