"""INT8 of exported and aoti: what is quantized, what is really written, and what is never shipped."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from deployer.checkpoint import Checkpoint
from deployer.checkpoint.eager import run_eager
from deployer.errors import ExportError, MachineError
from deployer.export import export
from deployer.formats import ExportJob, LoadJob, Target, aoti, get_format
from deployer.formats.pt2e import EXACT_FEATURES, Bench, count_kernels
from deployer.int8 import Int8
from deployer.machine import cpu_features
from deployer.quantize import x86
from deployer.quantize.calibration import Calibration
from deployer.quantize.config import DynamicInt8, Int8Method, StaticInt8
from deployer.runtime import open_bundle
from deployer.spec import Array, Arrays, Dim, ModelSpec, TensorSpec

BATCH = Dim(1, 4, 32)
#: 8 bits of weight where this CPU sums them in 32, else 7: what a CPU would saturate is refused when written
REDUCED = set(EXACT_FEATURES).isdisjoint(cpu_features())
STATIC = StaticInt8(reduce_range=False)


class Around(nn.Module):
    """One layer, whose input is called x."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def seeded(seed: int, *shape: int) -> Array:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).numpy()


def spec_of(shape: tuple[int | str, ...], outputs: int, dtype: str = "float32", **dims: Dim) -> ModelSpec:
    return ModelSpec(
        "net",
        (TensorSpec("x", dtype, ("batch", *shape)),),
        (TensorSpec("answer", "float32", ("batch", outputs)),),
        dims={"batch": BATCH, **dims},
        batch="batch",
    )


def bench_of(
    model: nn.Module, spec: ModelSpec, batches: list[dict[str, Array]], folder: Path, name: str = "aoti", **target: Any
) -> tuple[Bench, ExportJob]:
    job = ExportJob(model.eval(), spec, batches[0], Target(name, precision="int8", **target), folder)
    workbench = get_format(name).workbench
    assert workbench is not None
    bench = workbench(job, Calibration("test", "0" * 64, len(batches), tuple(batches), ()))
    assert isinstance(bench, Bench)
    return bench, job


def opened(job: ExportJob, details: dict[str, Any]) -> Callable[[Arrays], dict[str, Array]]:
    return get_format(job.target.format).load(LoadJob(job.folder, job.spec, job.target, details)).call


def sqnr_db(got: Array, expected: Array) -> float:
    return float(10 * np.log10(np.mean(np.square(expected)) / np.mean(np.square(got - expected))))


def cosine(got: Array, expected: Array) -> float:
    norms = np.linalg.norm(got, axis=-1) * np.linalg.norm(expected, axis=-1)
    return float(((got * expected).sum(-1) / norms).min())


# ---------------------------------------------------------------------------------------------- a convolutional network


class Residual(nn.Module):
    """Convolutions, a batch norm, one ReLU for all of it, residual sums, pooling, groups, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.relu, self.pool = nn.ReLU(), nn.MaxPool2d(2)
        self.block, self.skip = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(8, 16, 1)
        self.depth = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.classify = nn.Linear(16, 6)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.relu(self.norm(self.stem(x))))
        x = self.relu(self.block(x) + self.skip(x))
        return self.classify(self.relu(self.depth(x) + x).mean((2, 3)))


LAYERS = ("stem", "block", "skip", "depth", "classify")
IMAGES = [{"x": seeded(i, 8, 3, 12, 12)} for i in range(4)]


@pytest.fixture(scope="module")
def residual(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bench, ExportJob, dict[str, Any]]:
    bench, job = bench_of(Residual(), spec_of((3, 12, 12), 6), IMAGES, tmp_path_factory.mktemp("residual"))
    return bench, job, bench.write(bench.attempt(STATIC))


def test_every_layer_is_int8_in_the_package(residual: tuple[Bench, ExportJob, dict[str, Any]]) -> None:
    _, job, details = residual
    int8 = details["int8"]
    assert (int8["layers"], int8["quantized"]) == (5, list(LAYERS))
    assert int8["method"] == "static min-max"
    assert int8["exact_on"] == EXACT_FEATURES
    assert "notes" not in details
    call = opened(job, details)
    for rows in (1, 3, 8, 32):
        inputs = {"x": seeded(50 + rows, rows, 3, 12, 12)}
        got, expected = call(inputs)["answer"], run_eager(job.model, job.spec, inputs)["answer"]
        assert got.dtype == expected.dtype
        assert got.shape == expected.shape
        assert sqnr_db(got, expected) > 25


def test_a_package_answers_in_a_process_without_torchao(
    residual: tuple[Bench, ExportJob, dict[str, Any]], tmp_path: Path
) -> None:
    _, job, details = residual
    inputs = seeded(9, 3, 3, 12, 12)
    np.save(tmp_path / "in.npy", inputs)
    script = f"""
        import sys
        sys.modules["torchao"] = None
        import numpy, torch
        package = torch._inductor.aoti_load_package({str(job.folder / "model.pt2")!r})
        with torch.no_grad():
            answer = package(torch.tensor(numpy.load({str(tmp_path / "in.npy")!r})))[0]
        numpy.save({str(tmp_path / "out.npy")!r}, answer.numpy())
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), opened(job, details)({"x": inputs})["answer"])


