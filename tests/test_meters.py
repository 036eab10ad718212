"""What a worker counts, and how it tells the frontend: sums and bounds in closed form."""

from __future__ import annotations

import re

import pytest

from deployer.meters import REQUESTS, SECONDS, SERIES, STAGES, Histogram, Meters, growth
from deployer.predictor import Predictor, Request
from deployer.protocol import JSON
from handlers.deployer_handler import metric_lines
from tests.hostile import predictor_of


def test_a_histogram_counts_at_or_below_each_bound() -> None:
    histogram = Histogram((1, 2, 4))
    for value, times in ((0.5, 1), (1, 2), (3, 1), (9, 5)):
        histogram.observe(value, times)
    assert dict(histogram.read("h", ("s",))) == {
        ("h_bucket", ("s", "1")): 3, ("h_bucket", ("s", "2")): 3, ("h_bucket", ("s", "4")): 4,
        ("h_bucket", ("s", "+Inf")): 9, ("h_sum", ("s",)): 0.5 + 2 + 3 + 45, ("h_count", ("s",)): 9,
    }  # fmt: skip


def answered() -> Predictor:
    """After three right requests in one run, one refused and one that its type refuses; then one alone."""
    predictor = predictor_of("lookup")
    right = Request(b'{"ids": [1, 2, 3]}', JSON)
    predictor.answer([right, Request(b"{", JSON), right, Request(b"1 2 3", "text/csv"), right])
    predictor.answer([right])
    return predictor


def test_the_predictor_counts_requests_runs_and_refusals() -> None:
    meters = answered().meters
    found = meters.read()
    for stage in STAGES:  # one observation a right request
        assert found["deployer_stage_seconds_count", (stage,)] == 4
        assert found["deployer_stage_seconds_bucket", (stage, "+Inf")] == 4
        assert 0 < found["deployer_stage_seconds_sum", (stage,)] < 60
    assert [found["deployer_run_requests_bucket", (le,)] for le in ("1", "2", "4", "+Inf")] == [1, 1, 2, 2]
    assert found["deployer_run_requests_sum", ()] == 4
    assert meters.errors == {400: 1, 415: 1}
    assert {name for name, _ in found} == set(SERIES)


def test_seconds_and_requests_have_growing_bounds() -> None:
    assert list(SECONDS) == sorted(set(SECONDS))
    assert list(REQUESTS) == sorted(set(REQUESTS))


def test_only_what_grew_is_told_once() -> None:
    meters = Meters()
    first = meters.read()
    assert growth({}, first) == first  # zeros, so that every series exists
    assert growth(first, meters.read()) == {}
    meters.error(400)
    meters.runs.observe(3)
    grown = growth(first, meters.read())
    assert grown[("deployer_errors_total", ("400",))] == 1
    assert grown[("deployer_run_requests_sum", ())] == 3
    assert ("deployer_run_requests_bucket", ("2",)) not in grown


def test_lines_have_the_form_that_the_frontend_reads() -> None:
    predictor = answered()
    lines = [line.removesuffix("\n") for line in metric_lines(predictor, {}, predictor.meters.read())]
    assert len(lines) == len(predictor.meters.read())
    form = re.compile(r"\[METRICS]([\w\s]+)\.([\w\s]+):([0-9\-,.e]+)\|#([^|]*)\|#type:([^|]+)\|#hostname:([^,]+),(\d+)")
    for line in lines:
        found = form.fullmatch(line)
        assert found, line
        assert len(line) < 512  # of a pipe: what is written whole
        names = [pair.split(":")[0] for pair in found[4].split(",")]
        assert names == ["model_name", "model_version", *SERIES[found[1]][1]]
        assert found[5] == "COUNTER"
    assert any(
        "deployer_errors_total.count:1|#model_name:lookup,model_version:1.0,status:415|" in line for line in lines
    )
    assert metric_lines(predictor, predictor.meters.read(), predictor.meters.read()) == []


@pytest.mark.parametrize("value", [1e-07, 0.123456789, 123456789.0])
def test_sums_keep_their_digits(value: float) -> None:
    predictor = predictor_of("lookup")
    before = predictor.meters.read()
    predictor.meters.stages["infer"].observe(value)
    [line] = [line for line in metric_lines(predictor, before, predictor.meters.read()) if "_sum" in line]
    assert float(line.split(":")[1].split("|")[0]) == value
