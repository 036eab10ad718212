"""Requests of several lengths in one run: padded where a mask was seen to switch padding off, else apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from torch import Tensor, nn

from deployer.bundle import read_bundle
from deployer.checkpoint import load_checkpoint
from deployer.checkpoint.eager import run_eager
from deployer.errors import SpecError
from deployer.export import export
from deployer.formats import Target
from deployer.padding import cut_outputs, pad_inputs
from deployer.predictor import Predictor, Request
from deployer.protocol import JSON, decode_answer, encode_inputs
from deployer.spec import Array, Dim, ModelSpec, TensorSpec
from deployer.validate.padding import measure_padding

SPEC = ModelSpec(
    "pooled",
    (TensorSpec("x", "float32", ("batch", "length")), TensorSpec("mask", "int64", ("batch", "length"), low=0, high=1)),
    (TensorSpec("mean", "float32", ("batch",)), TensorSpec("each", "float32", ("batch", "length"))),
    {"batch": Dim(1, 4, 8), "length": Dim(1, 5, 9)},
    "batch",
    masks={"length": "mask"},
)


class MaskedMean(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
        kept = x * mask
        return {"mean": kept.sum(1) / mask.sum(1).clamp(min=1), "each": kept * 2}


class PlainMean(nn.Module):
    """Takes a mask and does not heed it in the mean."""

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
        return {"mean": x.mean(1), "each": x * mask * 2}


def samples() -> dict[str, Array]:
    x = np.random.default_rng(3).normal(size=(4, 5)).astype(np.float32)
    return {"x": x, "mask": np.ones((4, 5), np.int64)}


def test_inputs_are_lengthened_by_zeros_or_what_the_spec_allows() -> None:
    ids = TensorSpec("ids", "int64", ("batch", "length"), low=1, high=9)
    spec = ModelSpec("m", (ids, SPEC.input("mask")), SPEC.outputs, SPEC.dims, "batch")
    arrays = {"ids": np.array([[5, 6]]), "mask": np.array([[1, 1]])}
    padded = pad_inputs(spec, arrays, {"length": 4})
    assert {name: array.tolist() for name, array in padded.items()} == {"ids": [[5, 6, 1, 1]], "mask": [[1, 1, 0, 0]]}
    assert pad_inputs(spec, arrays, {"length": 2})["ids"] is arrays["ids"]


def test_outputs_are_cut_back_along_padded_axes_alone() -> None:
    arrays = {"mean": np.zeros(3), "each": np.zeros((3, 9))}
    cut = cut_outputs(SPEC, arrays, {"batch": 1, "length": 4}, ["length"])
    assert (cut["mean"].shape, cut["each"].shape) == ((3,), (3, 4))


@pytest.mark.parametrize(("model", "padded"), [(MaskedMean(), True), (PlainMean(), False)])
def test_what_padding_does_is_measured(model: nn.Module, padded: bool) -> None:
    found = measure_padding(lambda arrays: run_eager(model, SPEC, arrays), SPEC, samples(), {})
    assert (found == {"length": ""}) == padded
    if not padded:
        assert "output 'mean' at length=" in found["length"]
        assert "when padded to" in found["length"]


@pytest.mark.parametrize(("model", "shared"), [(MaskedMean, True), (PlainMean, False)])
def test_requests_of_several_lengths_get_the_answers_that_they_get_alone(
    model: type[nn.Module], shared: bool, tmp_path: Path
) -> None:
    """Through a real bundle: five lengths at once, one run where padding is harmless; answers in closed form."""
    checkpoint = load_checkpoint(model=f"{__file__}:{model.__name__}", spec=SPEC, samples=samples())
    bundle, _ = export(checkpoint, Target("torchscript"), tmp_path)
    assert (read_bundle(bundle.path).manifest.padding == {"length": ""}) == shared
    rng = np.random.default_rng(5)
    rows = [rng.normal(size=length).astype(np.float32) for length in (1, 3, 5, 9, 2)]
    requests = [Request(encode_inputs({"x": row, "mask": np.ones(len(row), np.int64)}), JSON) for row in rows]
    with Predictor.open(bundle.path) as predictor:
        answers = predictor.answer(requests)
    for row, answer in zip(rows, answers, strict=True):
        assert answer.status == 200, answer.body
        assert answer.run_requests == (5 if shared else 1)
        outputs = decode_answer(answer.body, JSON)["outputs"]
        np.testing.assert_allclose(outputs["mean"], row.mean(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(outputs["each"], row * 2, rtol=1e-6)


@pytest.mark.parametrize(
    ("masks", "said"),
    [({"size": "mask"}, "'size'"), ({"batch": "mask"}, "'batch'"), ({"length": "musk"}, "did you mean")],
)
def test_masks_that_mask_nothing_are_refused(masks: dict[str, str], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        ModelSpec("m", SPEC.inputs, SPEC.outputs, SPEC.dims, "batch", masks=masks)
