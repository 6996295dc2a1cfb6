"""What the table of docs/threats.md says of those who reach the server, and of those who must not."""

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from harness.processes import environment, run_forked
from harness.rawclient import RawEngine, chain, group
from harness.server import LMCacheServer
from harness.waiting import PATIENCE_S

from lmcache_client.contract.keys import chunk_keys

GROUPS = [group(layers=1)]
BLOCKS = list(range(1, 17))
NOBODY = 65534

_STRANGER = """
import encodings.idna, os, socket, sys  # the other user may not be able to read Python's files
socket_path, l1_path, http_port, user = sys.argv[1:]
os.setgroups([])
os.setgid(int(user))
os.setuid(int(user))
def tried(what, function):
    try:
        function()
        print(what, "reached")
    except OSError as error:
        print(what, type(error).__name__)
tried("socket", lambda: socket.socket(socket.AF_UNIX).connect(socket_path))
tried("file", lambda: open(l1_path, "rb"))
tried("http", lambda: socket.create_connection(("127.0.0.1", int(http_port)), 5))
"""

_COMMAND = """
import os, sys
import encodings.idna, http.client, lmcache_server.commands.status, msgspec.json, zmq
from pathlib import Path
from lmcache_server.commands import cli, control, nearby
user, nearby.SYSTEM_DIRECTORY, *sys.argv[1:] = int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]
os.setgroups([])
os.setgid(user)
os.setuid(user)
cli.main()
"""
OTHER = 65533


def start(server: LMCacheServer, name: str, model: str = "model") -> RawEngine:
    return RawEngine(server.address, GROUPS, engine_id=name, model=model).start()


def test_whoever_is_in_a_namespace_can_probe_it_and_store_anything_under_a_key_that_he_can_guess(
    server: LMCacheServer,
) -> None:
    """No fault: a namespace is one circle of trust. This says where the circle ends."""
    writer, reader, outsider = start(server, "writer"), start(server, "reader"), start(server, "o", "other")
    prompt = list(range(256))
    keys = chain(prompt, writer.chunk_size)
    assert reader.lookup(keys).resume_tokens == 0, "nobody has sent this prompt yet"
    lie = [writer.fill(0, block, 1000 + block) for block in BLOCKS]
    writer.store_prompt(keys, [BLOCKS])
    found = reader.lookup(keys)
    assert found.resume_tokens == 256, "somebody has sent this prompt"
    reader.load(found, keys, [BLOCKS])
    assert all((reader.pages(0, block) == page).all() for block, page in zip(BLOCKS, lie, strict=True))
    # A salt that he does not know is part of every key: he can neither ask for them nor store under them.
    salted = tuple(chunk_keys([(prompt, ("a secret salt",))]))
    assert reader.lookup(salted).resume_tokens == 0
    assert outsider.lookup(keys).resume_tokens == 0, "another model is another namespace"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_of_the_machine_reaches_nothing_but_http() -> None:
    with LMCacheServer(l1_size_gb=0.01) as server:
        path = f"{server.runtime_dir}/l1"
        server.kill()
        server.flags["l1_path"] = path
        server.start()
        # The directory of the test is as private as the one that the server makes for itself.
        arguments = [server.address.removeprefix("ipc://"), path, str(server.http_port), str(NOBODY)]
        command = [sys.executable, "-c", _STRANGER, *arguments]
        done = subprocess.run(command, env=environment({}), capture_output=True, text=True, check=False)
        reached = ["socket PermissionError", "file PermissionError", "http reached"]
        assert done.stdout.splitlines() == reached, done.stderr
        os.chmod(server.runtime_dir, 0o755)
        assert os.stat(path).st_mode & 0o777 == 0o600, "the file is closed even where its directory is not"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_an_admin_is_told_the_command_that_reaches_the_server_of_another_user(tmp_path: Path) -> None:
    """The shipped unit's server is user vllm's, in /run/lmcache."""

    def typed(user: int, directory: str, *words: str) -> tuple[int, str]:
        arguments = [str(user), server.runtime_dir, *words, "--port", str(server.port)]
        done = subprocess.run(
            [sys.executable, "-c", _COMMAND, *arguments],
            env=environment({"LMCACHE_RUNTIME_DIR": directory}),
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    with LMCacheServer(l1_size_gb=0.01) as server, socket.socket(socket.AF_UNIX) as another:
        another.bind(f"{server.runtime_dir}/1.sock")  # of a server at another port than the one asked for
        another.listen()
        for name in ("x" * 200, "9" * 200, "1\n2"):
            Path(server.runtime_dir, f"{name}.sock").touch()  # by somebody who means no good
        for path in (server.runtime_dir, server.address.removeprefix("ipc://")):
            os.chown(path, NOBODY, NOBODY)
        command = f"LMCACHE_RUNTIME_DIR={server.runtime_dir} lmcache status --port {server.port}"
        nowhere = "/tmp/lmcache-test-nowhere"
        for user in (0, NOBODY):
            assert typed(user, server.runtime_dir, "status")[0] == 0, "root may, where the variable says so"
            for words in (("status",), ("clear", "--tiers"), ("unpin", "--all")):
                code, line = typed(user, nowhere, *words)
                assert (code, f": one is in {server.runtime_dir}: run '{command}'" in line) == (1, True), line
        where = f"LMCACHE_RUNTIME_DIR={server.runtime_dir} {sys.executable} -I -m lmcache_server "
        run = "run 'sudo -u nobody env " if shutil.which("sudo") else "as root, run '"
        may_be = (
            f"; another user's may be in {server.runtime_dir}: {run}{where}status --port {server.port}'\n"
        )
        for words in (("status",), ("clear", "--tiers")):
            code, line = typed(OTHER, nowhere, *words)
            assert f": start one with 'lmcache server --port {server.port}', or pass the --host" in line
            assert (code, line.endswith(may_be)) == (1, True), line
        belongs = f"lmcache: {server.runtime_dir} belongs to user nobody: {run}{where}status --json"
        code, line = typed(OTHER, server.runtime_dir, "status", "--json")
        assert (code, line) == (1, f"{belongs} --port {server.port}'\n")

        default = Path(f"/tmp/lmcache-mp-{OTHER}")
        default.mkdir(mode=0o700)  # by somebody who was there before its user
        try:
            code, line = typed(OTHER, "", "status")
        finally:
            default.rmdir()
        own = "run this as that user, or set LMCACHE_RUNTIME_DIR to a directory of your own"
        assert (code, line) == (1, f"lmcache: {default} belongs to user root: {own}\n")

        # The server itself, and an engine, never use what another user can change.
        (tmp_path / "link").symlink_to(server.runtime_dir)
        start = ["server", "--l1-size-gb", "0.01", "--http-port", "0"]
        for directory in (server.runtime_dir, str(tmp_path / "link")):
            variables = environment({"LMCACHE_RUNTIME_DIR": directory})
            done = run_forked("lmcache", start, variables, PATIENCE_S)
            assert done.returncode == 2
            said = "belongs to user nobody: run this as that user|is no directory: set"
            assert re.search(said, done.stderr)
            assert "remove" not in done.stderr
        os.chown(server.runtime_dir, 0, 0)
    # When it is gone, root is not told to start one in its user's place.
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, NOBODY, NOBODY)
    code, line = typed(0, str(theirs), "status")
    start_as = f": start one as user nobody with 'lmcache server --port {server.port}'"
    assert (code, start_as in line) == (1, True), line
