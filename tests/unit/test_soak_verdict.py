"""The verdict of the soak: what it must object to, and what not."""

import dataclasses
from pathlib import Path

import pytest
from soak.samples import MAX_GROWTH_BYTES, MAX_PEAK_BYTES, Sample, faults, read, write

MIB = 1 << 20
REST = Sample(0.0, True, 300 * MIB, 24, 4, 0, 0, 0, 500, 10, 100, 0, 900, 1000)


def run(**last: int) -> list[Sample]:
    """A run of twenty rests; the last one differs in this."""
    samples = [dataclasses.replace(REST, at_s=10.0 * number) for number in range(20)]
    samples[-1] = dataclasses.replace(samples[-1], **last)
    return samples


@pytest.mark.parametrize("name", ["descriptors", "threads", "sessions", "leases", "readers"])
def test_what_is_there_at_rest_and_was_not_at_the_start_is_a_fault(name: str) -> None:
    (fault,) = faults(run(**{name: getattr(REST, name) + 1}))
    assert name in fault
    assert "10 bytes of L1" in faults(run(free_bytes=90))[0], "a frame that is nowhere"
    assert "too short" in faults(run()[:5])[0]


def test_memory_that_grows_is_a_fault_and_one_noisy_rest_is_none() -> None:
    assert faults(run(rss_bytes=REST.rss_bytes + 2 * MAX_GROWTH_BYTES)) == []
    samples = [
        dataclasses.replace(each, rss_bytes=each.rss_bytes + number * MAX_GROWTH_BYTES // 10)
        for number, each in enumerate(run())
    ]
    assert "memory at rest grew by 2" in faults(samples)[0]
    assert "under load" in faults(run(rss_bytes=REST.rss_bytes + MAX_PEAK_BYTES + 1))[0]


def test_a_run_in_which_nothing_stays_is_good_and_is_read_as_it_was_written(tmp_path: Path) -> None:
    samples = run()
    samples.insert(10, dataclasses.replace(REST, at_s=95.0, at_rest=False, threads=40, sessions=9, leases=5))
    assert faults(samples) == []
    write(tmp_path / "samples.csv", run())
    assert read(tmp_path / "samples.csv") == run()
