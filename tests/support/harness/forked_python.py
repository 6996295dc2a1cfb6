"""What pytest-xdist starts as a worker's interpreter: a fork of one that has imported vLLM; see forks.py."""

import json
import os
import socket
import sys

if __name__ == "__main__":
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as forks:
        forks.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        forks.connect(os.environ["LMCACHE_TEST_FORKS"])
        # xdist says `-u -c PROGRAM`.
        request = {"arguments": sys.argv[-2:], "environment": dict(os.environ), "directory": os.getcwd()}
        socket.send_fds(forks, [json.dumps(request).encode()], [0, 1, 2])
        # The streams are the worker's alone: it is alive as long as it has them.
        os.closerange(0, 2)
        forks.recv(8)
        sys.exit(int.from_bytes(forks.recv(8)[:4], sys.byteorder, signed=True))
