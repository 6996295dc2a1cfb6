"""What the table of docs/security.md says of those who reach the server, and of those who must not."""

import os
import subprocess
import sys

import pytest
from harness.processes import environment
from harness.rawclient import RawEngine, chain, group
from harness.server import LMCacheServer

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
