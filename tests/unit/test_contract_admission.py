"""Which windows and states of a prompt are stored."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_client.contract import admission
from lmcache_client.contract.admission import Admission, Prompt, checkpoint_interval
from lmcache_client.contract.geometry import CHUNKED_LOCAL, FULL, RECURRENT, SLIDING_WINDOW, GroupSpec

CHUNK = 512
ATTENTION = GroupSpec(FULL, 16, 0, "", ())
WINDOW = GroupSpec(SLIDING_WINDOW, 16, 1024, "", ())
STATE = GroupSpec(RECURRENT, CHUNK, 0, "", ())
LOCAL = GroupSpec(CHUNKED_LOCAL, 16, 2048, "", ())


def admitted(group: GroupSpec, prompt: Prompt, chunks: int, interval: int = 200) -> list[int]:
    rule = Admission((ATTENTION, group), CHUNK, interval)
    return [chunk for chunk in range(chunks) if rule.admits(1, chunk, prompt)]


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        (ATTENTION, list(range(32))),
        # The last 1,023 tokens before the end at 30 chunks and the fork at 10; all that decoding completes.
        (WINDOW, [8, 9, 28, 29, 30, 31]),
        (STATE, [9, 29, 30, 31]),
        # Attention chunks of 2,048 tokens begin at chunks 8 and 28.
        (LOCAL, [8, 9, 28, 29, 30, 31]),
    ],
)
def test_the_end_the_fork_and_what_decoding_adds_are_stored(group: GroupSpec, expected: list[int]) -> None:
    assert admitted(group, Prompt(end=30, fork=10), 32) == expected


def test_checkpoints_come_at_the_same_places_for_all_groups() -> None:
    prompt = Prompt(end=1000, fork=0)
    assert admitted(WINDOW, prompt, 500) == [198, 199, 398, 399]
    assert admitted(STATE, prompt, 500) == [199, 399]
    # A prompt shorter than a chunk stores what decoding completes.
    assert admitted(WINDOW, Prompt(end=0, fork=0), 3) == [0, 1, 2]


def test_where_states_are_rare_the_last_before_a_fork_is_stored() -> None:
    rule = Admission((ATTENTION, STATE), CHUNK, 200)
    # A step of eight chunks: states at 8, 16, 24, … chunks; the prompt leaves what is known at 21.
    offered = [chunk - 1 for chunk in range(8, 400, 8)]
    prompt = Prompt(end=1000, fork=21, spacing=8)
    assert [chunk for chunk in offered if rule.admits(1, chunk, prompt)] == [15, 199]


def test_nothing_is_left_out_without_full_attention_or_windows() -> None:
    assert checkpoint_interval((STATE,), (1000,), CHUNK) == 0
    assert checkpoint_interval((ATTENTION,), (1000,), CHUNK) == 0
    rule = Admission((STATE,), CHUNK, 0)
    assert all(rule.admits(0, chunk, Prompt(end=100, fork=0)) for chunk in range(100))


def test_states_that_are_offered_only_where_they_help_are_all_stored() -> None:
    rule = Admission((ATTENTION, STATE, WINDOW), CHUNK, 200, all_states=True)
    assert rule.admits(1, 50, Prompt(end=100, fork=0))
    assert not rule.admits(2, 50, Prompt(end=100, fork=0))


def test_checkpoints_take_a_twentieth_of_the_bytes_of_full_attention() -> None:
    # A block of 16 tokens: 1 byte of attention, 5 of windows; a state of 96 bytes.
    state_bytes = 3 * 32
    assert checkpoint_interval((ATTENTION, WINDOW), (1, 5), CHUNK) == 200
    assert checkpoint_interval((ATTENTION, STATE), (1, state_bytes), CHUNK) == 60
    # A checkpoint has the objects of all groups.
    assert checkpoint_interval((ATTENTION, WINDOW, STATE), (1, 5, state_bytes), CHUNK) == 260
    assert checkpoint_interval((ATTENTION, STATE), (1, 1), CHUNK) == 2
    # The price of storing everything.
    assert admission.stored_factor((ATTENTION, STATE), (1, state_bytes), CHUNK) == 4.0
    assert admission.stored_factor((ATTENTION, WINDOW), (1, 5), CHUNK) == 6.0
    assert admission.stored_factor((STATE,), (1,), CHUNK) == 0.0


@given(st.lists(st.binary(max_size=4), min_size=2, max_size=2))
def test_a_chunk_is_known_if_all_of_full_attention_has_it(bitmaps: list[bytes]) -> None:
    groups = (ATTENTION, WINDOW, ATTENTION)
    held = (bitmaps[0], b"", bitmaps[1])
    expected = 0
    while all(expected // 8 < len(bits) and bits[expected // 8] >> expected % 8 & 1 for bits in bitmaps):
        expected += 1
    assert admission.known_chunks(groups, held) == expected
    assert admission.known_chunks((WINDOW,), (b"\xff",)) == 0


@given(
    group=st.sampled_from((WINDOW, STATE, LOCAL, GroupSpec(SLIDING_WINDOW, 16, 100, "", ()))),
    end=st.integers(0, 60),
    fork=st.integers(0, 60),
    interval=st.integers(2, 40),
)
def test_every_place_where_requests_resume_has_all_its_objects(group, end, fork, interval):
    chunks = 64
    stored = admitted(group, Prompt(end, fork), chunks, interval)
    for resume in {end, fork, *range(interval, chunks, interval), *range(end, chunks)}:
        needed = group.needed_blocks(resume * CHUNK)
        assert {block * group.block_size // CHUNK for block in needed} <= set(stored)
