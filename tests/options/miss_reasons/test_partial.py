"""Chunks that only some shards have stored, as lookups meet them."""

import logging

from lmcache_server.options.miss_reasons import partial
from lmcache_server.options.miss_reasons.partial import PATIENCE_S, PartialChunks


def test_only_what_is_seen_again_later_counts_and_is_logged_once(caplog):
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


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(partial, "MAX_SUSPECTS", 2)
    chunks = PartialChunks()
    for key in (b"a", b"b", b"c"):
        assert not chunks.seen(b"n", key, 0.0)
    assert not chunks.seen(b"n", b"a", 100.0), "forgotten"
    assert chunks.seen(b"n", b"c", 100.0)
