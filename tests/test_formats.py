"""One contract over the table: whatever a format is, its artifact answers what the eager model answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deployer.checkpoint import Checkpoint
from deployer.checkpoint.eager import run_eager
from deployer.errors import ExportError, MachineError, NotBuiltYetError, RequestError, UsageError
from deployer.export import export
from deployer.formats import FORMATS, PRECISIONS, Target, get_format
from deployer.formats.traceable import example_sizes
from deployer.runtime import open_bundle
from deployer.spec import Array, Dim, ModelSpec, TensorSpec
from deployer.validate import validate
from tests.models import (
    BakedBatch,
    Branch,
    Detections,
    ManyOutputs,
    Mutates,
    ScalarOutput,
    Scale,
    SequenceFirst,
    checkpoint_of,
)

QUICK = ("torchscript", "exported", "onnx")
BUILT = [name for name, record in FORMATS.items() if "cpu" in record.devices]


def bundle_of(name: str, bundles: Mapping[str, Path], aoti: Path) -> Path:
    return aoti if name == "aoti" else bundles[name]


@pytest.mark.parametrize("name", BUILT)
@pytest.mark.parametrize("batch", [1, 2, 3, 7, 32])
def test_one_artifact_answers_every_batch_as_eager_does(
    name: str,
    batch: int,
    digits_bundles: Mapping[str, Path],
    digits_aoti: Path,
    digits_checkpoint: Checkpoint,
    digits_images: Array,
) -> None:
    images = {"image": digits_images[:batch]}
    expected = run_eager(digits_checkpoint.build(), digits_checkpoint.spec, images)["logits"]
    with open_bundle(bundle_of(name, digits_bundles, digits_aoti)) as run:
        got = run(images)["logits"]
    assert got.dtype == expected.dtype
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(got.argmax(1), expected.argmax(1))


@pytest.mark.parametrize("name", BUILT)
def test_what_the_spec_does_not_allow_never_reaches_the_artifact(
    name: str, digits_bundles: Mapping[str, Path], digits_aoti: Path, digits_images: Array
) -> None:
    beyond = np.concatenate([digits_images, digits_images, digits_images[:1]])  # 65 where 64 is the most
    with open_bundle(bundle_of(name, digits_bundles, digits_aoti)) as run:
        for wrong in (
            {"image": beyond},
            {"image": digits_images[:0]},
            {"image": digits_images.astype(np.float64)},
            {"image": digits_images[:, :, :7]},
            {"picture": digits_images},
            {},
        ):
            with pytest.raises(RequestError):
                run(wrong)
        assert run({"image": digits_images[:2]})["logits"].shape == (2, 10)  # and still answers


@pytest.mark.parametrize("name", BUILT)
def test_strides_do_not_matter_and_inputs_stay_as_they_were(
    name: str, digits_bundles: Mapping[str, Path], digits_aoti: Path, digits_images: Array
) -> None:
    plain = np.ascontiguousarray(digits_images[:4])
    transposed = np.ascontiguousarray(plain.transpose(0, 1, 3, 2)).transpose(0, 1, 3, 2)
    assert not transposed.flags.c_contiguous
    with open_bundle(bundle_of(name, digits_bundles, digits_aoti)) as run:
        expected = run({"image": plain})["logits"]
        np.testing.assert_array_equal(run({"image": transposed})["logits"], expected)
        np.testing.assert_array_equal(
            run({"image": plain[::-1]})["logits"], run({"image": plain[::-1].copy()})["logits"]
        )
    np.testing.assert_array_equal(plain, digits_images[:4])


@pytest.mark.parametrize("name", QUICK)
def test_named_outputs_keep_names_order_and_dtypes(name: str, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(ManyOutputs)
    assert [tensor.name for tensor in checkpoint.spec.outputs] == ["total", "any", "nested.mean"]
    bundle, _ = export(checkpoint, Target(name), tmp_path)
    with open_bundle(bundle) as run:
        for batch, length in ((1, 1), (2, 3), (3, 7), (16, 12)):
            ids = np.arange(batch * length).reshape(batch, length)
            mask = np.ones_like(ids)
            got = run({"ids": ids, "mask": mask})
            assert list(got) == ["total", "any", "nested.mean"]
            assert [array.dtype.name for array in got.values()] == ["int64", "bool", "float32"]
            np.testing.assert_array_equal(got["total"], ids.sum(1))
            np.testing.assert_allclose(got["nested.mean"], ids.mean(1), rtol=1e-6)
            assert got["any"].all()


@pytest.mark.parametrize("name", QUICK)
def test_a_batch_on_axis_one_is_dynamic(name: str, tmp_path: Path) -> None:
    bundle, report = export(checkpoint_of(SequenceFirst), Target(name), tmp_path)
    assert report.batch_independent
    with open_bundle(bundle) as run:
        x = np.random.default_rng(0).normal(size=(5, 7, 4)).astype(np.float32)
        np.testing.assert_allclose(run({"x": x})["output"], x.cumsum(0), rtol=1e-6)


@pytest.mark.parametrize("name", QUICK)
def test_outputs_without_a_batch_axis_may_be_empty(name: str, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(Detections)
    assert checkpoint.spec.outputs[0].shape == ("?", 5)
    bundle, report = export(checkpoint, Target(name), tmp_path)
    assert not report.batch_independent
    with open_bundle(bundle) as run:
        assert run({"boxes": np.full((4, 5), 0.1, np.float32)})["output"].shape == (0, 5)
        assert run({"boxes": np.full((4, 5), 0.9, np.float32)})["output"].shape == (4, 5)


@pytest.mark.parametrize("name", QUICK)
def test_a_model_that_writes_into_its_input_harms_nobody(name: str, tmp_path: Path) -> None:
    bundle, _ = export(checkpoint_of(Mutates), Target(name), tmp_path)
    ones = np.ones((2, 3), np.float32)
    with open_bundle(bundle) as run:
        for _ in range(3):
            got = run({"x": ones})
            assert [float(array.max()) for array in got.values()] == [2.0, 3.0]
    assert ones.max() == 1.0


def test_a_batch_read_as_a_number_is_right_or_refused_never_frozen(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(BakedBatch)
    bundle, _ = export(checkpoint, Target("torchscript"), tmp_path)
    assert bundle.manifest.details == {"method": "script"}  # a trace would hold the batch as a constant
    with open_bundle(bundle) as run:
        for batch in (1, 3, 8, 16):
            x = np.zeros((batch, 3), np.float32)
            np.testing.assert_array_equal(run({"x": x})["output"], x + 1)
    for name in ("exported", "onnx"):
        bundle, _ = export(checkpoint, Target(name), tmp_path)
        assert bundle.manifest.details["tracing"] == "strict"  # plain torch.export fixes the batch to 4
        assert "fixes the dynamic axis 'batch' to 4" in bundle.manifest.details["notes"][0]


def test_a_branch_on_values_is_scripted_by_torchscript_and_refused_elsewhere(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint = checkpoint_of(Branch)
    bundle, _ = export(checkpoint, Target("torchscript"), tmp_path)
    assert bundle.manifest.details == {"method": "script"}
    with open_bundle(bundle) as run:
        assert run({"x": np.full((2, 3), 0.1, np.float32)})["output"].max() == np.float32(0.2)
        assert run({"x": np.full((2, 3), 100, np.float32)})["output"].max() == 90.0
    for name in ("exported", "onnx", "aoti"):
        with pytest.raises(ExportError, match="control flow that depends on tensor values"):
            export(checkpoint, Target(name), tmp_path)
    assert "def forward" not in capfd.readouterr().err  # torch.export's half graph is for the debug log


@pytest.mark.parametrize("name", QUICK)
def test_scalars_and_an_output_named_as_an_input(name: str, tmp_path: Path) -> None:
    bundle, _ = export(checkpoint_of(ScalarOutput), Target(name), tmp_path)
    assert validate(bundle.path).passed  # what was written reads back as it was
    with open_bundle(bundle) as run:
        got = run({"x": np.ones((2, 3), np.float32), "gain": np.array(3, np.float32)})
        assert got["x"].tolist() == [[3.0] * 3] * 2
        assert (got["total"].shape, float(got["total"])) == ((), 6.0)


def test_onnx_axes_carry_the_names_of_the_spec(digits_bundles: Mapping[str, Path]) -> None:
    import onnx

    model = onnx.load(digits_bundles["onnx"] / "model.onnx")
    axes = [axis.dim_param or axis.dim_value for axis in model.graph.input[0].type.tensor_type.shape.dim]
    assert axes == ["batch", 1, 8, 8]
    assert model.graph.output[0].type.tensor_type.shape.dim[0].dim_param == "batch"


def test_aoti_loads_in_a_process_without_compiler_and_model_code(
    digits_aoti: Path, digits_images: Array, tmp_path: Path
) -> None:
    np.save(tmp_path / "x.npy", digits_images[:5])
    code = (
        "import sys, shutil, numpy as np; from deployer import open_bundle\n"
        "assert not any(shutil.which(name) for name in ('g++', 'gcc', 'clang', 'cc'))\n"
        f"with open_bundle({str(digits_aoti)!r}) as run: print(run({{'image': np.load('x.npy')}})['logits'].tolist())\n"
    )
    environment = {key: value for key, value in os.environ.items() if key not in ("CC", "CXX")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment | {"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with open_bundle(digits_aoti) as run:
        np.testing.assert_array_equal(
            np.array(json.loads(done.stdout), np.float32), run({"image": digits_images[:5]})["logits"]
        )


def test_compiled_program_passes_the_gate_and_says_how_it_runs(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(Scale)
    bundle, report = export(checkpoint, Target("exported", compile="reduce-overhead"), tmp_path)
    assert bundle.path.name == "scale-exported-fp32-reduce-overhead"
    assert report.engine == "torch.compile (reduce-overhead) CPU"
    assert "CUDA graphs" in bundle.manifest.details["notes"][0]


@pytest.mark.parametrize("precision", [precision for precision in PRECISIONS if precision != "fp32"])
def test_what_is_not_built_says_so(precision: str) -> None:
    for name, record in FORMATS.items():
        if precision not in record.precisions:
            with pytest.raises(NotBuiltYetError, match="not built yet"):
                record.check_target(Target(name, precision, record.devices[0]))


def test_compile_modes_that_do_not_go_with_a_format_are_refused() -> None:
    for name, mode in (("onnx", "default"), ("torchscript", "max-autotune"), ("aoti", "reduce-overhead")):
        with pytest.raises(UsageError, match=mode):
            get_format(name).check_target(Target(name, compile=mode))


def test_a_missing_package_is_named_with_its_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    real = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "tensorrt_rtx" else real(name))
    with pytest.raises(MachineError, match=r"tensorrt_rtx.*pip install 'deployer\[trt-rtx\]'") as caught:
        get_format("trt").check_target(Target("trt", device="cuda", builder="onnx-rtx"))
    assert caught.value.exit_code == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device answers here")
@pytest.mark.parametrize("target", [
    Target("onnx", device="cuda"), Target("onnx", device="tensorrt"), Target("trt", device="cuda", builder="torch-trt"),
], ids=lambda target: target.slug)  # fmt: skip
def test_a_gpu_that_is_not_there_is_told_before_any_work(target: Target) -> None:
    with pytest.raises(MachineError, match=r"without CUDA|no CUDA device") as caught:
        get_format(target.format).check_target(target)
    assert caught.value.exit_code == 4
    assert caught.value.reason == "no_gpu"
    assert "torch_tensorrt" not in sys.modules


@pytest.mark.parametrize(("target", "words"), [
    (Target("onnx", builder="onnx-rtx"), "it takes no --builder"),
    (Target("onnx", gpu_archs=("sm86",)), "it takes no --gpu-arch"),
    (Target("trt", device="cuda", builder="onnx-rtc"), "did you mean 'onnx-rtx'"),
    (Target("trt", device="cuda", gpu_archs=("sm90",)), "valid: sm75, sm80, sm86, sm89, sm120, sm121"),
    (Target("trt", device="cuda", compile="default"), "it takes no --compile"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_words_that_do_not_go_with_a_format_are_refused(target: Target, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        get_format(target.format).check_target(target)


def test_an_engine_is_for_a_gpu_and_says_so() -> None:
    with pytest.raises(NotBuiltYetError, match=r"--device cpu is not built yet for 'trt' \(built: cuda\)"):
        get_format("trt").check_target(Target("trt"))


def test_an_unknown_format_gets_the_nearest_name() -> None:
    with pytest.raises(UsageError, match="did you mean 'onnx'"):
        get_format("onxx")


@given(
    limits=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 8)), min_size=1, max_size=3),
    fixed=st.lists(st.integers(1, 9), max_size=4),
)
def test_an_example_is_legal_and_has_one_entry_only_where_no_more_are(
    limits: list[tuple[int, int]], fixed: list[int]
) -> None:
    dims = {f"d{i}": Dim(low, low + more, low + more) for i, (low, more) in enumerate(limits)}
    spec = ModelSpec("m", (TensorSpec("x", "float32", (*dims, *fixed)),), dims=dims)
    for name, size in example_sizes(spec).items():
        assert dims[name].min <= size <= dims[name].max
        assert size >= 2 or dims[name].max == 1


def test_examples_have_two_rows_or_more_though_every_larger_size_is_taken() -> None:
    """Traced with one row, an exporter fixes the batch to one."""
    shape = TensorSpec("x", "float32", ("batch", 4, 5, 6))
    assert example_sizes(ModelSpec("taken", (shape,), dims={"batch": Dim(1, 3, 6)}, batch="batch")) == {"batch": 2}
    only_one = ModelSpec("one", (TensorSpec("x", "float32", ("batch", 3)),), dims={"batch": Dim(1, 1, 1)})
    assert example_sizes(only_one) == {"batch": 1}
