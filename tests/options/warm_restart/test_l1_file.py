"""The file behind L1: a whole index or none, one server, no file of others, no more space than there is."""

import contextlib
import itertools
import os
import struct
import time
from pathlib import Path

import pytest
from harness import disks
from harness.options import load
from harness.processes import as_user, root
from harness.waiting import PATIENCE_S, wait_until
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_server.core.pool import FRAME_BYTES
from lmcache_server.errors import StartError
from lmcache_server.l1 import memory as l1_memory
from lmcache_server.l1.memory import L1Memory
from lmcache_server.options.warm_restart import l1_file
from lmcache_server.options.warm_restart.l1_file import HEADER_BYTES, MAGIC, L1File

FRAMES = 3
SIZE_BYTES = FRAMES * FRAME_BYTES
END = HEADER_BYTES + SIZE_BYTES
INDEX = bytes(range(256)) * 3
HEAD_BYTES = l1_file._FIELDS.size + 32
OTHER_VERSION = "another version of lmcache wrote it"
NOT_CLEAN = "the previous server did not stop cleanly"


@contextlib.contextmanager
def opened(path, size_bytes=SIZE_BYTES):
    file = L1File(str(path), size_bytes)
    try:
        yield file
    finally:
        file.close()


def finished(path):
    """A file after a clean stop, with content in every frame."""
    with opened(path) as file:
        mapping = file.map()
        mapping[:] = b"".join(bytes([65 + frame]) * FRAME_BYTES for frame in range(FRAMES))
        mapping.close()
        file.finish(INDEX)
    return path


