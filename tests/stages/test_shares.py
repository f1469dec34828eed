"""Processes that round rows of matrices end at about the same time."""

import pytest

from optkit.stages.quantizing.shares import ROWS, divided, factoring, rounding

LLAMA_8B = [rounding(1, 6144, 4096), rounding(1, 4096, 4096), rounding(1, 28672, 4096), rounding(1, 4096, 14336)]
EXPERTS = [rounding(20, 1536, 2048), rounding(20, 1536, 2048), rounding(1, 2048, 4096)]
TINY = [rounding(1, 7, 32), rounding(1, 100, 64)]


@pytest.mark.parametrize("works", [LLAMA_8B, EXPERTS, TINY])
@pytest.mark.parametrize("processes", [1, 2, 3, 4, 8])
def test_all_rows_are_taken_and_none_waits_long(works, processes):
    shares = divided(works, processes)
    times = [0.0] * processes
    for work, rows in zip(works, shares, strict=True):
        assert len(rows) == processes
        assert sum(rows) == work.rows
        for process, taken in enumerate(rows):
            assert taken % work.step == 0 or sum(rows[process + 1 :]) == 0, "parts are whole but for the last"
            times[process] += work.once + taken / work.step * work.each if taken else 0
    part_of_all = sum(work.once + work.rows / processes / work.step * work.each for work in works)
    assert max(times) <= 1.001 * part_of_all or works is TINY, "to share each matrix takes longer"


def test_rows_come_in_lengths_that_products_are_fast_at():
    assert all(rows % ROWS == 0 for share in divided(LLAMA_8B, 3) for rows in share)


def test_a_process_that_factors_first_takes_fewer_rows():
    busy = factoring(14336)
    shares = divided(LLAMA_8B[:3], 3, busy)
    times = [0.0, 0.0, busy]
    for work, rows in zip(LLAMA_8B[:3], shares, strict=True):
        for process, taken in enumerate(rows):
            times[process] += work.once + taken / work.step * work.each if taken else 0
    assert sum(map(sum, shares)) == 6144 + 4096 + 28672
    assert max(times) < 1.1 * sum(times) / 3
