"""What the server counts of its lookups, while L1 grows and engines ask again."""

from making import new_planner

from lmcache_client.contract.geometry import FULL, SLIDING_WINDOW, GroupSpec, Region
from lmcache_client.contract.messages import Lookup, Release
from lmcache_server.core.cache import Cache
from lmcache_server.core.layout import Layout
from lmcache_server.core.pool import FRAME_BYTES
from lmcache_server.core.reservation import Reservation
from lmcache_server.options.planner.server import Server

CHUNK = 16
GROUP = GroupSpec(FULL, CHUNK, 0, "", (Region(0, 0, FRAME_BYTES, FRAME_BYTES),))
LAYOUT = Layout(b"n" * 32, CHUNK, (GROUP,), ((0,),))
KEYS = tuple(number.to_bytes(32, "little") for number in range(8))


def look_up(planner: Server, request: str) -> None:
    planner.looked_up(1, LAYOUT, Lookup(request, KEYS, 0, CHUNK * len(KEYS), CHUNK * len(KEYS) + 1), 0.0)


def start(planner: Server) -> tuple[int, float]:
    window = planner.report(0.0)["demand"]["windows"]["start"]
    return window["tokens"], window["hit_rates"]["unlimited"]


def test_an_l1_that_still_grows_remembers_as_much_as_it_will_need() -> None:
    cache = Cache(FRAME_BYTES, 0)
    planner = new_planner(cache)
    look_up(planner, "first")
    cache.grow(16)
    for request in ("second", "third"):
        look_up(planner, request)
    assert start(planner) == (3 * CHUNK * len(KEYS), round(2 / 3, 4))
    assert planner.demand.exact_frames() is None, "nothing was forgotten"


def test_a_request_that_asks_in_every_step_counts_once_until_it_ends() -> None:
    planner = new_planner(Cache(FRAME_BYTES, 16))
    for _ in range(3):
        look_up(planner, "request")
    assert start(planner) == (CHUNK * len(KEYS), 0.0)
    planner.released(1, LAYOUT, Release((), KEYS, "request"))
    look_up(planner, "request")
    assert start(planner) == (2 * CHUNK * len(KEYS), 0.5)


def test_large_windows_do_not_hide_the_hits_of_a_small_l1() -> None:
    """A quarter of L1 has 100 frames. Eight chunks take 48, of which the windows take 40."""
    window = GroupSpec(SLIDING_WINDOW, CHUNK, 1024, "", (Region(0, 0, 5 * FRAME_BYTES, 5 * FRAME_BYTES),))
    layout = Layout(b"w" * 32, CHUNK, (GROUP, window), ((0,), (0,)))
    cache = Cache(FRAME_BYTES, 400)
    planner = new_planner(cache)
    for key in KEYS:
        for group, size in enumerate((FRAME_BYTES, 5 * FRAME_BYTES)):
            reserved = cache.reserve(layout, key, group, 0, 1, size)
            assert isinstance(reserved, Reservation)
            cache.commit(reserved)
    for request in ("first", "second"):
        planner.tick(0.0)
        tokens = CHUNK * len(KEYS)
        planner.looked_up(1, layout, Lookup(request, KEYS, 0, tokens, tokens + 1), 0.0)
    rates = planner.report(0.0)["demand"]["windows"]["start"]["hit_rates"]
    assert rates["0.25"] == rates["unlimited"] == 0.5