def test_named_layers_stay_float(residual: tuple[Bench, ExportJob, dict[str, Any]]) -> None:
    bench, job, _ = residual
    expected = run_eager(job.model, job.spec, IMAGES[0])["answer"]
    errors = {}
    for kept in ((), ("stem",), LAYERS[1:]):
        trial = bench.attempt(STATIC, kept)
        assert trial.layers == tuple(name for name in LAYERS if name not in kept)
        errors[kept] = np.abs(trial.call(IMAGES[0])["answer"] - expected).max()
    assert errors[()] > 2 * errors[LAYERS[1:]] > 0
    with pytest.raises(ExportError, match="all 5 layers that int8 takes are kept in float"):
        bench.attempt(STATIC, LAYERS)
    with pytest.raises(ExportError, match=r"no layer 'steam'.*'stem'"):
        bench.attempt(STATIC, ["steam"])


def test_each_layer_alone_can_be_tried_without_running_the_calibration_data_again(
    residual: tuple[Bench, ExportJob, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, _, _ = residual
    bench.attempt(STATIC)
    monkeypatch.setattr("deployer.formats.pt2e.observe", None)
    for name in LAYERS:
        assert bench.attempt(STATIC, [other for other in LAYERS if other != name]).layers == (name,)


@pytest.mark.parametrize("observer", ["min-max", "percentile", "mse", "entropy"])
def test_every_observer_quantizes(residual: tuple[Bench, ExportJob, dict[str, Any]], observer: str) -> None:
    bench, job, _ = residual
    expected = run_eager(job.model, job.spec, IMAGES[1])["answer"]
    got = bench.attempt(StaticInt8(observer)).call(IMAGES[1])["answer"]
    assert 10 < sqnr_db(got, expected) < 60


def test_a_convolutional_network_is_offered_static_methods_first(
    residual: tuple[Bench, ExportJob, dict[str, Any]],
) -> None:
    methods = residual[0].methods()
    assert isinstance(methods[0], StaticInt8)
    assert any(isinstance(method, StaticInt8) and method.correct_bias for method in methods)
    assert not any(isinstance(method, StaticInt8) and method.equalize for method in methods)  # branches on all sides
    assert isinstance(methods[-1], DynamicInt8)
    assert all(residual[0].attempt(method).layers for method in methods)


def test_exported_runs_without_torchao_and_counts_what_it_holds(tmp_path: Path) -> None:
    bench, job = bench_of(Residual(), spec_of((3, 12, 12), 6), IMAGES, tmp_path, "exported")
    trial = bench.attempt(STATIC)
    details = bench.write(trial)
    assert details["int8"]["layers"] == 5
    assert details["int8"]["exact_on"] == "any"  # computed in float
    assert "simulated in float" in details["notes"][0]
    script = f"""
        import sys
        sys.modules["torchao"] = None
        import numpy
        from pathlib import Path
        import msgspec
        from deployer.formats import LoadJob, Target, get_format
        from deployer.spec import ModelSpec
        spec = msgspec.json.decode({msgspec_json(job.spec)!r}, type=ModelSpec)
        target = Target("exported", precision="int8")
        call = get_format("exported").load(LoadJob(Path({str(tmp_path)!r}), spec, target, {{}})).call
        x = numpy.linspace(-1, 1, 3 * 3 * 144, dtype="float32").reshape(3, 3, 12, 12)
        numpy.save({str(tmp_path / "out.npy")!r}, call({{"x": x}})["answer"])
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)
    x = np.linspace(-1, 1, 3 * 3 * 144, dtype=np.float32).reshape(3, 3, 12, 12)
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), trial.call({"x": x})["answer"], rtol=1e-5, atol=1e-6)


def msgspec_json(value: Any) -> bytes:
    import msgspec

    return msgspec.json.encode(value)


def test_exported_with_torch_compile_is_lowered_where_it_runs(tmp_path: Path) -> None:
    bench, job = bench_of(Residual(), spec_of((3, 12, 12), 6), IMAGES, tmp_path, "exported", compile="default")
    details = bench.write(bench.attempt(STATIC))
    assert details["int8"]["layers"] == 5
    assert details["int8"]["exact_on"] == EXACT_FEATURES
    call = opened(job, details)
    for rows in (1, 3, 8):
        inputs = {"x": seeded(70 + rows, rows, 3, 12, 12)}
        assert sqnr_db(call(inputs)["answer"], run_eager(job.model, job.spec, inputs)["answer"]) > 25


# ------------------------------------------------------------------------------------------------ what is never shipped


def test_a_package_without_int8_kernels_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_package = aoti._compile

    def unfrozen(job: ExportJob, program: Any, options: dict[str, Any]) -> None:
        compile_package(job, program, options | {"freezing": False})

    monkeypatch.setattr(aoti, "_compile", unfrozen)
    bench, _ = bench_of(Around(nn.Linear(8, 4)), spec_of((8,), 4), [{"x": seeded(0, 8, 8)}], tmp_path)
    with pytest.raises(ExportError, match="without a single int8 kernel, 1 were asked for"):
        bench.write(bench.attempt(STATIC))


def test_kernels_are_counted_in_the_code_that_calls_them() -> None:
    code = """
        AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu__qconv_pointwise_tensor(buf0, x, &buf1));
        AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu__qconv2d_pointwise_binary_tensor(buf0, x, &buf1));
        AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu__qlinear_pointwise_binary_tensor(buf0, x, &buf1));
        AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mkldnn__convolution_pointwise(buf0, x, &buf1));
        buf2 = torch.ops.onednn.qlinear_pointwise.tensor(buf0, x)
        // qlinear_pointwise_tensor
    """
    assert count_kernels(code) == 4


class OneChannel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.classify = nn.Linear(8 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.second(torch.relu(self.first(x))))
        return self.classify(nn.functional.max_pool2d(x, 2).flatten(1))


def test_a_convolution_over_one_channel_stays_float(tmp_path: Path) -> None:
    bench, job = bench_of(OneChannel(), spec_of((1, 8, 8), 5), [{"x": seeded(0, 8, 1, 8, 8)}], tmp_path)
    details = bench.write(bench.attempt(STATIC))
    assert details["int8"]["quantized"] == ["second", "classify"]
    assert details["notes"] == ["kept in float, since their input has one channel: first"]
    call = opened(job, details)
    for rows in (1, 3, 8):
        inputs = {"x": seeded(rows, rows, 1, 8, 8)}
        assert sqnr_db(call(inputs)["answer"], run_eager(job.model, job.spec, inputs)["answer"]) > 25


def test_a_package_that_answers_garbage_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(x86, "one_channel", lambda program, nodes: [])
    bench, _ = bench_of(OneChannel(), spec_of((1, 8, 8), 5), [{"x": seeded(0, 8, 1, 8, 8)}], tmp_path)
    with pytest.raises(ExportError, match="is not the quantized program: 'answer' is off by") as caught:
        bench.write(bench.attempt(STATIC))
    assert caught.value.reason == "miscompiled"


def test_nothing_to_quantize_is_said(tmp_path: Path) -> None:
    class Bare(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.softmax(1)

    bench, _ = bench_of(Bare(), spec_of((4,), 4), [{"x": seeded(0, 8, 4)}], tmp_path)
    for method in bench.methods():
        with pytest.raises(ExportError, match="nothing in the model becomes int8"):
            bench.attempt(method)


@pytest.mark.parametrize("name", ["exported", "aoti"])
def test_without_torchao_the_line_that_installs_it_is_given(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None if module == "torchao" else find(module))
    get_format(name).check_target(Target(name))
    with pytest.raises(MachineError, match="torchao") as caught:
        get_format(name).check_target(Target(name, precision="int8"))
    assert caught.value.install == "pip install 'deployer[int8]'"


# ---------------------------------------------------------------------------------------------------- saturating sums


class Ones(nn.Module):
    """64 where 64 ones meet 64 weights of one: each product is the largest that int8 knows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(64, 16, 1, bias=False)
        nn.init.ones_(self.layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[:, :, None, None].expand(-1, -1, 4, 4)).amax((2, 3))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the saturating kernels are those of x86")
