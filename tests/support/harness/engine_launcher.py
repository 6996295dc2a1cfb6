"""Has an engine forked (see engine_forks.py) with its own standard streams and in its own process group, and
lives and ends as the engine does. Arguments: the socket, the engine's arguments."""

import array
import json
import os
import signal
import socket
import sys

os.setpgid(0, 0)
signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # for the engine
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as forks:
    forks.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    forks.connect(sys.argv[1])
    request = {"arguments": sys.argv[2], "environment": dict(os.environ)}
    request |= {"directory": os.getcwd(), "group": os.getpgrp()}
    socket.send_fds(forks, [json.dumps(request).encode()], [0, 1, 2])
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    answer = forks.recv(4)
code = array.array("i", answer)[0] if answer else 1
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
