"""Decides which clients get through the handshake of a TCP socket that has a key."""

import zmq
from zmq.utils import z85


class Authenticator:
    """Gives a socket the server's key pair (CURVE), and admits only clients that have the same one (ZAP).

    Without the key file, a client lacks the public key, too, and libzmq ends its handshake before it asks
    here. But a libzmq that uses TweetNaCl instead of libsodium takes a point of small order for a client's
    key. Then whoever sends one gets this far, and cannot show that it has the secret key.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", key: bytes) -> None:
        secret = z85.encode(key)
        self._public = z85.decode(zmq.curve_public(secret))
        self._requests = socket.context.socket(zmq.REP)
        self._requests.bind("inproc://zeromq.zap.01")
        socket.curve_secretkey, socket.curve_server = secret, True
        # Without an answer from here, nobody gets in.
        socket.zap_domain, socket.zap_enforce_domain = b"lmcache", True

    @property
    def descriptor(self) -> int:
        """Becomes readable when `answer` has work. Like all descriptors of ZeroMQ, it signals edges."""
        return int(self._requests.getsockopt(zmq.FD))

    def close(self) -> None:
        self._requests.close(0)

    def answer(self) -> None:
        """Answers for all clients that wait. Each has shown that it has the secret key of its public key."""
        while self._requests.poll(0):
            version, number, _, _, _, mechanism, *keys = self._requests.recv_multipart(zmq.NOBLOCK)
            status = b"200" if (mechanism, keys) == (b"CURVE", [self._public]) else b"400"
            self._requests.send_multipart([version, number, status, b"", b"", b""])
