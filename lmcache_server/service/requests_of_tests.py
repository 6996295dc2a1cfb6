"""How the server recognizes the requests of tests, which it counts by themselves."""

from lmcache_server.core.layout import Layout
from lmcache_server.telemetry.metrics import Metrics, Traffic

SELFTEST = "lmcache selftest "
"""The name of a self-test's model begins with this."""
VERIFY = "lmcache-verify-"
"""The ids of the requests of `lmcache verify` contain this."""


def is_test(layout: Layout, request_id: str) -> bool:
    """Whether a self-test, `lmcache bench` or `lmcache verify` has made this request, and not a user."""
    return layout.ephemeral or VERIFY in request_id


def traffic(metrics: Metrics, layout: Layout, request_id: str) -> Traffic:
    """Where a request of an engine with this layout is counted."""
    if not is_test(layout, request_id):
        return metrics.traffic(layout.namespace, layout.model)
    ephemeral = "selftest" if layout.model.startswith(SELFTEST) else "bench"
    return Traffic("lmcache_test_", {"test": ephemeral if layout.ephemeral else "verify"})