def sentence(path, size_bytes=SIZE_BYTES):
    """With what a file is refused."""
    with pytest.raises(StartError) as caught:
        L1File(str(path), size_bytes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def mounted(tmp_path, stack):
    """Call it with options of mount to get a directory with a file system of its own."""
    names = map("mount{}".format, itertools.count())
    return lambda *options: stack.enter_context(disks.mounted(tmp_path / next(names), *options))


def test_a_file_has_no_reserved_huge_pages():
    sentence = "--l1-path and --l1-hugetlb cannot be combined: leave one of them out"
    with pytest.raises(StartError, match=f"^{sentence}$"):
        load("--l1-path", "/dev/shm/l1", environment={"LMCACHE_L1_HUGETLB": "yes"})
    assert load("--l1-path", "/dev/shm/l1").of_options == {"l1_path": "/dev/shm/l1"}


def test_frames_and_index_come_back_and_the_index_once_only(tmp_path):
    with opened(tmp_path / "new") as file:
        assert (file.index, file.reason) == (None, "")
        info = os.stat(tmp_path / "new")
        assert (info.st_mode & 0o777, info.st_size) == (0o600, END), "closed to others"
    path = finished(tmp_path / "l1")
    with opened(path) as file:
        assert (file.index, file.reason) == (INDEX, "")
    with opened(path) as file:
        assert file.index == INDEX, "nothing was begun"
        file.begin()
        assert path.stat().st_size == END
        mapping = file.map()
        assert mapping[:] == b"".join(bytes([65 + frame]) * FRAME_BYTES for frame in range(FRAMES))
        mapping.close()
    with opened(path) as file:
        assert (file.index, file.reason) == (None, NOT_CLEAN)


def test_a_file_that_was_cut_short_stays_so_when_it_grows_again(tmp_path):
    """What was cut off is zeros then."""
    path = tmp_path / "l1"
    file = L1File(str(path), SIZE_BYTES)
    try:
        file.begin()
        file.allocate(0, SIZE_BYTES)
        assert not file.is_cut()
        os.truncate(path, 4096)
        assert file.is_cut()
        os.truncate(path, END)
        assert file.is_cut()
        with pytest.raises(OSError, match="cut it short"):
            file.finish(INDEX)
    finally:
        file.close()


@pytest.mark.parametrize("content", [b"x", b"#!/bin/sh\n", MAGIC[:-1], b"\0" * END])
def test_a_file_of_something_else_is_left_as_it_is(tmp_path, content):
    path = tmp_path / "l1"
    path.write_bytes(content)
    for mode in (0o600, 0o644):
        path.chmod(mode)
        assert "is not an lmcache file and is left unchanged: name another file" in sentence(path)
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
        assert "is not an lmcache file and is left unchanged: name another file" in sentence(path)
    assert path.read_bytes() == content


def test_what_is_no_file_or_not_ours_is_refused(tmp_path):
    assert sentence(tmp_path).endswith("it is a directory; name a file in it")
    link = tmp_path / "link"
    link.symlink_to(finished(tmp_path / "l1"))
    assert sentence(link).endswith("it is a symbolic link; name the file that it leads to")
    assert sentence(tmp_path / "none/l1") == (
        f"there is no directory for --l1-path {tmp_path}/none/l1: mkdir -p {tmp_path}/none"
    )
    assert sentence(Path("/proc/x")).endswith("/proc/x: no file can be made in /proc; name one in /dev/shm")
    os.mkfifo(tmp_path / "fifo", 0o600)
    assert "is not a regular file" in sentence(tmp_path / "fifo")
    (tmp_path / "l1").chmod(0o640)
    assert "run 'chmod 600" in sentence(tmp_path / "l1")
    (tmp_path / "empty").touch(0o644)
    assert sentence(tmp_path / "empty").endswith("is open to other users: name a new file")
    (tmp_path / "l1").chmod(0o600)
    if os.geteuid() == 0:  # only root can give a file away
        os.chown(tmp_path / "l1", 12345, -1)
        assert "belongs to user id 12345: start the server as that user" in sentence(tmp_path / "l1")
        os.chown(tmp_path / "l1", 0, -1)
    with opened(tmp_path / "l1") as file:
        assert file.index == INDEX, "refusals change nothing"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_of_a_file_that_may_not_be_opened_the_owner_is_named():
    with as_user(65534) as directory:
        denied = f"cannot open --l1-path {directory}/l1: permission denied ({{}}); name another file"
        assert sentence(directory / "l1") == denied.format(
            f"{directory} belongs to user root and has mode 755"
        )
        with root():
            (directory / "l1").touch(0o600)
        whose = f"{directory}/l1 belongs to user root and has mode 600"
        assert sentence(directory / "l1") == denied.format(whose)
        with root():
            (directory / "closed").mkdir(mode=0o700)
        assert f"({directory}/closed belongs to user root and has mode 700)" in sentence(
            directory / "closed/l1"
        )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_file_whose_directory_is_closed_is_not_removed(caplog):
    with as_user(65534) as directory:
        with root():
            (directory / "own").mkdir()
            os.chown(directory / "own", 65534, -1)
        with opened(directory / "own/l1") as file:
            with root():
                os.chown(directory / "own", 0, -1)
                (directory / "own").chmod(0o700)
            file.tick()
            file.finish(INDEX)
            assert not caplog.records
            with root():
                os.chown(directory / "own", 65534, -1)
            (directory / "own/l1").unlink()
            file.tick()
            assert "was removed, so the cache will not be saved" in caplog.text


def test_file_systems_that_cannot_hold_the_file_are_refused_and_a_ramfs_has_no_size_of_its_own(mounted):
    assert sentence(mounted("ro") / "l1").endswith(
        "its file system is read-only; name a file on another or, under systemd, one in "
        "ReadWritePaths= of the unit"
    )
    path = mounted("pagesize=2M", "hugetlbfs") / "l1"
    assert "is on hugetlbfs, which cannot hold the file: name a file in /dev/shm" in sentence(path)
    with opened(mounted("mode=700", "ramfs") / "l1", 1 << 20) as file:
        assert file.in_memory


def rewritten(path, position, content):
    with path.open("r+b") as file:
        file.seek(position)
        file.write(content)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: os.truncate(path, END + len(INDEX) - 1), "it has 262911 bytes instead of 262912"),
        (lambda path: os.truncate(path, len(MAGIC)), OTHER_VERSION),
        (lambda path: os.truncate(path, HEAD_BYTES - 1), "its header is damaged"),
        (lambda path: rewritten(path, END + 5, b"\xff"), "its index is damaged"),
        (lambda path: rewritten(path, HEAD_BYTES - 40, b"\xff\xff"), "its header is damaged"),
        *(
            (
                lambda path, at=at, value=value: rewritten(path, at, struct.pack("<I", value + 1)),
                OTHER_VERSION,
            )
            for at, value in ((16, l1_file.FORMAT), (20, l1_file.SCHEMA), (24, FRAME_BYTES))
        ),
    ],
)
def test_a_damaged_file_starts_empty_and_says_why(tmp_path, damage, reason):
    path = finished(tmp_path / "l1")
    version = struct.unpack_from("<III", path.read_bytes(), len(MAGIC))
    assert version == (l1_file.FORMAT, l1_file.SCHEMA, FRAME_BYTES), "what gives the bytes their meaning"
    damage(path)
    with opened(path) as file:
        assert (file.index, file.reason) == (None, reason)
        assert path.stat().st_size == END
        file.finish(b"anew")
    with opened(path) as file:
        assert file.index == b"anew"


