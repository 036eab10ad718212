"""INT8 of format `onnx`: what is written, on which CPU it is exact, and the models that INT8 gets wrong elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from deployer.bundle import Machine, Manifest, Source
from deployer.checkpoint.eager import run_eager
from deployer.errors import ExportError, MachineError
from deployer.formats import ExportJob, LoadJob, Target
from deployer.formats import onnx as onnx_format
from deployer.formats.onnx_int8 import OnnxWorkbench
from deployer.machine import INT8_IN_32_BITS, architecture, sums_int8_in_32_bits
from deployer.quantize.calibration import Calibration
from deployer.quantize.config import OBSERVERS, DynamicInt8, Int8Method, StaticInt8, WeightOnlyInt8
from deployer.quantize.observers import Spread, limits
from deployer.quantize.workbench import Trial
from deployer.runtime import preflight
from deployer.spec import Array, Arrays, Dim, ModelSpec, TensorSpec

onnx = pytest.importorskip("onnx", reason="needs the extra 'cpu'")

BATCH = {"batch": Dim(1, 4, 16)}
AVX2_ALONE = ("avx", "avx2", "fma", "sse4_2")
METHODS: tuple[Int8Method, ...] = (
    *(StaticInt8(observer) for observer in OBSERVERS),
    StaticInt8(smooth=0.5),
    StaticInt8(correct_bias=True),
    DynamicInt8(),
    DynamicInt8(smooth=0.5),
    WeightOnlyInt8(),
)


def spec_of(inputs: Sequence[int], outputs: Sequence[int], **more: Any) -> ModelSpec:
    """x (batch, *inputs) → y (batch, *outputs), float32."""
    return ModelSpec(
        "net",
        (TensorSpec("x", "float32", ("batch", *inputs)),),
        (TensorSpec("y", "float32", ("batch", *outputs)),),
        dims=BATCH,
        batch="batch",
        **more,
    )


IDS = ModelSpec(
    "ids",
    (TensorSpec("ids", "int64", ("batch", 6), low=0, high=49),),
    (TensorSpec("y", "float32", ("batch", 4)),),
    dims=BATCH,
    batch="batch",
)


def calibration_of(batches: Sequence[Arrays]) -> Calibration:
    return Calibration("test", "0" * 64, sum(len(next(iter(batch.values()))) for batch in batches), tuple(batches), ())


def bench_of(model: nn.Module, spec: ModelSpec, batches: Sequence[Arrays], folder: Path) -> OnnxWorkbench:
    job = ExportJob(model.eval(), spec, batches[0], Target("onnx", "int8"), folder)
    return OnnxWorkbench(job, calibration_of(batches))


def normal(shape: Sequence[int], seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def cosine(got: Array, expected: Array) -> float:
    """The smallest over the rows."""
    a, b = (array.reshape(len(array), -1).astype(np.float64) for array in (got, expected))
    return float(((a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))).min())


def written(bench: OnnxWorkbench, trial: Trial, spec: ModelSpec, folder: Path) -> tuple[dict[str, Any], Any]:
    """(details, how the file answers)."""
    details = bench.write(trial)
    return details, onnx_format.load(LoadJob(folder, spec, Target("onnx", "int8"), details)).call


# ------------------------------------------------------------------------------------------------------ CPUs and sums


class Ones(nn.Module):
    """Sums 64 numbers, twice: its weights become 127 and ones 255, the largest products that there are."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 2, bias=False)
        nn.init.ones_(self.fc.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


ONES = {"x": np.ones((3, 64), np.float32)}


@pytest.fixture
def ones_bench(tmp_path: Path) -> OnnxWorkbench:
    random = np.random.default_rng(0)
    batches = [{"x": random.random((8, 64), dtype=np.float32)} for _ in range(4)]
    return bench_of(Ones(), spec_of([64], [2]), [*batches, ONES, {"x": np.zeros((1, 64), np.float32)}], tmp_path)


def test_sums_of_the_largest_products_are_right(ones_bench: OnnxWorkbench, tmp_path: Path) -> None:
    """64.0 within 1 %: with 7 bits on every CPU, and with what is chosen for this one."""
    for method in (StaticInt8(), DynamicInt8(), StaticInt8(symmetric=True), *ones_bench.methods()):
        details, call = written(ones_bench, ones_bench.attempt(method), spec_of([64], [2]), tmp_path)
        np.testing.assert_allclose(call(ONES)["y"], 64, rtol=0.01, err_msg=str(method))
        if not isinstance(method, WeightOnlyInt8):
            assert details["int8"]["layers"] == 1, method


def test_weights_of_seven_bits_never_fill_sixteen(ones_bench: OnnxWorkbench, tmp_path: Path) -> None:
    """Two products of 255 and the largest weight stay below 2^15: what makes the file exact on every x86 CPU."""
    for method in (StaticInt8(reduce_range=True), DynamicInt8(reduce_range=True)):
        ones_bench.write(ones_bench.attempt(method))
        tensors = onnx.load(tmp_path / "model.onnx").graph.initializer
        weights = [onnx.numpy_helper.to_array(t) for t in tensors if t.data_type == onnx.TensorProto.INT8 and t.dims]
        largest = max(int(np.abs(weight.astype(int)).max()) for weight in weights)
        assert 2 * 255 * largest < 2**15
        assert largest == 64


def manifest_of(details: dict[str, Any]) -> Manifest:
    return Manifest(
        spec=spec_of([64], [2]),
        target=Target("onnx", "int8"),
        passed=True,
        batch_independent=True,
        sha256={},
        source=Source("test", "0" * 64, "test"),
        machine=Machine(architecture()),
        tool_versions={},
        details=details,
    )


def test_a_cpu_without_vnni_gets_seven_bits_and_refuses_eight(
    ones_bench: OnnxWorkbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = ones_bench.write(ones_bench.attempt(StaticInt8(reduce_range=False)))
    reduced = ones_bench.write(ones_bench.attempt(StaticInt8(reduce_range=True)))
    assert full["int8"]["exact_on"] == INT8_IN_32_BITS
    assert reduced["int8"]["exact_on"] == "any"
    for module in ("deployer.machine", "deployer.runtime"):
        monkeypatch.setattr(f"{module}.cpu_features", lambda: AVX2_ALONE)
    assert all(method.reduce_range for method in ones_bench.methods() if not isinstance(method, WeightOnlyInt8))
    preflight(manifest_of(reduced))
    with pytest.raises(MachineError, match=r"none of amx_int8, avx512_vnni, .*export it on this machine") as caught:
        preflight(manifest_of(full))
    assert caught.value.reason == "wrong_cpu"
    for feature in INT8_IN_32_BITS:
        for module in ("deployer.machine", "deployer.runtime"):
            monkeypatch.setattr(f"{module}.cpu_features", lambda feature=feature: (*AVX2_ALONE, feature))
        preflight(manifest_of(full))
        assert not any(getattr(method, "reduce_range", False) for method in ones_bench.methods())


# --------------------------------------------------------------------------------------------------------- arithmetic


#: 8 bits of weight where this CPU sums them in 32, else 7, and the largest number that a weight then holds
REDUCED = not sums_int8_in_32_bits()
LARGEST = 64 if REDUCED else 127


@pytest.mark.parametrize(
    ("method", "largest"),
    [
        (StaticInt8(reduce_range=REDUCED), LARGEST),
        (DynamicInt8(reduce_range=REDUCED), LARGEST),
        (WeightOnlyInt8(), 127),
    ],
    ids=str,
)
def test_what_int8_can_hold_is_exact(method: Int8Method, largest: int, tmp_path: Path) -> None:
    """Inputs k/255 between 0 and 1 and whole weights up to `largest` are INT8 numbers, and the
    answer is the float answer."""
    random = np.random.default_rng(0)
    weight = random.integers(-largest, largest + 1, (8, 16)).astype(np.float32)
    weight[:, 0] = largest
    model = nn.Sequential(nn.Linear(16, 8))
    with torch.no_grad():
        model[0].weight.copy_(torch.from_numpy(weight))
        model[0].bias.copy_(torch.arange(8.0))
    x = random.integers(0, 256, (16, 16)).astype(np.float32)
    x[:, :2] = 0, 255
    batch = {"x": x / 255}

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    bench = bench_of(Named(), spec_of([16], [8]), [batch], tmp_path)
    expected = batch["x"].astype(np.float64) @ weight.T.astype(np.float64) + np.arange(8)
    np.testing.assert_allclose(bench.attempt(method).call(batch)["y"], expected, rtol=0, atol=2e-4)


def test_a_row_is_answered_as_it_is_alone(tmp_path: Path) -> None:
    """One row is a thousand times larger than the others: with one range for the batch they would be rounded away."""
    model = nn.Sequential()
    model.add_module("fc", nn.Linear(32, 8))
    bench = bench_of(Rows(), spec_of([5, 32], [5, 8]), [{"x": normal((8, 5, 32))}], tmp_path)
    x = normal((4, 5, 32), 1)
    x[0] *= 1000
    trial = bench.attempt(DynamicInt8())
    together = trial.call({"x": x})["y"]
    for row in range(4):
        np.testing.assert_allclose(trial.call({"x": x[row : row + 1]})["y"][0], together[row], rtol=1e-5, atol=1e-6)
    assert cosine(together, run_eager(Rows().eval(), spec_of([5, 32], [5, 8]), {"x": x})["y"]) > 0.999
    assert trial.notes == ()


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


def test_rows_without_width_are_exact_zeros_too(tmp_path: Path) -> None:
    bench = bench_of(Rows(), spec_of([5, 32], [5, 8]), [{"x": normal((8, 5, 32))}], tmp_path)
    bias = Rows().fc.bias.detach().numpy()
    got = bench.attempt(DynamicInt8()).call({"x": np.zeros((2, 5, 32), np.float32)})["y"]
    np.testing.assert_array_equal(got, np.broadcast_to(bias, got.shape))


# ------------------------------------------------------------------------------------------------- kinds of models


class EmbeddingNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.fc1, self.fc2 = nn.Embedding(50, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.fc2(torch.relu(self.fc1(self.emb(ids).mean(1))))


class ConvNet(nn.Module):
    """conv-bn-relu, a residual addition, pooling, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
        self.body = nn.Sequential(
            nn.Conv2d(16, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16),
        )  # fmt: skip
        self.last = nn.Conv2d(16, 16, 1)
        self.fc = nn.Linear(16, 4)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.uniform_(module.running_mean, -0.5, 0.5)
                nn.init.uniform_(module.running_var, 0.5, 2)
                nn.init.uniform_(module.weight, 0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.fc(self.last(torch.relu(self.body(x) + x)).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.out = nn.LSTM(16, 32, batch_first=True, bidirectional=True), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0].mean(1))


class Tied(nn.Module):
    """A table that is looked up and multiplied by, layer norm in between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.norm, self.mid = nn.Embedding(50, 32), nn.LayerNorm(32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.mid(self.emb(ids)))).mean(1)[:, :4]


def ids(rows: int, seed: int) -> dict[str, Array]:
    return {"ids": np.random.default_rng(seed).integers(0, 50, (rows, 6))}


def images(rows: int, seed: int) -> dict[str, Array]:
    return {"x": normal((rows, 3, 16, 16), seed)}


def steps(rows: int, seed: int) -> dict[str, Array]:
    return {"x": normal((rows, 5, 16), seed)}


Inputs = Callable[[int, int], dict[str, Array]]
STEPS = ModelSpec(
    "steps",
    (TensorSpec("x", "float32", ("batch", "time", 16)),),
    (TensorSpec("y", "float32", ("batch", 4)),),
    dims=BATCH | {"time": Dim(1, 5, 20)},
    batch="batch",
)

#: class → (spec, inputs, layers that static ranges quantize, layers quantized row by row, lookup tables)
KINDS: Mapping[str, tuple[type[nn.Module], ModelSpec, Inputs, set[str], set[str], set[str]]] = {
    "embedding": (EmbeddingNet, IDS, ids, {"fc1", "fc2"}, {"fc1", "fc2"}, {"emb"}),
    "convolutions": (
        ConvNet,
        spec_of([3, 16, 16], [4]),
        images,
        {"stem.0", "body.0", "body.3", "last", "fc"},
        {"fc"},
        set(),
    ),
    "lstm": (Recurrent, spec_of([5, 16], [4]), steps, {"out"}, {"lstm", "out"}, set()),
    "scan": (Recurrent, STEPS, steps, {"lstm", "out"}, {"lstm", "out"}, set()),
    "tied": (Tied, IDS, ids, {"mid", "head"}, {"mid", "head"}, {"emb"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_method_on_every_kind_of_model(kind: str, tmp_path: Path) -> None:
    make, spec, inputs, fixed, by_row, tables = KINDS[kind]
    bench = bench_of(make(), spec, [inputs(8, seed) for seed in range(8)], tmp_path)
    model = make().eval()
    for method in METHODS:
        trial = bench.attempt(method)
        details, call = written(bench, trial, spec, tmp_path)
        layers = set(trial.layers)
        if isinstance(method, WeightOnlyInt8):
            assert layers == fixed | tables
            assert details["int8"] == {"layers": 0, "operators": {}, "exact_on": "any"}
        else:
            assert layers == (fixed if isinstance(method, StaticInt8) else by_row), method
            assert details["int8"]["layers"] >= len(layers), method
        for rows in (1, 3, 8):
            arrays = inputs(rows, 100 + rows)
            expected = run_eager(model, spec, arrays)["y"]
            got = trial.call(arrays)["y"]
            assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
            assert cosine(got, expected) >= 0.99, (method, rows)
            np.testing.assert_array_equal(call(arrays)["y"], got, err_msg=str(method))
        graph = onnx.load(tmp_path / "model.onnx").graph
        axis = graph.input[0].type.tensor_type.shape.dim[0]
        assert axis.dim_param == "batch"
        assert [value.name for value in (*graph.input, *graph.output)] == [spec.inputs[0].name, "y"]
        kinds = {"int64": onnx.TensorProto.INT64, "float32": onnx.TensorProto.FLOAT}
        assert graph.input[0].type.tensor_type.elem_type == kinds[spec.inputs[0].dtype]


def test_between_convolutions_everything_is_int8(tmp_path: Path) -> None:
    """The sum and the pooling too, and no ReLU is left: rounding to uint8 cuts off what is below zero."""
    make, spec, inputs, *_ = KINDS["convolutions"]
    bench = bench_of(make(), spec, [inputs(8, seed) for seed in range(4)], tmp_path)
    assert isinstance(bench.methods()[0], StaticInt8)
    assert not any(isinstance(method, DynamicInt8) for method in bench.methods())
    details = bench.write(bench.attempt(StaticInt8()))
    assert details["int8"]["operators"] == {"QLinearConv": 4, "QGemm": 1}
    operators = [node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node]
    assert "Relu" not in operators


def test_layers_kept_in_float(tmp_path: Path) -> None:
    make, spec, inputs, *_ = KINDS["convolutions"]
    bench = bench_of(make(), spec, [inputs(8, seed) for seed in range(4)], tmp_path)
    trial = bench.attempt(StaticInt8(), ["body.0"])
    assert trial.layers == ("stem.0", "body.3", "last", "fc")
    assert trial.kept_float == {"body.0"}
    assert bench.write(trial)["int8"]["layers"] == 4
    every = bench.attempt(StaticInt8()).layers
    with pytest.raises(ExportError, match="no layer that this quantizes"):
        bench.attempt(StaticInt8(), every)
    with pytest.raises(ExportError, match=r"no layer is called 'body\.9'; layers: body\.0, body\.3"):
        bench.attempt(StaticInt8(), ["body.9"])


def test_linear_models_are_quantized_row_by_row_first(tmp_path: Path) -> None:
    make, spec, inputs, *_ = KINDS["tied"]
    assert isinstance(bench_of(make(), spec, [inputs(8, 0)], tmp_path).methods()[0], DynamicInt8)


def test_a_recurrent_layer_says_that_rows_share_a_range(tmp_path: Path) -> None:
    make, spec, inputs, *_ = KINDS["lstm"]
    bench = bench_of(make(), spec, [inputs(8, 0)], tmp_path)
    trial = bench.attempt(DynamicInt8())
    assert "depends on the others" in trial.notes[0]
    x = inputs(4, 1)["x"]
    x[0] *= 100
    alone = trial.call({"x": x[1:2]})["y"][0]
    assert float(np.abs(alone - trial.call({"x": x})["y"][1]).max()) > 1e-4
    assert trial.layers == ("lstm", "out")
    assert bench.write(trial)["int8"]["operators"]["DynamicQuantizeLSTM"] == 1


# -------------------------------------------------------------------------------------------------- hard distributions


def test_weights_that_spread_over_four_decades(tmp_path: Path) -> None:
    """Each channel has its own scale: the smallest output is as near to float as the largest."""
    rows = Rows()
    factors = torch.logspace(-4, 0, 8)[:, None]
    with torch.no_grad():
        rows.fc.weight.mul_(factors)
        rows.fc.bias.zero_()
    spec = spec_of([5, 32], [5, 8])
    bench = bench_of(rows, spec, [{"x": normal((8, 5, 32), seed)} for seed in range(4)], tmp_path)
    arrays = {"x": normal((8, 5, 32), 9)}
    expected = run_eager(rows.eval(), spec, arrays)["y"].reshape(-1, 8)
    for method in METHODS:
        got = bench.attempt(method).call(arrays)["y"].reshape(-1, 8)
        error = np.linalg.norm(got - expected, axis=0) / np.linalg.norm(expected, axis=0)
        assert (error < 0.05).all(), (method, error)


class Outlier(nn.Module):
    """60 channels of 0 and 0.5 that are summed to 15, and one of 1000 that no weight reads."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(61, 1, bias=False)
        nn.init.ones_(self.fc.weight)
        with torch.no_grad():
            self.fc.weight[0, 0] = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


def test_an_outlier_of_a_thousand_is_right_or_plainly_wrong(tmp_path: Path) -> None:
    """Its range rounds 0.5 to 0. Divided by its own size first (SmoothQuant), or kept in float, it does no harm; where
    a method is wrong its trial shows it, by an answer far from 15."""
    x = np.zeros((4, 61), np.float32)
    x[:, ::2] = 0.5
    x[:, 0] = 1000
    bench = bench_of(Outlier(), spec_of([61], [1]), [{"x": x}], tmp_path)
    right = set()
    for method in METHODS:
        error = np.abs(bench.attempt(method).call({"x": x})["y"] - 15).max() / 15
        assert error < 0.05 or error > 0.5, method
        right |= {str(method)} if error < 0.05 else set()
    assert {"static min-max smooth 0.5", "dynamic smooth 0.5", "weight-only"} <= right
    assert "static min-max" not in right  # or this test shows nothing
    assert "dynamic" not in right


def test_a_bias_far_larger_than_its_weights_fits(tmp_path: Path) -> None:
    """A bias is rounded to steps of input step times weight step: with tiny weights it would leave int32."""
    torch.manual_seed(0)
    model = ConvNet()
    with torch.no_grad():
        model.body[3].weight[0] = 1e-12
        model.body[3].bias[0] = 100.0
    spec = spec_of([3, 16, 16], [4])
    bench = bench_of(model, spec, [images(8, seed) for seed in range(4)], tmp_path)
    arrays = images(4, 9)
    expected = run_eager(model.eval(), spec, arrays)["y"]
    assert cosine(bench.attempt(StaticInt8()).call(arrays)["y"], expected) > 0.99


# ------------------------------------------------------------------------------------------------------------ refusals


class NoWeights(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Dead(nn.Module):
    """A layer that calibration data never reach: its input is 0 for all of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.live, self.dead = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.live(x.clamp(-3, 3)) + self.dead(torch.relu(x - 100))


class Logarithm(Rows):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.log(x))


def test_what_cannot_be_quantized_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="no convolution, linear or recurrent layer"):
        bench_of(NoWeights(), spec_of([3], [3]), [{"x": normal((4, 3))}], tmp_path)
    bench = bench_of(Logarithm(), spec_of([5, 32], [5, 8]), [{"x": normal((4, 5, 32))}], tmp_path)
    with pytest.raises(ExportError, match="NaN or infinite on the calibration data"):
        bench.attempt(StaticInt8())


def test_a_layer_that_saw_zeros_alone_stays_in_float(tmp_path: Path) -> None:
    """No scale can be made of zeros: one of 1, say, would be wrong for whatever comes."""
    bench = bench_of(Dead(), spec_of([8], [4]), [{"x": normal((8, 8))}], tmp_path)
    trial = bench.attempt(StaticInt8())
    assert trial.layers == ("live",)
    assert trial.notes == ("kept in float, since calibration data never reach them: dead",)
    arrays = {"x": normal((4, 8), 1) + 110}
    assert cosine(trial.call(arrays)["y"], run_eager(Dead().eval(), spec_of([8], [4]), arrays)["y"]) > 0.9


# ----------------------------------------------------------------------------------------------------------- observers


def spread_of(array: Array) -> Spread:
    spread = Spread(-1)
    for take in (spread.see, spread.count):
        for part in np.array_split(array, 3):
            take(part)
    return spread


def test_what_a_spread_keeps() -> None:
    array = np.array([[1, -8], [2, 0], [3, 5], [0, 3]], np.float32)
    spread = spread_of(array)
    assert (spread.low, spread.high, spread.vectors) == (-8, 5, 4)
    np.testing.assert_array_equal(spread.largest, [3, 8])
    np.testing.assert_allclose(spread.mean, [1.5, 0])
    assert spread.counts.sum() == 6  # two zeros are not counted


def test_observers_on_known_distributions() -> None:
    even = np.linspace(0, 1, 20001, dtype=np.float32)[:, None]
    assert limits(spread_of(even), "min-max") == (0, 1)
    assert limits(spread_of(even), "min-max", symmetric=True) == (-1, 1)
    for observer in OBSERVERS:  # of an even distribution there is nothing to cut off
        low, high = limits(spread_of(even), observer)
        assert low == 0
        assert high == pytest.approx(1, abs=0.03)
    tailed = np.concatenate([normal((100_000, 1)), np.full((3, 1), 100, np.float32)])
    assert limits(spread_of(tailed), "min-max")[1] == 100
    for observer in ("percentile", "entropy"):  # three values of 100 among 100,000 normal ones
        low, high = limits(spread_of(tailed), observer)
        assert 2 < high < 40, observer
        assert low < -2, observer
        assert limits(spread_of(tailed), observer, symmetric=True) == (-high, high)


@pytest.mark.parametrize("symmetric", [False, True])
def test_the_mse_observer_finds_the_smallest_error(symmetric: bool) -> None:
    """One value of 20 among a million normal ones: held against rounding itself, over all ranges."""
    values = np.concatenate([normal((1_000_000, 1)), np.full((1, 1), 20, np.float32)])
    spread = spread_of(values)

    def error(low: float, high: float) -> float:
        step = (high - low) / 255
        zero = np.round(-low / step)
        rounded = (np.clip(np.round(values / step) + zero, 0, 255) - zero) * step
        return float(np.square(rounded - values, dtype=np.float64).mean())

    ends = np.linspace(1, 20, 20)
    best = min(error(-low, high) for high in ends for low in ([high] if symmetric else [3, 4, 5]))
    low, high = limits(spread, "mse", symmetric=symmetric)
    assert error(low, high) <= 1.05 * best
    assert error(low, high) < 0.7 * error(*limits(spread, "min-max", symmetric=symmetric))
