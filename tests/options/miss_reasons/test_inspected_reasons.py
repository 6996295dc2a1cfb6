"""What Inspect tells of the reasons why a prompt is not found. The real router."""

from desk import Desk, evict_everything, inspect, serving
from fuzz.messages import CHUNK_SIZE

from lmcache_client.contract.control import Inspected

__all__ = ["serving"]


def test_it_tells_what_a_lookup_would_find_and_why_not_more(serving: Desk) -> None:
    size, nothing = CHUNK_SIZE, ((0, 0, ()),)
    fresh = Inspected(0, (b"\0",), (("not_stored", 2 * size),), nothing)
    assert inspect(serving, 1, 2) == fresh
    serving.stored(1, 2, 4)
    missed = (("not_stored", 2 * size),)
    assert inspect(serving, 1, 2, 3, 4) == Inspected(2 * size, (b"\x0b",), missed, ((0, 2 * size, ()),))
    assert inspect(serving, 1, 2) == Inspected(2 * size, (b"\x03",), ())
    assert inspect(serving, 1, 2, engine="engine 1") == fresh, "another model"
    evict_everything(serving)
    assert inspect(serving, 1, 2) == Inspected(0, (b"\0",), (("evicted", 2 * size),), nothing)
    assert inspect(serving) == Inspected(0, (b"",), ())
