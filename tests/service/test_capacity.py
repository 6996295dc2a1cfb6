"""How many tokens the server says that its memory holds."""

from lmcache_client.contract.geometry import FULL, RECURRENT, SLIDING_WINDOW, Geometry, GroupSpec, Region
from lmcache_client.contract.keys import ModelTag
from lmcache_client.contract.messages import Memory
from lmcache_server.service.sessions import Engine, Shard

FRAME_BYTES = 64 << 10
PAGE_BYTES = 64 << 10


def group(kind: str, window: int = 0, replicated: bool = False) -> GroupSpec:
    regions = (Region(0, 0, PAGE_BYTES, PAGE_BYTES), Region(0, PAGE_BYTES * 64, PAGE_BYTES, PAGE_BYTES))
    return GroupSpec(kind, 16, window, "", regions, replicated)


def engine(groups: tuple[GroupSpec, ...], ranks: int = 1) -> Engine:
    model = ModelTag("model", (), ranks, 1)
    made = Engine("engine", model, False)
    for rank in range(ranks):
        memory = Memory(1, ((0, 2 * PAGE_BYTES * 64),), 0)
        made.shards[rank] = Shard("engine", rank, model, Geometry(groups, 64), memory, 256, b"", False)
    made.complete()
    return made


def capacity(*groups: GroupSpec, ranks: int = 1, frames: int = 3200) -> int:
    return engine(groups, ranks).capacity_tokens(frames * FRAME_BYTES, FRAME_BYTES)


def test_a_chunk_takes_its_pages_of_all_layers_on_all_ranks() -> None:
    # 16 blocks of two layers, a frame each.
    assert capacity(group(FULL)) == 100 * 256
    assert capacity(group(FULL), ranks=2) == 50 * 256
    assert capacity(group(FULL, replicated=True), ranks=2) == 100 * 256, "one of them stores for both"
    assert capacity(group(FULL), frames=31) == 0


def test_windows_and_states_count_only_where_there_is_nothing_else() -> None:
    window, state = group(SLIDING_WINDOW, 64), group(RECURRENT)
    assert capacity(group(FULL), window, state) == 100 * 256
    assert capacity(window, state) == 50 * 256
