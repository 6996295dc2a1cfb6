"""When a chunk that only some shards have stored is worth a warning."""

import logging

import pytest

from lmcache_client.contract.geometry import FULL, RECURRENT, GroupSpec
from lmcache_server.core.layout import Layout
from lmcache_server.telemetry import partial
from lmcache_server.telemetry.partial import PATIENCE_S, PartialChunks


def test_only_what_is_seen_again_later_counts_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    chunks = PartialChunks()
    with caplog.at_level(logging.WARNING):
        assert not chunks.seen(b"n", b"a", 0.0)
        assert not chunks.seen(b"n", b"a", PATIENCE_S - 0.1)
        assert not chunks.seen(b"n", b"b", PATIENCE_S), "another chunk"
        assert not chunks.seen(b"m", b"a", PATIENCE_S), "another namespace"
        assert not caplog.records
        assert chunks.seen(b"n", b"a", PATIENCE_S)
        assert not chunks.seen(b"n", b"a", PATIENCE_S + 0.1), "the time starts anew"
        assert chunks.seen(b"n", b"a", 2 * PATIENCE_S + 0.2)
        assert chunks.seen(b"n", b"b", 2 * PATIENCE_S)
        assert len(caplog.records) == 1
        assert chunks.seen(b"m", b"a", 2 * PATIENCE_S)
        assert len(caplog.records) == 2
    assert "look for dropped or failed stores" in caplog.text


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial, "MAX_SUSPECTS", 2)
    chunks = PartialChunks()
    for key in (b"a", b"b", b"c"):
        assert not chunks.seen(b"n", key, 0.0)
    assert not chunks.seen(b"n", b"a", 100.0), "forgotten"
    assert chunks.seen(b"n", b"c", 100.0)


def test_a_chunk_is_partial_where_the_holders_of_one_group_disagree() -> None:
    full, state = (GroupSpec(kind, 16, 0, "", ()) for kind in (FULL, RECURRENT))
    layout = Layout(b"n", 16, (full, state), ((0, 1), (0, 1)))
    bits = {(of, rank): 1 << layout.bit(of, rank) for of in (0, 1) for rank in (0, 1)}
    both, one = bits[0, 0] | bits[0, 1], bits[0, 0]
    assert not layout.is_partial(0, 0)
    assert not layout.is_partial(both, 0), "a chunk without a state is no disagreement"
    assert not layout.is_partial(both | bits[1, 0] | bits[1, 1], 0)
    assert layout.is_partial(one, 0)
    assert layout.is_partial(both | bits[1, 1], 0)
    assert not layout.is_partial(one, bits[0, 1]), "it is being written"
    assert layout.is_partial(one, bits[1, 1])


def test_ranks_share_a_replicated_group_with_the_first_rank_of_their_stage_that_is_here() -> None:
    full, shared = (GroupSpec(FULL, 16, 0, "", (), replicated) for replicated in (False, True))
    # Ranks 2 to 5 of two stages with four tensor-parallel ranks each.
    layout = Layout(b"n", 16, (full, shared), ((2, 3, 4, 5), (2, 4)), tensor_parallel_size=4, first_rank=2)
    assert [layout.holder(0, rank) for rank in range(2, 6)] == [2, 3, 4, 5]
    assert [layout.holder(1, rank) for rank in range(2, 6)] == [2, 2, 4, 4]
    assert layout.masks == (0b1010101, 0b100010)
