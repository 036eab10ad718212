"""Percentiles, rates and steadiness: closed forms, and numpy's linear percentile as the oracle."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployer.bench.statistics import is_steady, per_second, percentile, samples_needed, summarize

LATENCIES_MS = st.lists(st.floats(0, 1e6, allow_nan=False), min_size=1, max_size=300)


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([30.0, 10.0, 20.0], 50, 20.0),
        ([30.0, 10.0, 20.0], 99, 29.8),
        ([float(i) for i in range(20)], 95, 18.05),
        ([float(i) for i in range(20)], 99, 18.81),
        ([float(i) for i in range(100, 0, -1)], 50, 50.5),
        ([float(i) for i in range(100, 0, -1)], 90, 90.1),
        ([float(i) for i in range(100, 0, -1)], 99, 99.01),
        ([5.0], 50, 5.0),
        ([5.0], 99, 5.0),
        ([1.0, 2.0], 0, 1.0),
        ([1.0, 2.0], 100, 2.0),
    ],
)
def test_percentile_in_closed_form(values: list[float], percent: float, expected: float) -> None:
    assert percentile(values, percent) == pytest.approx(expected, rel=1e-12)


@given(LATENCIES_MS, st.floats(0, 100))
def test_percentile_is_numpys_linear(values: list[float], percent: float) -> None:
    oracle = float(np.percentile(values, percent, method="linear"))
    assert percentile(values, percent) == pytest.approx(oracle, rel=1e-9, abs=1e-9)


@given(LATENCIES_MS, st.randoms(use_true_random=False))
def test_summary_does_not_depend_on_the_order(values: list[float], shuffler: random.Random) -> None:
    other = list(values)
    shuffler.shuffle(other)
    assert summarize(other) == summarize(values)


@given(LATENCIES_MS)
def test_summary_is_ordered_and_bounded(values: list[float]) -> None:
    summary = summarize(values)
    figures = [summary.p50_ms, summary.p90_ms, summary.p95_ms, summary.p99_ms, summary.max_ms]
    assert None not in figures
    assert figures == sorted(figures)
    assert summary.max_ms == max(values)
    assert summary.mean_ms == pytest.approx(float(np.mean(values)), rel=1e-9, abs=1e-9)


def test_no_samples_is_no_data() -> None:
    summary = summarize([])
    figures = (summary.mean_ms, summary.p50_ms, summary.p90_ms, summary.p95_ms, summary.p99_ms, summary.max_ms)
    assert summary.samples == 0
    assert set(figures) == {None}
    assert "no data" in summary.notes[0]
    assert percentile([], 50) is None


@pytest.mark.parametrize(
    ("count", "weak"),
    [(1, {50, 90, 95, 99}), (9, {90, 95, 99}), (19, {95, 99}), (20, {99}), (99, {99}), (100, set()), (1000, set())],
)
def test_few_samples_carry_a_note(count: int, weak: set[int]) -> None:
    notes = summarize([1.0] * count).notes
    named = {percent for percent in (50, 90, 95, 99) if any(f"p{percent} " in note for note in notes)}
    assert named == weak


def test_samples_needed() -> None:
    assert [samples_needed(percent) for percent in (50, 90, 95, 99)] == [2, 10, 20, 100]


@pytest.mark.parametrize("percent", [-1, 100.5])
def test_percent_outside_0_to_100_is_refused(percent: float) -> None:
    with pytest.raises(ValueError, match="0 to 100"):
        percentile([1.0], percent)


def test_rate_is_count_over_wall_clock() -> None:
    # 4 clients, 100 requests of 50 ms: 25 rounds of 50 ms. 1/latency would say 20, 4 × count/latency 320.
    assert per_second(100, 25 * 0.05) == pytest.approx(80.0)
    assert per_second(0, 1.0) == 0.0
    assert per_second(1, 0.0) is None


def test_steady_is_two_equal_windows() -> None:
    assert not is_steady([1.0] * 9, window=5)
    assert is_steady([1.0] * 10, window=5)
    assert not is_steady([2.0] * 5 + [1.0] * 5, window=5)
    assert is_steady([100.0] * 5 + [1.0] * 5 + [1.05] * 5, window=5)