def test_a_larger_l1_keeps_what_was_saved_and_a_smaller_one_leaves_it_alone(tmp_path):
    path = finished(tmp_path / "l1")
    before = path.read_bytes()
    assert sentence(path, SIZE_BYTES - 1) == (
        f"--l1-path {path} holds the cache of a larger L1: pass --l1-size-gb 0.001 or more or, to start "
        "empty, name another file"
    )
    assert path.read_bytes() == before
    for begins in (False, True):
        with opened(path, SIZE_BYTES + 2 * FRAME_BYTES + 17) as file:
            assert (file.index, file.reason) == (INDEX, "")
            mapping = file.map()
            assert mapping[:SIZE_BYTES] == before[HEADER_BYTES:END]
            mapping.close()
            if begins:
                file.begin()
        assert path.stat().st_size == END + 2 * FRAME_BYTES
        if not begins:
            with opened(path) as file:
                assert file.index == INDEX, "of a server that ended before its cache was there"
    with opened(path, SIZE_BYTES - FRAME_BYTES) as file:
        assert (file.index, file.reason) == (None, NOT_CLEAN), "nothing is lost, so nothing is refused"


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """The bytes of a file after a clean stop."""
    return finished(tmp_path_factory.mktemp("image") / "l1").read_bytes()


def index_in(content):
    """What a file of these bytes gives; None also where it is refused, and then left as it is."""
    path = Path(f"/dev/shm/lmcache-test-{os.getpid()}.flip")
    path.write_bytes(content)
    path.chmod(0o600)
    try:
        with opened(path) as file:
            return file.index
    except StartError:
        assert path.read_bytes() == content
        return None
    finally:
        path.unlink()


@settings(max_examples=300, deadline=None)
@given(
    st.sets(st.integers(0, HEAD_BYTES + len(INDEX) - 1), min_size=1),
    st.integers(1, 255),
    st.integers(0, END + len(INDEX) - 1),
)
def test_no_index_survives_flipped_bytes_or_a_cut(image, places, bits, length):
    flipped = bytearray(image)
    for place in places:
        flipped[place if place < HEAD_BYTES else END + place - HEAD_BYTES] ^= bits
    for content in (flipped, image[:length]):
        assert index_in(content) is None
    assert index_in(image) == INDEX


def test_a_crash_between_any_two_steps_of_a_clean_stop_starts_empty(tmp_path, monkeypatch):
    steps = []

    def crashing(function, after):
        def call(*arguments):
            if len(steps) == after:
                raise KeyboardInterrupt
            steps.append(function.__name__)
            return function(*arguments)

        return call

    def stop_in_order(after):
        steps.clear()
        with opened(finished(tmp_path / "l1")) as file, monkeypatch.context() as patch:
            file.begin()
            for function in (os.fsync, os.pwritev):
                patch.setattr(os, function.__name__, crashing(function, after))
            file.finish(INDEX)

    for after in range(2):
        with pytest.raises(KeyboardInterrupt):
            stop_in_order(after)
        with opened(tmp_path / "l1") as file:
            assert file.index is None
    stop_in_order(100)
    assert steps == ["fsync", "pwritev"], "the header is written when all else is on the disk"
    with opened(tmp_path / "l1") as file:
        assert file.index == INDEX


# -- space ----------------------------------------------------------------------------------------------


def test_what_the_file_system_cannot_hold_is_refused_with_both_figures_and_a_limit_named(mounted, tmp_path):
    directory = mounted("size=8m")
    assert sentence(directory / "l1", 1 << 30) == (
        f"--l1-size-gb asks for 1.00 GB, but 0.01 GB are available (the file system of {directory}/l1, "
        f"{directory}): sudo mount -o remount,size=2G {directory}  (docker: --shm-size 2g)"
    )
    assert not list(directory.iterdir()), "no empty file stays"
    assert sentence(directory / "l1", 1 << 60).endswith("engines need some, too; or free memory)")
    with disks.largest_file(1 << 20):
        assert sentence(tmp_path / "l1", 4 << 20) == (
            f"cannot use --l1-path {tmp_path}/l1: it would exceed the limit of file sizes; raise that "
            "(ulimit -f), or lower --l1-size-gb"
        )


def test_a_larger_l1_for_which_there_is_no_space_leaves_what_was_saved(mounted):
    path = finished(mounted("size=8m") / "l1")
    before = path.read_bytes()
    assert "--l1-size-gb asks for 1.00 GB, but 0.01 GB are available" in sentence(path, 1 << 30)
    assert path.read_bytes() == before


