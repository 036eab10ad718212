"""What answers are held to beside the gate: ties in benchmarks and packages, and what half precision does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from deployer.bench.payloads import make_traffic
from deployer.bundle import Bundle
from deployer.checkpoint import Checkpoint, load_checkpoint
from deployer.export import export
from deployer.formats import Target
from deployer.package.probe import judge, make_probes
from deployer.protocol import JSON, encode_answer
from deployer.spec import Array, Dim, ModelSpec, TensorSpec
from deployer.validate import Reference, make_reference, measure_of, measure_rounding

X = TensorSpec("x", "float32", ("batch", 4))
FLAT = ModelSpec("flat", (X,), dims={"batch": Dim(1, 3, 8)}, batch="batch")


class Best(nn.Module):
    """The best of four scores, which the second row has twice, and the score."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        scores = 2 * x
        return {"best": scores.argmax(1), "scores": scores}


class Large(nn.Module):
    """1000·x in between and x again: beyond half precision where x is large."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 1000) / 1000


class ThirdOfAll(nn.Module):
    """x/3 on the way to x: half precision has no third."""

    def forward(self, x: Tensor) -> Tensor:
        y = x / 3
        y += x  # written in place, and rounded all the same
        return y * 0.7


def checkpoint_of(kind: type[nn.Module], samples: Array) -> Checkpoint:
    return load_checkpoint(model=f"{__file__}:{kind.__name__}", spec=FLAT, samples={"x": samples})


@pytest.fixture(scope="module")
def best(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    rows = np.array([[0, 1, 2, 3], [5, 1, 5, 0], [4, 3, 2, 1]], np.float32)
    return export(checkpoint_of(Best, rows), Target("exported"), tmp_path_factory.mktemp("best"))[0]


@pytest.mark.parametrize(("index", "right"), [(0, True), (2, True), (1, False)])
def test_a_tie_is_no_error_for_a_package_or_a_benchmark(best: Bundle, index: int, right: bool) -> None:
    scores = np.array([10, 2, 10, 0], np.float32)
    body = encode_answer({"best": np.array(index), "scores": scores}, best.spec, JSON)
    assert (judge(make_probes(best)[1], best, 200, body, JSON) == "") is right
    traffic = make_traffic(bundle=best.path, input_path=None, body="json")
    assert traffic.checker is not None
    assert traffic.checker.is_right(1, body) is right


def test_a_tie_is_counted_in_rows_and_in_batches(best: Bundle) -> None:
    inputs, outputs = best.samples()
    got = outputs | {"best": np.array([3, 2, 0])}
    checks = {check.output: check for check in measure_of(best).check("samples", inputs, got, outputs)}
    assert (checks["best"].passed, checks["best"].ties) == (True, 1)
    one = {name: array[1] for name, array in got.items()}
    row = measure_of(best).check(
        "a row", {"x": inputs["x"][1]}, one, {name: array[1] for name, array in outputs.items()}
    )
    assert [(check.passed, check.ties) for check in row] == [(True, 1), (True, 0)]


def test_what_half_precision_does_is_measured_on_the_eager_model() -> None:
    rows = np.array([[1, 2, 3, 4]] * 3, np.float32)
    checkpoint = checkpoint_of(ThirdOfAll, rows)
    reference = make_reference(checkpoint)
    assert measure_rounding(checkpoint, reference, "fp32") is reference
    half = np.float16
    third = (rows / np.float32(3)).astype(half).astype(np.float32)
    summed = (third + rows).astype(half).astype(np.float32)
    expected = np.abs((summed * np.float32(0.7)).astype(half) - reference.outputs["samples"]["output"]).max()
    measured = measure_rounding(checkpoint, reference, "fp16").rounding["samples"]["output"]
    assert measured == pytest.approx(float(expected), rel=1e-6)
    assert measured > 0
    assert measure_rounding(checkpoint, reference, "bf16").rounding["samples"]["output"] > measured
    assert torch.backends.mha.get_fastpath_enabled()


def test_inputs_beyond_half_precision_prove_nothing_and_samples_are_never_skipped() -> None:
    reference = measure_rounding(*_made(np.full((3, 4), 2, np.float32)), "fp16")
    assert "fp16 ends at 65504" in reference.skipped["floats ×1000"]
    assert "floats ×1000" not in reference.outputs
    assert "floats sign flipped" in reference.outputs
    beyond = measure_rounding(*_made(np.full((3, 4), 100, np.float32)), "fp16")
    assert beyond.rounding["samples"] == {"output": 0.0}  # infinities allow nothing
    assert "samples" in beyond.outputs


def _made(samples: Array) -> tuple[Checkpoint, Reference]:
    checkpoint = checkpoint_of(Large, samples)
    return checkpoint, make_reference(checkpoint)
