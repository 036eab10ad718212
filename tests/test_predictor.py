"""Batches: every request gets its own right answer, a fault stays with its owner, and runs are really shared."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from deployer.checkpoint import load_checkpoint
from deployer.export import export
from deployer.formats import Loaded, Target
from deployer.predictor import Predictor, Request, Response
from deployer.protocol import JSON, NPY, encode_inputs, npy_bytes, parse_npy
from deployer.runtime import Runner
from deployer.spec import Array, Arrays, Dim, ModelSpec, TensorSpec
from tests.models import Detections, ManyOutputs, MixesRows, SequenceFirst, checkpoint_of

Call = Callable[[Arrays], dict[str, Array]]


class Spy:
    """A model that remembers the number of rows in each of its runs."""

    def __init__(self, call: Call, axis: int = 0) -> None:
        self.call = call
        self.axis = axis
        self.runs: list[int] = []

    def __call__(self, arrays: Arrays) -> dict[str, Array]:
        self.runs.append(next(iter(arrays.values())).shape[self.axis])
        return self.call(arrays)


def predictor_of(spec: ModelSpec, call: Call, *, batch_independent: bool = True) -> Predictor:
    return Predictor(Runner(spec, Loaded(call, "arithmetic")), batch_independent=batch_independent)


def ask(arrays: Arrays | bytes) -> Request:
    return Request(arrays if isinstance(arrays, bytes) else encode_inputs(arrays), JSON, JSON)


def outputs_of(response: Response) -> Any:
    assert response.status == 200, response.body
    return json.loads(response.body)["outputs"]


def error_of(response: Response) -> Any:
    assert response.status >= 400, response.body
    return json.loads(response.body)["error"]


LOOKUP = ModelSpec(
    "lookup", (TensorSpec("ids", "int64", ("batch", 3)),), (TensorSpec("values", "float32", ("batch", 3)),),
    {"batch": Dim(1, 4, 8)}, "batch",
)  # fmt: skip
TABLE = np.arange(10, dtype=np.float32)


def look_up(arrays: Arrays) -> dict[str, Array]:
    return {"values": TABLE[arrays["ids"]]}  # an id beyond the table raises, as an embedding does


def test_one_bad_request_in_a_batch_hurts_nobody_else() -> None:
    bodies = [b'{"ids": [0, 1, 2]}', b'{"ids": [0, 1', b'{"ids": [[1, 2], [3]]}', b'{"ids": [0, 1, 10]}',
              b'{"ids": [1.5, 2, 0]}', b'{"idz": [1, 2, 3]}', b'{"ids": [2, 3, 4]}']  # fmt: skip
    responses = predictor_of(LOOKUP, look_up).answer([ask(body) for body in bodies])
    assert [response.status for response in responses] == [200, 400, 400, 500, 400, 400, 200]
    assert outputs_of(responses[0]) == {"values": [0, 1, 2]}
    assert outputs_of(responses[6]) == {"values": [2, 3, 4]}
    assert [error_of(responses[index])["field"] for index in (1, 2, 4, 5)] == ["", "ids", "ids", "idz"]
    assert "IndexError" in error_of(responses[3])["message"]


@pytest.mark.parametrize("name", ["torchscript", "onnx"])
def test_ids_beyond_a_declared_range_are_each_refused_alone(name: str, tmp_path: Path) -> None:
    """ONNX Runtime answers id -1 with the last row and no error: the spec's range has to stop it."""
    bodies = [
        b'{"ids": [0, 1, 2]}', b'{"ids": [0, 1', b'{"ids": [[1, 2], [3]]}', b'{"ids": [0, 1, 10]}',
        b'{"ids": [0, -1, 2]}', b'{"ids": [1.5, 2, 0]}', b'{"idz": [1, 2, 3]}', b'{"ids": [2, 3, 4]}',
    ]  # fmt: skip
    spec = ModelSpec(
        "lookup", (TensorSpec("ids", "int64", ("batch", 3), low=0, high=9),), dims=LOOKUP.dims, batch="batch"
    )
    checkpoint = load_checkpoint(
        model=f"{__file__}:Lookup", spec=spec, samples={"ids": np.array([[0, 1, 2], [7, 8, 9]])}
    )
    bundle, _ = export(checkpoint, Target(name), tmp_path)
    with Predictor.open(bundle.path) as predictor:
        responses = predictor.answer([ask(body) for body in bodies])
    assert [response.status for response in responses] == [200, 400, 400, 400, 400, 400, 400, 200]
    assert [list(outputs_of(responses[index]).values()) for index in (0, 7)] == [[[0, 1, 2]], [[2, 3, 4]]]
    for index, value in ((3, 10), (4, -1)):
        fault = error_of(responses[index])
        assert fault["field"] == "ids"
        assert f"holds {value} at index" in fault["message"]
        assert "from 0 to 9" in fault["message"]


