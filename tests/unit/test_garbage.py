"""What the server's collector finds, although it freezes objects."""

import gc
import weakref

from lmcache_server import app


class Node:
    def __init__(self) -> None:
        self.self = self


def test_a_cycle_that_was_frozen_is_found_unless_the_index_is_large() -> None:
    node = Node()
    alive = weakref.ref(node)
    try:
        app.collect_garbage(0, 0)
        del node
        app.collect_garbage(1, 0)
        assert alive() is not None, "it was frozen while it was in use"
        app.collect_garbage(app.THAW_TICKS - 1, app.THAW_CHUNKS + 1)
        assert alive() is not None
        app.collect_garbage(app.THAW_TICKS - 1, app.THAW_CHUNKS)
        assert alive() is None
    finally:
        gc.unfreeze()