def test_seven_bits_are_exact_on_a_cpu_without_vnni_and_eight_are_not(tmp_path: Path) -> None:
    batches = [{"x": np.abs(seeded(0, 8, 64)).clip(0, 1)}, {"x": np.ones((8, 64), np.float32)}]
    answers = {}
    for reduced in (True, False):
        folder = tmp_path / str(reduced)
        folder.mkdir()
        bench, job = bench_of(Ones(), spec_of((64,), 16), batches, folder)
        program = bench._quantize(StaticInt8(reduce_range=reduced), frozenset()).program
        details = bench.write(bench.attempt(StaticInt8(reduce_range=True))) if reduced else {}
        if not reduced:  # written past the check that would refuse it on a CPU without VNNI
            exported = aoti_program(program, job)
            aoti._write_int8(job, exported)
        else:
            assert details["int8"]["exact_on"] == "any"
        script = f"""
            import torch
            package = torch._inductor.aoti_load_package({str(folder / "model.pt2")!r})
            with torch.no_grad():
                print(float(package(torch.ones(3, 64))[0].mean()))
        """
        environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}  # oneDNN then takes the kernels of such a CPU
        out = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)],
            check=True,
            env=environment,
            capture_output=True,
            text=True,
        )
        answers[reduced] = float(out.stdout)
    assert answers[True] == pytest.approx(64, rel=0.01)
    assert answers[False] == pytest.approx(32.4, rel=0.01)


