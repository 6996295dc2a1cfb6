"""The scheduler side of an engine with one server: its leases have the server's own numbers."""

from dataclasses import dataclass

from harness.waiting import PATIENCE_S
from lmcache_client.contract.messages import Joined, Lookup, Release
from lmcache_client.engine import JOIN_S, join
from lmcache_client.server_channel import Channel, Pending


@dataclass
class RawScheduler:
    channel: Channel
    engine_id: str

    def join(self, timeout_s: float = JOIN_S) -> Joined:
        return join(self.channel, self.engine_id, timeout_s)

    def lookup(self, question: Lookup, timeout_s: float) -> Pending:
        return self.channel.submit(question, timeout_s)

    def release(
        self, leases: tuple[int, ...], keys: tuple[bytes, ...] = (), request_id: str = "", answers: int = 0
    ) -> Pending:
        return self.channel.submit(Release(leases, keys, request_id, answers), PATIENCE_S)
