"""A client that dies at any point of its life, before and after each answer, leaves nothing behind."""

import signal

from harness.clients import client
from harness.exercise import exercise, new_engine
from harness.peer import Peer
from harness.server import LMCacheServer

ROUNDS = 2

# Forks once per line of stdin: the child lives up to a message and dies before or after its answer.
MORTALS = """
import os, signal, sys
from harness.peer import Peer
print("up", flush=True)
for line in sys.stdin:
    name, moment, number = line.split()
    pid = os.fork()
    if not pid:
        peer = Peer(sys.argv[1], "mortal " + number)
        before = Peer.LIFE[: Peer.LIFE.index(name)]
        if before:
            peer.live(before[-1])
        request_id = peer.send(peer.message(name))
        if moment == "answered":
            peer.wait_for(request_id)
        else:
            peer.socket.poll(1)  # enough for the frame to leave
        os.kill(os.getpid(), signal.SIGKILL)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def test_a_client_that_dies_at_any_message_leaves_nothing_behind() -> None:
    with LMCacheServer(l1_size_gb=0.1) as server, client(MORTALS, server.address) as mortals:
        bystander = new_engine(server.address, "bystander")
        exercise(bystander, 0)
        deaths = 0
        for _ in range(ROUNDS):
            for name in Peer.LIFE:
                for moment in ("sent", "answered"):
                    deaths += 1
                    mortals.say(f"{name} {moment} {deaths}")
                    assert int(mortals.stdout.readline()) == -signal.SIGKILL, f"{name} {moment}"
                    server.wait_at_rest(sessions=2)
            assert exercise(bystander, 0) == 3 * bystander.chunk_size
        bystander.close()
        server.wait_at_rest()
        assert server.status()["l1"]["chunks"] > 3, "what they stored outlives them"
        assert server.terminate() == 0, "the invariants are checked at the end"