def aoti_program(program: Any, job: ExportJob) -> Any:
    from deployer.formats.traceable import Mode, export_again

    return export_again(program, job, Mode())


@pytest.mark.parametrize(
    ("flags", "reduced"), [(("avx2",), True), (("avx2", "avx512_vnni"), False), (("avx2", "avx_vnni"), True)]
)
def test_the_cpu_decides_about_seven_bits(
    flags: tuple[str, ...], reduced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployer.formats.pt2e.cpu_features", lambda: flags)
    bench, _ = bench_of(Around(nn.Linear(8, 4)), spec_of((8,), 4), [{"x": seeded(0, 8, 8)}], tmp_path)
    methods = [method for method in bench.methods() if isinstance(method, StaticInt8 | DynamicInt8)]
    assert {method.reduce_range for method in methods} == {reduced}


# -------------------------------------------------------------------------------------- transformers and their like


class Encoder(nn.Module):
    """int64 ids, an embedding that the head is tied to, a post-norm block with an outlier channel."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 32)
        self.norm = nn.LayerNorm(32)
        self.query, self.key, self.value, self.out = (nn.Linear(32, 32) for _ in range(4))
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight
        with torch.no_grad():
            self.norm.weight[5] = 60.0
            self.query.weight[:, 5] /= 60
            self.key.weight[:, 5] /= 60
            self.value.weight[:, 5] /= 60

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.embedding(x))
        attended = nn.functional.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))
        x = torch.tanh(self.out(attended))
        return self.head((x + self.down(nn.functional.gelu(self.up(x)))).mean(1))


def ids(seed: int, rows: int, length: int) -> dict[str, Array]:
    return {"x": torch.randint(0, 50, (rows, length), generator=torch.Generator().manual_seed(seed)).numpy()}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bench, ExportJob]:
    spec = spec_of(("length",), 50, "int64", length=Dim(2, 7, 20))
    batches = [ids(i, 8, 5 + i) for i in range(6)]
    return bench_of(Encoder(), spec, batches, tmp_path_factory.mktemp("encoder"))


def test_an_encoder_keeps_its_axes_and_its_embedding(encoder: tuple[Bench, ExportJob]) -> None:
    bench, job = encoder
    table = job.model.embedding.weight.detach().clone()  # type: ignore[operator, union-attr]
    trial = bench.attempt(DynamicInt8(reduce_range=REDUCED, smooth=0.6))
    assert trial.layers == ("query", "key", "value", "out", "up", "down", "head")
    details = bench.write(trial)
    assert details["int8"]["layers"] == 7
    call = opened(job, details)
    for rows, length in ((1, 2), (3, 20), (8, 7)):
        inputs = ids(90 + rows, rows, length)
        got, expected = call(inputs)["answer"], run_eager(job.model, job.spec, inputs)["answer"]
        assert got.shape == (rows, 50)
        assert cosine(got, expected) > 0.99
    torch.testing.assert_close(job.model.embedding.weight, table)  # type: ignore[union-attr]
    lookups = [node for node in bench._base(None, False).program.graph.nodes if "embedding" in str(node.target)]
    assert lookups, "the table is looked up in float32"


def test_smoothing_helps_where_a_channel_stands_out(encoder: tuple[Bench, ExportJob]) -> None:
    bench, job = encoder
    inputs = ids(77, 8, 9)
    expected = run_eager(job.model, job.spec, inputs)["answer"]
    plain, smoothed = (
        sqnr_db(bench.attempt(StaticInt8(reduce_range=False, smooth=alpha)).call(inputs)["answer"], expected)
        for alpha in (None, 0.6)
    )
    assert smoothed > plain + 3


def test_layers_that_share_an_input_share_its_quantization(encoder: tuple[Bench, ExportJob]) -> None:
    bench, _ = encoder
    program = bench._quantize(StaticInt8(smooth=0.6), frozenset()).program
    quantizers = [node for node in program.graph.nodes if "quantize_per_tensor.default" in str(node.target)]
    inputs = [node for node in quantizers if not str(node.target).startswith("quantized_decomposed.dequantize")]
    assert len(inputs) == 5  # one for query, key and value; out, up, down, head


def test_an_encoder_is_offered_smoothed_methods_first(encoder: tuple[Bench, ExportJob]) -> None:
    methods = encoder[0].methods()
    assert isinstance(methods[0], StaticInt8)
    assert methods[0].smooth is not None
    assert any(isinstance(method, DynamicInt8) for method in methods)


class MeanOfEmbeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.up, self.down = nn.Embedding(50, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.embedding(x).mean(1))))


@pytest.mark.parametrize("method", [StaticInt8(reduce_range=REDUCED), DynamicInt8(reduce_range=REDUCED)], ids=str)
def test_ids_stay_ids_and_the_batch_stays_dynamic(method: Int8Method, tmp_path: Path) -> None:
    spec = spec_of((6,), 4, "int64")
    bench, job = bench_of(MeanOfEmbeddings(), spec, [ids(i, 8, 6) for i in range(16)], tmp_path)
    trial = bench.attempt(method)
    assert trial.layers == ("up", "down")
    details = bench.write(trial)
    call = opened(job, details)
    for rows in (1, 3, 8):
        inputs = ids(rows, rows, 6)
        assert cosine(call(inputs)["answer"], run_eager(job.model, job.spec, inputs)["answer"]) >= 0.99


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.head = nn.LSTM(12, 16, batch_first=True), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def test_an_lstm_of_any_length_is_int8_around_its_recurrence(tmp_path: Path) -> None:
    spec = spec_of(("length", 12), 5, length=Dim(1, 7, 20))
    bench, job = bench_of(Recurrent(), spec, [{"x": seeded(i, 8, 7, 12)} for i in range(4)], tmp_path)
    trial = bench.attempt(DynamicInt8(reduce_range=REDUCED))
    assert trial.layers == ("lstm.weight_ih_l0", "head")
    details = bench.write(trial)
    assert details["int8"]["layers"] == 2
    call = opened(job, details)
    for rows, length in ((1, 1), (3, 20), (8, 7)):
        inputs = {"x": seeded(rows, rows, length, 12)}
        assert cosine(call(inputs)["answer"], run_eager(job.model, job.spec, inputs)["answer"]) > 0.99


def test_ranges_at_run_time_hold_zero(tmp_path: Path) -> None:
    """Inductor's own lowering takes a tensor of ones for a range of one value, and answers zeros."""
    layer = nn.Linear(64, 2, bias=False)
    nn.init.ones_(layer.weight)
    bench, job = bench_of(Around(layer), spec_of((64,), 2), [{"x": np.ones((4, 64), np.float32)}], tmp_path)
    details = bench.write(bench.attempt(DynamicInt8(reduce_range=REDUCED)))
    call = opened(job, details)
    for low in (0.0, 0.5, 1.0, 10.0):
        x = np.linspace(low, low + 0.1, 3 * 64, dtype=np.float32).reshape(3, 64)
        np.testing.assert_allclose(call({"x": x})["answer"], x.sum(1, keepdims=True).repeat(2, 1), rtol=0.01)
    np.testing.assert_array_equal(call({"x": np.zeros((3, 64), np.float32)})["answer"], 0)


# ------------------------------------------------------------------------------------------------------- hard numbers


class Spread(nn.Module):
    """Channels from 1 to 1e4 between two convolutions, undone by the second: in float nobody sees them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 6, 3)
        scale = torch.logspace(0, 4, 16)
        with torch.no_grad():
            self.first.weight *= scale.reshape(-1, 1, 1, 1)
            self.first.bias *= scale
            self.second.weight /= scale.reshape(1, -1, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x))).mean((2, 3))


def test_equalisation_mends_channels_that_differ_by_ten_thousand(tmp_path: Path) -> None:
    bench, job = bench_of(Spread(), spec_of((3, 12, 12), 6), IMAGES, tmp_path, "exported")
    inputs = {"x": seeded(33, 8, 3, 12, 12)}
    expected = run_eager(job.model, job.spec, inputs)["answer"]
    plain = sqnr_db(bench.attempt(STATIC).call(inputs)["answer"], expected)
    assert any(isinstance(method, StaticInt8) and method.equalize for method in bench.methods())
    mended = sqnr_db(bench.attempt(StaticInt8(reduce_range=False, equalize=True)).call(inputs)["answer"], expected)
    assert plain < 15
    assert mended > plain + 10


def test_rows_of_a_weight_that_differ_by_ten_thousand_keep_their_own_scales(tmp_path: Path) -> None:
    layer = nn.Linear(32, 6)
    with torch.no_grad():
        layer.weight *= torch.logspace(-8, -4, 6).reshape(-1, 1)
        layer.bias.zero_()
    bench, job = bench_of(Around(layer), spec_of((32,), 6), [{"x": seeded(0, 32, 32)}], tmp_path, "exported")
    inputs = {"x": seeded(1, 32, 32)}
    got = bench.attempt(StaticInt8()).call(inputs)["answer"]
    expected = run_eager(job.model, job.spec, inputs)["answer"]
    for column in range(6):
        assert sqnr_db(got[:, column], expected[:, column]) > 25


def test_bias_correction_takes_back_what_rounding_adds(tmp_path: Path) -> None:
    torch.manual_seed(3)
    layer = nn.Linear(64, 16)
    data = [{"x": 3 + seeded(i, 32, 64)} for i in range(4)]
    bench, job = bench_of(Around(layer), spec_of((64,), 16), data, tmp_path, "exported")
    inputs = {"x": 3 + seeded(40, 32, 64)}
    expected = run_eager(job.model, job.spec, inputs)["answer"]
    plain, corrected = (
        np.abs((bench.attempt(StaticInt8(correct_bias=on)).call(inputs)["answer"] - expected).mean(0)).mean()
        for on in (False, True)
    )
    assert corrected < plain / 2


def test_an_outlier_of_a_thousand_is_seen_in_the_error(tmp_path: Path) -> None:
    layer = nn.Linear(32, 4)
    outlier = seeded(0, 16, 32)
    outlier[0, 0] = 1000
    bench, job = bench_of(Around(layer), spec_of((32,), 4), [{"x": outlier}], tmp_path, "exported")
    inputs = {"x": seeded(1, 16, 32)}
    expected = run_eager(job.model, job.spec, inputs)["answer"]
    assert sqnr_db(bench.attempt(STATIC).call(inputs)["answer"], expected) < 10
    assert sqnr_db(bench.attempt(StaticInt8("percentile")).call(inputs)["answer"], expected) < 45


def test_a_layer_that_calibration_feeds_zeros_stays_float(tmp_path: Path) -> None:
    class Dead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.live, self.dead = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.live(x) + self.dead(torch.relu(x - 100))

    bench, _ = bench_of(Dead(), spec_of((8,), 4), [{"x": seeded(0, 16, 8)}], tmp_path, "exported")
    trial = bench.attempt(STATIC)
    assert trial.layers == ("live",)
    assert trial.notes == ("kept in float, since calibration gives them nothing but zeros: dead",)
    far = {"x": np.full((2, 8), 150, np.float32)}
    assert np.isfinite(trial.call(far)["answer"]).all()


def test_infinity_inside_the_model_is_refused_by_the_name_of_its_place(tmp_path: Path) -> None:
    class Overflow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.nan_to_num(self.layer((1e30 * x).pow(2)))

    bench, _ = bench_of(Overflow(), spec_of((8,), 4), [{"x": seeded(0, 16, 8)}], tmp_path, "exported")
    with pytest.raises(ExportError, match="'pow_1' inside the model is not finite on calibration data"):
        bench.attempt(STATIC)


# ---------------------------------------------------------------------------------------------------------- end to end


@pytest.fixture(scope="module")
def digits_data() -> tuple[Calibration, Callable[[Callable[[Arrays], Mapping[str, Array]]], float]]:
    """Calibration images, and accuracy over 600 others."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images / 16).astype(np.float32)[:, None]
    batches = tuple({"image": images[start : start + 50]} for start in range(0, 400, 50))

    def accuracy(call: Callable[[Arrays], Mapping[str, Array]]) -> float:
        parts = range(1000, 1600, 60)
        hits = [
            call({"image": images[at : at + 60]})["logits"].argmax(1) == digits.target[at : at + 60] for at in parts
        ]
        return float(np.concatenate(hits).mean())

    return Calibration("digits", "0" * 64, 400, batches, ()), accuracy


@pytest.mark.parametrize("name", ["exported", "aoti"])
def test_digits_lose_at_most_half_a_point(
    name: str, digits_checkpoint: Checkpoint, digits_data: tuple[Any, Any], tmp_path: Path
) -> None:
    calibration, accuracy = digits_data
    target = Target(name, precision="int8")
    bundle, _ = export(digits_checkpoint, target, tmp_path, int8=Int8(calibration, keep_slow=True))
    assert bundle.manifest.details["int8"]["layers"] >= 1
    model = digits_checkpoint.build()
    eager = accuracy(lambda arrays: run_eager(model, digits_checkpoint.spec, arrays))
    with open_bundle(bundle) as run:
        assert accuracy(run) >= eager - 0.005
