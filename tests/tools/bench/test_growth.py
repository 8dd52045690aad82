"""Fitted exponents, and which rows they are fitted to.

Run: pytest tests/tools/bench/test_growth.py
"""

import pytest
from tools.bench import growth, objective, sizes, traffic
from tools.bench.results import Row


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
def test_the_exponent_of_a_power_is_found(power):
    x = [1.0, 4.0, 16.0]
    assert growth.exponent(x, [3 * value**power for value in x]) == pytest.approx(power)


def test_a_cost_that_is_always_zero_does_not_grow():
    assert growth.exponent([1.0, 8.0], [0, 0]) == 0.0


@pytest.mark.parametrize("x, cost", [([4.0], [1.0]), ([4.0, 4.0], [1.0, 2.0]), ([1.0, 2.0], [0, 1])])
def test_what_no_exponent_fits_is_refused(x, cost):
    with pytest.raises(ValueError, match="exponent needs"):
        growth.exponent(x, cost)


def _memory(s, V, D, share, ours, isolated=False):
    key = dict(s=s, V=V, D=D, share=share, isolated=isolated)
    return Row(objective.EXTRA, "", "MB", 10 * s, ours, key=key)


def test_rows_are_compared_along_one_size_with_the_others_fixed():
    s, V = sizes.CPU.at
    rows = [
        _memory(s // 4, V, 1, 1.0, 5.0),
        _memory(s, V, 1, 1.0, 5.0),
        _memory(s, V // 4, 1, 1.0, 2.5),
        _memory(s, V, 2, 1.0, 5.0),
        _memory(s, V, 1, 1.0, 99.0, isolated=True),
    ]
    found = {row.key["axis"]: row for row in growth.measure(rows, sizes.CPU)}
    exponents = {axis: (row.upstream, row.ours) for axis, row in found.items()}
    assert exponents["s"] == pytest.approx((1.0, 0.0))
    assert exponents["V"] == pytest.approx((0.0, 0.5))
    assert exponents["D"] == pytest.approx((0.0, 0.0))
    assert found["s"].met is True


def test_memory_that_grows_with_the_sequence_misses_the_goal():
    V = sizes.CPU.at[1]
    rows = [_memory(s, V, 1, 1.0, float(s)) for s in sizes.CPU.lengths]
    (row,) = growth.measure(rows, sizes.CPU)
    assert row.ours == pytest.approx(1.0) and row.met is False


def test_lengths_without_a_whole_chunk_say_nothing_about_what_a_chunk_bounds():
    V, chunk = sizes.CPU.at[1], sizes.CPU.chunk
    rows = [_memory(s, V, 1, 0.5, min(0.5 * s, chunk)) for s in (chunk, 2 * chunk, 8 * chunk)]
    (row,) = growth.measure(rows, sizes.CPU)
    assert row.ours == pytest.approx(0.0)


def test_a_length_that_upstream_has_no_memory_for_is_left_out_of_its_fit():
    key = dict(V=sizes.CPU.at[1], D=1, share=1.0, isolated=False)
    costs = ((1, 2.0, 2.0), (4, 8.0, 2.0), (16, None, 2.0))
    rows = [Row(objective.TIME, "", "ms", a, b, key=key | dict(s=s)) for s, a, b in costs]
    (row,) = growth.measure(rows, sizes.CPU)
    assert (row.upstream, row.ours) == pytest.approx((1.0, 0.0))


def test_messages_are_fitted_at_two_ranks_and_by_what_is_counted():
    rows = [
        Row(traffic.CALLS, "", "", 8 * n, 2, key=dict(sequences=n, D=1, CP=2, what="calls"))
        for n in sizes.CPU.sequences
    ]
    (row,) = growth.measure(rows, sizes.CPU)
    assert (row.upstream, row.ours) == pytest.approx((1.0, 0.0))
    assert row.name.endswith("over sequences, calls")
