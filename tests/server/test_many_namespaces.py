"""More namespaces than a report can describe: one frame of L1 is enough to keep a namespace."""

from harness.peer import Peer, widest_geometry
from harness.server import LMCacheServer

from lmcache_client.contract.keys import ModelTag
from lmcache_server.admin.status import SHOWN_BYTES
from lmcache_server.service.sessions import MAX_KNOWN

NAMESPACES = 4 * MAX_KNOWN
NAMESPACE_BYTES = 12 << 10
"""What the server's memory may grow by for each, with 64 groups and a long name."""


def test_the_report_of_very_many_counts_most_and_the_commands_work():
    with LMCacheServer(l1_size_gb=0.2) as server, Peer(server.address) as peer:
        server.wait_until_populated()
        before = server.rss_bytes()
        peer.geometry = widest_geometry()
        peer.ask(peer.hello())
        for number in range(NAMESPACES):
            peer.model = ModelTag("\U0001f4a3" * 4000, (("weights", str(number)),), 1, 1)
            peer.live("store", since="register")
        assert server.rss_bytes() - before < NAMESPACES * NAMESPACE_BYTES
        status = server.status()
        assert len(status["namespaces"]) + status["namespaces_left_out"] == NAMESPACES
        assert len(server.get("/status")) < 2 * SHOWN_BYTES
        assert server.metrics()["lmcache_namespaces"] == NAMESPACES

        shown = server.cli("status")
        assert (shown.returncode, shown.stderr) == (0, "")
        assert f"namespaces: {NAMESPACES}, of which " in shown.stdout
        assert "the same version as here" in server.cli("doctor").stdout, "it has read the report"
        bench = server.cli("bench", "--requests", "5", "--page-kb", "8")
        assert bench.returncode == 0, bench.stderr
