"""The resume point agrees with its definition, tried out resume point by resume point."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_client.contract.geometry import CHUNKED_LOCAL, FULL, KINDS, RECURRENT, SLIDING_WINDOW, GroupSpec
from lmcache_client.contract.hits import resume_point


def group(kind, block_size, window=0):
    return GroupSpec(kind, block_size, window, "", ())


def first_needed_token(spec, resume_tokens):
    """Section "what a group needs", written down a second time."""
    if spec.kind == FULL:
        return 0
    if spec.kind == SLIDING_WINDOW:
        return resume_tokens - spec.window + 1
    if spec.kind == CHUNKED_LOCAL:
        return resume_tokens - resume_tokens % spec.window
    return resume_tokens - 1


def can_resume(specs, chunk_size, present, computed_tokens, resume_tokens):
    """Token by token: whoever needs a token needs the whole block, and so the object it is in."""
    for spec, flags in zip(specs, present, strict=True):
        for token in range(resume_tokens):
            block = token // spec.block_size
            touched = any(
                max(first_needed_token(spec, resume_tokens), computed_tokens) <= each < resume_tokens
                for each in range(block * spec.block_size, (block + 1) * spec.block_size)
            )
            if touched and not flags[token // chunk_size]:
                return False
    return True


def naive_resume_point(specs, chunk_size, present, computed_tokens, limit_tokens):
    chunks = len(present[0])
    points = [
        point
        for point in range(chunk_size, chunks * chunk_size + 1, chunk_size)
        if computed_tokens < point <= limit_tokens
        and can_resume(specs, chunk_size, present, computed_tokens, point)
    ]
    return max(points, default=0)


@st.composite
def chains(draw):
    """(groups, chunk size, presence, computed tokens, limit tokens)"""
    unified = 8
    specs = []
    for kind in draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4)):
        block_size = draw(st.sampled_from((2, 4, 8)))
        window = draw(st.integers(1, 40)) if kind in (SLIDING_WINDOW, CHUNKED_LOCAL) else 0
        specs.append(group(kind, block_size, window))
    chunk_size = unified * draw(st.integers(1, 3))
    chunks = draw(st.integers(0, 6))
    flags = st.lists(st.sampled_from((True, True, True, False)), min_size=chunks, max_size=chunks)
    present = [draw(flags) for _ in specs]
    computed_tokens = unified * draw(st.integers(0, 10))
    limit_tokens = draw(st.integers(0, 7 * chunk_size))
    return specs, chunk_size, present, computed_tokens, limit_tokens


@settings(deadline=None)
@given(chains())
def test_the_resume_point_is_the_largest_that_works(chain):
    assert resume_point(*chain) == naive_resume_point(*chain)


@pytest.mark.parametrize(
    ("specs", "present", "computed", "limit", "expected"),
    [
        ([group(FULL, 16)], ["1101"], 0, 64, 32),
        ([group(FULL, 16)], ["0011"], 32, 64, 64),
        ([group(FULL, 16)], ["1111"], 0, 63, 48),
        ([group(FULL, 16)], ["1111"], 64, 64, 0),
        ([group(FULL, 16)], [""], 0, 64, 0),
        ([group(SLIDING_WINDOW, 16, 17)], ["0001"], 0, 64, 64),
        ([group(SLIDING_WINDOW, 16, 18)], ["1101"], 0, 64, 32),
        ([group(SLIDING_WINDOW, 16, 1)], ["0000"], 0, 64, 64),
        ([group(CHUNKED_LOCAL, 16, 32)], ["0000"], 0, 64, 64),
        ([group(CHUNKED_LOCAL, 16, 32)], ["0010"], 0, 48, 48),
        ([group(CHUNKED_LOCAL, 16, 48)], ["1100"], 0, 47, 32),
        ([group(RECURRENT, 16)], ["0100"], 0, 64, 32),
        ([group(FULL, 16), group(RECURRENT, 16)], ["1110", "1001"], 0, 64, 16),
        # A later resume point may work where an earlier one does not.
        *(([group(FULL, 16), group(RECURRENT, 16)], ["1111", "0001"], 0, at, 0) for at in (16, 32, 48)),
        ([group(FULL, 16), group(RECURRENT, 16)], ["1111", "0001"], 0, 64, 64),
        ([group(FULL, 16), group(SLIDING_WINDOW, 16, 30)], ["1111", "0011"], 0, 64, 64),
    ],
)
def test_known_cases(specs, present, computed, limit, expected):
    flags = [[flag == "1" for flag in text] for text in present]
    assert resume_point(specs, 16, flags, computed, limit) == expected


def test_a_chain_of_many_misses_is_searched_quickly():
    specs = [group(FULL, 16), group(SLIDING_WINDOW, 16, 512), group(RECURRENT, 16)]
    chunks = 1 << 16
    alternating = bytes([1, 0] * (chunks // 2))
    present = [bytes([1]) * chunks, alternating, alternating]
    assert resume_point(specs, 16, present, 0, 16 * chunks) == 16