class Lookup(nn.Module):
    """ids (batch, 3) in 0..9 → the same as float32, looked up in a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 1, _weight=torch.arange(10.0).reshape(10, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids).flatten(1)


def test_requests_share_runs_up_to_the_largest_batch_and_keep_their_order() -> None:
    spy = Spy(lambda arrays: {"values": arrays["ids"].astype(np.float32)})
    requests = [ask({"ids": np.full(3, index)}) for index in range(11)]
    responses = predictor_of(LOOKUP, spy).answer(requests)
    assert spy.runs == [8, 3]
    assert [outputs_of(response)["values"] for response in responses] == [[index] * 3 for index in range(11)]
    assert [response.run_requests for response in responses] == [8] * 8 + [3] * 3


@given(sizes=st.lists(st.integers(0, 8), max_size=12))
@settings(max_examples=60, deadline=None)
def test_items_and_batches_mixed_come_back_to_their_owners(sizes: list[int]) -> None:
    """A size of 0 stands for one item without the batch axis."""
    spy = Spy(lambda arrays: {"values": 2 * arrays["ids"].astype(np.float32)})
    sent = [np.arange(3 * max(size, 1)).reshape((-1, 3) if size else 3) + 100 * n for n, size in enumerate(sizes)]
    responses = predictor_of(LOOKUP, spy).answer([ask({"ids": array}) for array in sent])
    for array, response in zip(sent, responses, strict=True):
        np.testing.assert_array_equal(outputs_of(response)["values"], 2.0 * array)
    assert all(run <= 8 for run in spy.runs)
    assert sum(spy.runs) == sum(max(size, 1) for size in sizes)


def test_other_sizes_do_not_share_a_run() -> None:
    spec = ModelSpec(
        "lengths", (TensorSpec("x", "float32", ("batch", "length")),), (TensorSpec("sum", "float32", ("batch",)),),
        {"batch": Dim(1, 4, 8), "length": Dim(1, 4, 6)}, "batch",
    )  # fmt: skip
    spy = Spy(lambda arrays: {"sum": arrays["x"].sum(1)})
    lengths = [2, 5, 2, 5, 2]
    responses = predictor_of(spec, spy).answer([ask({"x": np.ones(length, np.float32)}) for length in lengths])
    assert sorted(spy.runs) == [2, 3]
    assert [outputs_of(response)["sum"] for response in responses] == lengths


def test_each_tensor_is_stacked_and_split_along_its_own_batch_axis() -> None:
    spec = ModelSpec(
        "axes", (TensorSpec("x", "float32", (2, "batch")),), (TensorSpec("y", "float32", ("batch", 2)),),
        {"batch": Dim(1, 4, 8)}, "batch",
    )  # fmt: skip
    spy = Spy(lambda arrays: {"y": np.ascontiguousarray(arrays["x"].T)}, axis=1)
    sent = [np.array([index, -index], np.float32) for index in range(3)]
    responses = predictor_of(spec, spy).answer([ask({"x": array}) for array in sent])
    assert spy.runs == [3]
    assert [outputs_of(response)["y"] for response in responses] == [[index, -index] for index in range(3)]


@pytest.mark.parametrize("why", ["no batch axis in the output", "rows depend on each other"])
def test_requests_that_must_not_share_a_run_run_alone(why: str) -> None:
    shape: tuple[int | str, ...] = ("batch", 3) if why == "rows depend on each other" else (3,)
    spec = ModelSpec(
        "alone", (TensorSpec("x", "float32", ("batch", 3)),), (TensorSpec("y", "float32", shape),),
        {"batch": Dim(1, 4, 8)}, "batch",
    )  # fmt: skip
    spy = Spy(lambda arrays: {"y": arrays["x"] - arrays["x"].mean(0) if len(shape) == 2 else arrays["x"].mean(0)})
    predictor = predictor_of(spec, spy, batch_independent=len(shape) == 1)
    responses = predictor.answer([ask({"x": np.full((2, 3), index, np.float32)}) for index in range(3)])
    assert spy.runs == [2, 2, 2]
    expected = [np.zeros((2, 3)) if len(shape) == 2 else np.full(3, index) for index in range(3)]
    for response, values in zip(responses, expected, strict=True):
        np.testing.assert_array_equal(outputs_of(response)["y"], values)


def test_a_smallest_batch_above_one_refuses_single_items() -> None:
    spec = ModelSpec(
        "pairs", (TensorSpec("x", "float32", ("batch", 1)),), (TensorSpec("y", "float32", ("batch", 1)),),
        {"batch": Dim(2, 4, 8)}, "batch",
    )  # fmt: skip
    predictor = predictor_of(spec, lambda arrays: {"y": arrays["x"]})
    single, pair = predictor.answer([ask({"x": np.ones(1, np.float32)}), ask({"x": np.ones((2, 1), np.float32)})])
    assert single.status == 400
    assert "allowed 2 to 8" in error_of(single)["message"]
    assert outputs_of(pair)["y"] == [[1], [1]]


def test_a_model_that_breaks_its_spec_is_the_servers_fault() -> None:
    [response] = predictor_of(LOOKUP, lambda _: {"values": np.zeros((9, 9), np.float32)}).answer(
        [ask({"ids": np.arange(3)})]
    )
    assert response.status == 500
    assert "SpecError" in error_of(response)["message"]


def test_a_failing_run_is_taken_apart_and_only_its_cause_is_told() -> None:
    def poisoned(arrays: Arrays) -> dict[str, Array]:
        if (arrays["ids"] == 7).any():
            raise MemoryError("no room for 7")
        return look_up(arrays)

    responses = predictor_of(LOOKUP, poisoned).answer([ask({"ids": np.full(3, value)}) for value in (6, 7, 8)])
    assert [response.status for response in responses] == [200, 500, 200]
    assert "no room for 7" in error_of(responses[1])["message"]


def test_each_answer_has_the_form_that_its_request_accepts() -> None:
    predictor = predictor_of(LOOKUP, look_up)
    body = npy_bytes(np.arange(3))
    binary, text, neither = predictor.answer(
        [Request(body, NPY, NPY), Request(body, NPY, "*/*"), Request(body, NPY, "text/html")]
    )
    assert (binary.content_type, parse_npy(binary.body).dtype.name) == (NPY, "float32")
    assert (text.content_type, outputs_of(text)) == (JSON, {"values": [0, 1, 2]})
    assert (neither.status, neither.content_type, error_of(neither)["field"]) == (406, JSON, "accept")


def test_no_requests_no_answers() -> None:
    assert predictor_of(LOOKUP, look_up).answer([]) == []


# --------------------------------------------------------------------------------------------- real bundles


@pytest.mark.parametrize("name", ["torchscript", "exported", "onnx"])
def test_real_bundles_answer_alone_and_together_alike(
    name: str, digits_bundles: Mapping[str, Path], digits_images: Array
) -> None:
    with Predictor.open(digits_bundles[name], threads=1) as predictor:
        requests = [ask({"image": image}) for image in digits_images[:7]]
        together = predictor.answer(requests)
        alone = [predictor.answer([request])[0] for request in requests]
    assert {response.run_requests for response in together} == {7}
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_allclose(outputs_of(one)["logits"], outputs_of(other)["logits"], rtol=1e-4, atol=1e-4)


def test_batching_along_axis_one_mixes_no_time_steps(tmp_path: Path) -> None:
    bundle, _ = export(checkpoint_of(SequenceFirst), Target("onnx"), tmp_path)
    sent = [np.full((5, 4), index, np.float32) for index in range(1, 5)]
    with Predictor.open(bundle.path) as predictor:
        responses = predictor.answer([ask({"x": array}) for array in sent])
    assert {response.run_requests for response in responses} == {4}
    for array, response in zip(sent, responses, strict=True):
        [values] = outputs_of(response).values()
        np.testing.assert_array_equal(values, array.cumsum(0))


def test_rows_found_in_one_request_never_mix_with_anothers(tmp_path: Path) -> None:
    bundle, _ = export(checkpoint_of(Detections), Target("torchscript"), tmp_path)
    found = np.array([[0.9, 1, 2, 3, 4], [0.1, 0, 0, 0, 0]], np.float32)
    nothing = np.full((3, 5), 0.1, np.float32)
    with Predictor.open(bundle.path) as predictor:
        some, none = predictor.answer([ask({"boxes": found}), ask({"boxes": nothing})])
    [values] = outputs_of(some).values()
    np.testing.assert_allclose(values, found[:1], rtol=1e-6)
    assert list(outputs_of(none).values()) == [[]]


def test_rows_that_depend_on_neighbours_are_never_stacked(tmp_path: Path) -> None:
    bundle, _ = export(checkpoint_of(MixesRows), Target("onnx"), tmp_path)
    sent = [np.array([[index, 0, 0], [-index, 0, 0]], np.float32) for index in range(3)]
    with Predictor.open(bundle.path) as predictor:
        responses = predictor.answer([ask({"x": array}) for array in sent])
    assert [response.run_requests for response in responses] == [1, 1, 1]
    for array, response in zip(sent, responses, strict=True):
        [values] = outputs_of(response).values()
        np.testing.assert_array_equal(values, array)


def test_several_outputs_of_several_dtypes(tmp_path: Path) -> None:
    bundle, _ = export(checkpoint_of(ManyOutputs), Target("onnx"), tmp_path)
    requests = [
        ask({"ids": np.array([1, 2, 3]), "mask": np.array([1, 1, 0])}),
        ask({"ids": np.array([5, 6]), "mask": np.array([1, 1])}),
        ask({"ids": np.array([7, 8, 9]), "mask": np.array([0, 0, 1])}),
    ]
    with Predictor.open(bundle.path) as predictor:
        responses = predictor.answer(requests)
    assert [response.run_requests for response in responses] == [2, 1, 2]
    assert [sorted(map(str, outputs_of(response).values())) for response in responses] == [
        sorted(map(str, values)) for values in ([3, True, 1.5], [11, True, 5.5], [9, True, 9.0])
    ]