def test_a_memory_file_system_takes_memory_that_must_be_there(mounted, monkeypatch):
    path, available = mounted("size=8m") / "l1", [1 << 20]
    monkeypatch.setattr(l1_file, "available_bytes", lambda: (available[0], "MemAvailable of this machine"))
    assert sentence(path, 4 << 20) == (
        "--l1-size-gb asks for 0.00 GB, but 0.00 GB are available (MemAvailable of this machine): free memory"
    )
    available[0] = 1 << 40
    with opened(path, 4 << 20) as file:
        file.allocate(0, 4 << 20)
    available[0] = 1 << 20
    with opened(path, 4 << 20):
        """What the file has already is not asked for again."""


@contextlib.contextmanager
def filling(file, usable_frames=0):
    file.restored_frames = usable_frames
    memory = L1Memory(file.num_frames * FRAME_BYTES, backing=file)
    grown = []
    memory.fill(grown.append)
    try:
        yield memory, grown
    finally:
        memory.close()


def wait_for_end(memory):
    for thread in memory._threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_a_file_grows_piece_by_piece_to_its_size(tmp_path, monkeypatch):
    monkeypatch.setattr(l1_memory, "PIECE_BYTES", 4 * FRAME_BYTES)
    for path in (tmp_path / "l1", Path(f"/dev/shm/lmcache-test-{os.getpid()}.grow")):
        try:
            with opened(path, 10 * FRAME_BYTES) as file, filling(file) as (memory, grown):
                wait_for_end(memory)
                assert grown == [4, 4, 2]
                assert memory.populated_bytes == memory.num_bytes == 10 * FRAME_BYTES
                assert path.stat().st_blocks * 512 >= 10 * FRAME_BYTES
            with opened(path, 10 * FRAME_BYTES) as file, filling(file, 6) as (memory, grown):
                wait_for_end(memory)
                assert grown == [2, 2], "the first six frames were there"
        finally:
            path.unlink()


def test_a_full_file_system_costs_the_rest_not_the_server(mounted, monkeypatch, caplog):
    """The space was there at the start and somebody else took it."""
    monkeypatch.setattr(l1_memory, "PIECE_BYTES", 1 << 20)
    directory = mounted("size=8m")
    with opened(directory / "l1", 6 << 20) as file:
        (directory / "other").write_bytes(bytes(4 << 20))
        with filling(file) as (memory, grown):
            wait_for_end(memory)
            assert grown == [16] * 3
            memory._mapping[: 3 << 20] = b"x" * (3 << 20)
        assert "L1 has 0.00 of 0.01 GB and gets no more: no space for" in caplog.text
        assert "No space left on device" in caplog.text
        file.finish(INDEX)
    with opened(directory / "l1", 6 << 20) as file:
        assert file.index == INDEX, "nor what it has at the next start"


def test_an_index_for_which_there_is_no_space_is_none(mounted):
    directory = mounted("size=8m")
    with opened(directory / "l1", 6 << 20) as file:
        file.allocate(0, 6 << 20)
        with pytest.raises(OSError):
            file.finish(bytes(4 << 20))
    with opened(directory / "l1", 6 << 20) as file:
        assert (file.index, file.reason) == (None, NOT_CLEAN)


def test_holes_of_a_copied_file_get_space_or_are_not_used(mounted):
    directory = mounted("size=8m")
    with opened(directory / "l1", 6 << 20) as file:
        file.ensure(32)
        assert (directory / "l1").stat().st_blocks * 512 >= 32 * FRAME_BYTES
        (directory / "other").write_bytes(bytes(4 << 20))
        with pytest.raises(OSError):
            file.ensure(96)


@pytest.mark.parametrize("has_file", [False, True])
def test_closing_does_not_wait_for_all_of_a_large_memory(tmp_path, monkeypatch, has_file):
    begun = []
    slow = lambda *_: begun.append(0) or time.sleep(0.05)  # noqa: E731
    monkeypatch.setattr(l1_memory, "PIECE_BYTES", FRAME_BYTES)
    monkeypatch.setattr(l1_memory, "_populate_piece", lambda *_: slow() or 0)
    monkeypatch.setattr(L1File, "allocate", slow)
    with opened(tmp_path / "l1", 1000 * FRAME_BYTES) as file:
        memory = L1Memory(1000 * FRAME_BYTES, backing=file if has_file else None)
        memory.fill()
        wait_until(lambda: begun)
        memory.close()
        wait_for_end(memory)
        assert len(begun) < 1000
