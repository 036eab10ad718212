"""INT8 from calibration data to a gated bundle, and every way in which it may be turned away."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from deployer import int8 as int8_module
from deployer import runtime as runtime_module
from deployer.bench.inprocess import bench_bundle
from deployer.bundle import read_bundle, write_manifest
from deployer.checkpoint import Checkpoint, load_checkpoint
from deployer.checkpoint.eager import run_eager
from deployer.errors import GateError, MachineError, SampleError, UsageError
from deployer.export import current_bundle, export, export_all
from deployer.formats import FORMATS, Loaded, LoadJob, Target
from deployer.inspection import inspect
from deployer.int8 import Int8
from deployer.package.probe import judge, make_probes
from deployer.quantize.calibration import Calibration, make_calibration
from deployer.quantize.config import DynamicInt8, Int8Method, StaticInt8
from deployer.quantize.score import FLOORS, Call, Metric
from deployer.quantize.speed import Speed
from deployer.runtime import open_bundle, preflight
from deployer.spec import Array, Arrays, Dim, ModelSpec, TensorSpec
from deployer.validate import (
    TOLERANCES,
    Reference,
    compare,
    localize,
    make_reference,
    read_report,
    run_gate,
    validate,
)
from tests import fake_quantized
from tests.fake_quantized import FakeBench
from tests.test_cli import assert_one_line_error, deployer

export_module = sys.modules["deployer.export"]  # the name `deployer.export` is the function

FAST = Speed({"batch": 8}, 2.0, 1.0, 2.0, 1.9, 2.1, 15)
SLOW = Speed({"batch": 8}, 1.0, 1.02, 0.98, 0.95, 1.01, 15)
TARGET = Target("fake", "int8")


def digits_split() -> tuple[dict[str, Array], tuple[Array, Array]]:
    """Images that the network was trained on, for calibration, and the held-out ones with their labels."""
    digits = load_digits()
    images = digits.images.astype(np.float32)[:, None] / 16
    train, test = train_test_split(range(len(images)), test_size=0.2, random_state=0, stratify=digits.target)
    return {"image": images[train[:200]]}, (images[test], digits.target[test])


def accuracy(predict: Call) -> float:
    _, (images, labels) = digits_split()
    return float(np.mean(predict({"image": images})["logits"].argmax(1) == labels))


@pytest.fixture(scope="module")
def digits_calibration(digits_checkpoint: Checkpoint) -> Calibration:
    return make_calibration("digits", iter([digits_split()[0]]), digits_checkpoint.spec)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """The format of pickled modules among the formats, and a speed that is not this machine's."""
    monkeypatch.setitem(FORMATS, "fake", fake_quantized.FORMAT)
    monkeypatch.setattr(int8_module, "measure_speed", lambda *arguments, **options: FAST)


def offer(monkeypatch: pytest.MonkeyPatch, *methods: Int8Method, bench: type[FakeBench] = FakeBench) -> None:
    """Let the format offer these methods alone."""
    record = replace(fake_quantized.FORMAT, workbench=lambda job, calibration: bench(job, calibration, methods))
    monkeypatch.setitem(FORMATS, "fake", record)


@pytest.mark.usefixtures("fake")
def test_a_digits_bundle_and_all_that_reads_it(
    digits_checkpoint: Checkpoint,
    digits_reference: Reference,
    digits_calibration: Calibration,
    tmp_path: Path,
) -> None:
    asked = Int8(digits_calibration, Metric("tests:accuracy", "0", accuracy), max_drop=0.005)
    bundle, report = export(digits_checkpoint, TARGET, tmp_path, reference=digits_reference, int8=asked)
    assert bundle.path.name == "digits-fake-int8"
    found = bundle.manifest.details["int8"]
    assert found["method"].startswith("static")
    assert found["layers"] == len(found["quantized"]) == 4
    assert found["kept_float"] == []
    assert found["metric_fp32"] - found["written"]["metric"] <= 0.005
    assert found["request"]["calibration_sha256"] == digits_calibration.sha256
    assert found["request"]["samples"] == 200
    assert found["speed"]["ratio"] == 2.0
    assert {row["method"] for row in found["tried"]} == {
        "static min-max",
        "static percentile",
        "dynamic",
        "weight-only",
    }
    # the report: floors, not tolerances; stress held to structure; every size answered; refusals refused
    assert report.floors is not None
    assert report.tolerance is None
    kinds = {check.kind for check in report.checks}
    assert kinds == {"answer", "structure", "refusal"}
    answers = [check for check in report.checks if check.kind == "answer"]
    assert all(check.sqnr_db is not None and check.sqnr_db > 10 for check in answers)
    assert any(check.max_abs > 1e-3 for check in answers), "eight bits leave a trace"
    assert {check.case for check in answers} >= {"batch=1", "batch=2", "batch=64", "samples", "non-contiguous"}
    assert report.batch_independent
    assert read_report(bundle) == report
    line = inspect(bundle.path).facts["int8"]
    assert line.startswith("static")
    assert "4 layers in int8, 0 kept in float" in line
    assert "2.00× fp32" in line
    # validate, bench and the package's probes take the bundle
    assert validate(bundle.path).passed
    assert validate(bundle.path, checkpoint=digits_checkpoint).passed
    rows = bench_bundle(bundle.path, batch_sizes=[1, 8], duration_s=0.05, min_runs=2).rows
    assert [row.batch_size for row in rows] == [1, 8]
    with open_bundle(bundle) as runner:
        for probe, row in zip(make_probes(bundle), bundle.samples()[0]["image"], strict=False):
            answer = {"logits": runner({"image": row[None]})["logits"][0]}
            body, content_type = _encoded(answer)
            assert judge(probe, bundle, 200, body, content_type) == ""
            body, content_type = _encoded({"logits": answer["logits"] * 0})
            assert "SQNR" in judge(probe, bundle, 200, body, content_type)
    with pytest.raises(UsageError, match="INT8, which departs at every layer"):
        localize(bundle.path, report, digits_checkpoint)


def _encoded(outputs: Arrays) -> tuple[bytes, str]:
    document = {"outputs": {name: array.tolist() for name, array in outputs.items()}}
    return json.dumps(document).encode(), "application/json"


@pytest.mark.usefixtures("fake")
def test_reuse_looks_at_calibration_metric_and_drop(
    digits_checkpoint: Checkpoint,
    digits_reference: Reference,
    digits_calibration: Calibration,
    tmp_path: Path,
) -> None:
    asked = Int8(digits_calibration)
    export(digits_checkpoint, TARGET, tmp_path, reference=digits_reference, int8=asked)

    def kept(other: Int8) -> bool:
        return current_bundle(digits_checkpoint, TARGET, tmp_path, int8=other) is not None

    assert kept(asked)
    (outcome,) = export_all(digits_checkpoint, [TARGET], tmp_path, reuse=True, int8=asked)
    assert outcome.bundle is not None
    fewer = {"image": digits_split()[0]["image"][:100]}
    assert not kept(Int8(make_calibration("digits", iter([fewer]), digits_checkpoint.spec)))
    metric = Metric("tests:accuracy", "0", accuracy)
    assert not kept(Int8(digits_calibration, metric))
    assert not kept(Int8(digits_calibration, keep_slow=True))
    export(digits_checkpoint, TARGET, tmp_path, reference=digits_reference, int8=Int8(digits_calibration, metric))
    assert kept(Int8(digits_calibration, metric))
    assert not kept(Int8(digits_calibration, metric, max_drop=0.02))
    assert not kept(Int8(digits_calibration, Metric("tests:accuracy", "1", accuracy)))


@pytest.mark.usefixtures("fake")
def test_what_is_not_faster_is_rejected_with_both_figures_unless_kept(
    digits_checkpoint: Checkpoint,
    digits_reference: Reference,
    digits_calibration: Calibration,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(int8_module, "measure_speed", lambda *arguments, **options: SLOW)
    offer(monkeypatch, StaticInt8(), DynamicInt8())
    with pytest.raises(GateError) as caught:
        export(digits_checkpoint, TARGET, tmp_path, reference=digits_reference, int8=Int8(digits_calibration))
    error = caught.value
    assert error.reason == "not_faster"
    assert error.exit_code == 1
    assert str(error).count("--keep-slow") == 1
    for words in (
        "INT8 is not faster than fp32: static",
        "1.02 ms in INT8",
        "1 ms in fp32",
        "0.98×",
        "0.95 to 1.01",
        "--keep-slow",
        "static",
        "dynamic",
    ):
        assert words in str(error)
    rejected = read_bundle(tmp_path / "digits-fake-int8.rejected")
    assert not rejected.manifest.passed
    assert rejected.manifest.details["int8"]["speed"]["ratio"] == 0.98
    assert not (tmp_path / "digits-fake-int8").exists()
    keep = Int8(digits_calibration, keep_slow=True)
    bundle, report = export(digits_checkpoint, TARGET, tmp_path, reference=digits_reference, int8=keep)
    assert report.passed
    assert bundle.manifest.details["int8"]["method"].startswith("static")
    assert bundle.manifest.details["int8"]["speed"]["ratio"] == 0.98
    assert not (tmp_path / "digits-fake-int8.rejected").exists()


@pytest.mark.usefixtures("fake")
def test_a_slow_kind_gives_way_to_a_fast_one(
    digits_checkpoint: Checkpoint,
    digits_reference: Reference,
    digits_calibration: Calibration,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    speeds = iter([SLOW, FAST])
    monkeypatch.setattr(int8_module, "measure_speed", lambda *arguments, **options: next(speeds))
    offer(monkeypatch, StaticInt8(), DynamicInt8())
    bundle, _ = export(digits_checkpoint, TARGET, tmp_path, reference=digits_reference, int8=Int8(digits_calibration))
    assert bundle.manifest.details["int8"]["method"] == "dynamic"


# ------------------------------------------------------------------------------------------------------ models of tests


class Outlier(nn.Module):
    """x (batch, 3) → 15·(x₀ + x₁ + x₂) by three layers; the activations of the middle one hold a constant 1000.

    In int8 the steps of that range are 4 wide: everything else rounds to 0, and so does the answer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(3, 3), nn.Linear(4, 3), nn.Linear(3, 1)
        with torch.no_grad():
            for layer in (self.first, self.middle, self.last):
                layer.bias.zero_()
            self.first.weight.copy_(torch.eye(3))
            self.middle.weight.copy_(torch.eye(3, 4))
            self.last.weight.fill_(15.0)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        x = torch.relu(self.middle(torch.cat([x, torch.full_like(x[:, :1], 1000.0)], 1)))
        return self.last(x)


class Plain(nn.Module):
    """x (batch, 3) → 2 values of each row, by two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


_ROWS = np.random.default_rng(0).random((64, 3), np.float32)


def checkpoint_of(kind: type[nn.Module]) -> Checkpoint:
    spec = ModelSpec(
        kind.__name__.lower(),
        (TensorSpec("x", "float32", ("batch", 3)),),
        dims={"batch": Dim(1, 4, 16)},
        batch="batch",
    )
    return load_checkpoint(model=f"{__file__}:{kind.__name__}", spec=spec, samples={"x": _ROWS[:8]})


def calibration_of(checkpoint: Checkpoint) -> Calibration:
    return make_calibration("rows", iter([{"x": _ROWS}]), checkpoint.spec)


@pytest.mark.usefixtures("fake")
def test_an_outlier_of_1000_is_seen_and_its_layer_kept_in_float(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(monkeypatch, StaticInt8())
    checkpoint = checkpoint_of(Outlier)
    bundle, _ = export(checkpoint, TARGET, tmp_path, int8=Int8(calibration_of(checkpoint)))
    found = bundle.manifest.details["int8"]
    assert found["kept_float"] == ["middle"]
    assert found["layers"] == 2
    assert found["damage"][0]["layers"] == ["middle"]
    assert not found["whole_model"]["passed"]
    assert found["whole_model"]["sqnr_db"] < 3
    assert found["written"]["sqnr_db"] > 30
    with open_bundle(bundle) as runner:
        ones = np.full((1, 3), 1 / 3, np.float32)
        assert runner({"x": ones})["output"] == pytest.approx(15, rel=0.02)


@pytest.mark.parametrize("name", ["onnx", "exported"])
def test_an_outlier_of_1000_does_not_ship_as_zeros(tmp_path: Path, name: str) -> None:
    """With the formats' own methods: smoothing mends it in one, the layer goes back to float in the other."""
    checkpoint = checkpoint_of(Outlier)
    asked = Int8(calibration_of(checkpoint), keep_slow=True)
    bundle, _ = export(checkpoint, Target(name, "int8"), tmp_path, int8=asked)
    with open_bundle(bundle) as runner:
        ones = np.full((1, 3), 1 / 3, np.float32)
        assert runner({"x": ones})["output"] == pytest.approx(15, rel=0.02)
    tried = bundle.manifest.details["int8"]["tried"]
    assert any(row["sqnr_db"] < 13 and not row["passed"] for row in tried), "the plain methods lose the answer"


@pytest.mark.usefixtures("fake")
def test_where_nothing_stays_quantized_there_is_no_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, StaticInt8())
    checkpoint = checkpoint_of(Plain)
    exact = Metric("tests:exact", "0", lambda predict: -float(np.abs(predict({"x": _ROWS})["output"]).sum()))
    with pytest.raises(GateError, match="no INT8 version of the model is accurate enough") as caught:
        export(checkpoint, TARGET, tmp_path, int8=Int8(calibration_of(checkpoint), exact, max_drop=-1e9))
    assert caught.value.reason == "accuracy_lost"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("fake")
def test_ranges_taken_at_run_time_make_a_batch_dependent_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = checkpoint_of(Plain)
    asked = Int8(calibration_of(checkpoint))
    offer(monkeypatch, DynamicInt8())
    bundle, report = export(checkpoint, TARGET, tmp_path, int8=asked)
    assert make_reference(checkpoint).batch_independent
    assert not bundle.manifest.batch_independent
    assert "INT8: a row" in bundle.manifest.batch_reason
    assert "moves by" in report.batch_reason
    assert not validate(bundle.path, checkpoint=checkpoint).batch_independent
    offer(monkeypatch, StaticInt8())
    bundle, _ = export(checkpoint, TARGET, tmp_path, int8=asked)
    assert bundle.manifest.batch_independent


@pytest.mark.usefixtures("fake")
def test_what_is_written_is_scored_and_not_what_was_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A format that writes another model than it tried: seen, rejected, kept apart with its figures."""

    class Liar(FakeBench):
        def write(self, trial: Any) -> dict[str, Any]:
            with torch.no_grad():
                trial.model.layers[2].layer.weight.mul_(-1)
            return super().write(trial)

    offer(monkeypatch, StaticInt8(), bench=Liar)
    checkpoint = checkpoint_of(Plain)
    with pytest.raises(GateError, match="what was written is not accurate enough") as caught:
        export(checkpoint, TARGET, tmp_path, int8=Int8(calibration_of(checkpoint)))
    assert caught.value.reason == "accuracy_lost"
    found = read_bundle(tmp_path / "plain-fake-int8.rejected").manifest.details["int8"]
    assert found["simulated"]["passed"]
    assert not found["written"]["passed"]


@pytest.mark.usefixtures("fake")
def test_an_artifact_that_is_exact_elsewhere_is_not_opened_here(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(Plain)
    bundle, _ = export(checkpoint, TARGET, tmp_path, int8=Int8(calibration_of(checkpoint)))
    manifest = bundle.manifest
    details = {**manifest.details, "int8": {**manifest.details["int8"], "exact_on": ["no_such_feature", "nor_this"]}}
    write_manifest(bundle.path, msgspec.structs.replace(manifest, details=details))
    with pytest.raises(MachineError, match="has none of no_such_feature, nor_this"):
        preflight(read_bundle(bundle.path).manifest)


@pytest.mark.usefixtures("fake")
def test_int8_and_its_calibration_go_together(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(Plain)
    with pytest.raises(UsageError, match="--calibration"):
        export(checkpoint, TARGET, tmp_path)
    with pytest.raises(UsageError, match="goes with --precision int8"):
        export(checkpoint, Target("fake"), tmp_path, int8=Int8(calibration_of(checkpoint)))


@pytest.mark.usefixtures("fake")
def test_calibration_of_another_model_is_refused(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(Plain)
    other = ModelSpec("o", (TensorSpec("x", "float32", ("n", 2)),), dims={"n": Dim(1, 4, 16)}, batch="n")
    data = make_calibration("rows", iter([{"x": _ROWS[:, :2]}]), other)
    with pytest.raises(SampleError, match="does not fit the model"):
        export(checkpoint, TARGET, tmp_path, int8=Int8(data))


@pytest.mark.usefixtures("fake")
def test_what_cannot_be_executed_here_is_scored_by_its_stand_in_and_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(job: LoadJob) -> Loaded:
        raise AssertionError("the artifact cannot be opened here")

    record = replace(
        fake_quantized.FORMAT,
        devices=("cuda",),
        load=broken,
        stand_in=fake_quantized.FORMAT.load,
        workbench=lambda job, calibration: FakeBench(job, calibration, [StaticInt8()]),
    )
    monkeypatch.setitem(FORMATS, "fake", record)
    for module in (int8_module, runtime_module, export_module):
        monkeypatch.setattr(module, "device_fault", lambda target, details: "no GPU of a test")
    checkpoint = checkpoint_of(Plain)
    bundle, report = export(checkpoint, Target("fake", "int8", "cuda"), tmp_path, int8=Int8(calibration_of(checkpoint)))
    assert not bundle.manifest.executed
    assert report.passed
    found = bundle.manifest.details["int8"]
    assert found["speed"]["ratio"] is None
    assert found["speed"]["not_measured"] == "no GPU of a test"
    assert found["written"]["passed"]


# -------------------------------------------------------------------------------------------------------- the gate


def rounded(run: Call) -> Call:
    """Answers in steps of a 64th of their range: what eight bits do, in the rough."""
    return lambda arrays: {name: np.round(array * 32) / 32 for name, array in run(arrays).items()}


def changed(run: Call, change: Callable[[Array, Arrays], Array]) -> Call:
    return lambda arrays: {name: change(array, arrays) for name, array in run(arrays).items()}


FAULTS: dict[str, tuple[Callable[[Array, Arrays], Array], str]] = {
    "zeros": (lambda y, arrays: y * 0, "SQNR 0.0 dB"),
    "scale": (lambda y, arrays: y * 2, "SQNR"),
    "sign": (lambda y, arrays: -y, "cosine -0.99"),
    "rows turned round": (lambda y, arrays: y[::-1], "SQNR"),
    "large batch": (lambda y, arrays: y * (len(y) < 16), "batch=16"),
    "single row": (lambda y, arrays: y * (len(y) > 1), "batch=1"),
    "NaN when loud": (lambda y, arrays: y / (np.abs(arrays["x"]).max() < 100), "floats ×1000"),
    "dtype": (lambda y, arrays: y.astype(np.float64), "float64"),
    "shape": (lambda y, arrays: y[:, :1], "output"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_the_gate_sees_faults_in_int8(fault: str) -> None:
    checkpoint = checkpoint_of(Plain)
    reference = make_reference(checkpoint)
    run = rounded(partial(run_eager, checkpoint.build(), checkpoint.spec))
    healthy = run_gate(run, checkpoint.spec, checkpoint.samples, reference, "int8", "test")
    assert healthy.passed, healthy.reasons
    assert not run_gate(run, checkpoint.spec, checkpoint.samples, reference, "fp32", "test").passed
    change, words = FAULTS[fault]
    report = run_gate(changed(run, change), checkpoint.spec, checkpoint.samples, reference, "int8", "test")
    assert not report.passed
    assert any(words in reason for reason in report.reasons), report.reasons


def test_stress_is_held_to_structure_and_recorded() -> None:
    """Clipped far outside of the calibrated range: no fault, and seen in the figures."""
    checkpoint = checkpoint_of(Plain)
    reference = make_reference(checkpoint)
    run = partial(run_eager, checkpoint.build(), checkpoint.spec)
    clipped = changed(run, lambda y, arrays: np.clip(y, -1, 1))
    report = run_gate(clipped, checkpoint.spec, checkpoint.samples, reference, "int8", "test")
    assert report.passed, report.reasons
    (loud,) = [check for check in report.checks if check.case == "floats ×1000"]
    assert loud.kind == "structure"
    assert loud.max_abs > 15
    assert loud.sqnr_db is not None
    assert loud.sqnr_db < 3
    assert any("held to shape, dtype and finiteness" in note for note in report.notes)


def test_integers_may_differ_in_one_or_two_percent() -> None:
    expected = np.arange(100)
    got = expected.copy()
    got[:2] += 1
    assert compare("c", "ids", got, expected, FLOORS).passed
    assert not compare("c", "ids", got, expected, TOLERANCES["fp32"]).passed
    got[2] += 1
    found = compare("c", "ids", got, expected, FLOORS)
    assert "3 of 100 values differ" in found.reason
    assert "but for 2" in found.reason


def test_a_case_that_answers_near_zero_has_the_noise_of_the_others() -> None:
    expected, got = np.full((1, 4), 0.01, np.float32), np.full((1, 4), 0.03, np.float32)
    assert compare("c", "y", got, expected, FLOORS, usual_scale=1.0).passed
    assert "SQNR -6.0 dB" in compare("c", "y", got, expected, FLOORS).reason
    nan = np.array([[np.nan, 1, 1, 1]], np.float32)
    assert compare("c", "y", nan, nan, FLOORS).passed
    assert "NaN or infinite" in compare("c", "y", nan, expected, FLOORS, usual_scale=1.0).reason


# ------------------------------------------------------------------------------------------------------- command line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--calibration", "c.npz"], ["--calibration goes with --precision int8"]),
        (["--metric", "m.py:f"], ["--metric goes with --precision int8"]),
        (["--max-drop", "0.1"], ["--max-drop goes with --precision int8"]),
        (["--keep-slow"], ["--keep-slow goes with --precision int8"]),
    ],
    ids=lambda value: value[0],
)
def test_int8_flags_without_int8_are_usage_errors_before_any_work(
    tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    done = deployer("export", "absent.pt", "--format", "torchscript", *arguments, cwd=tmp_path)
    assert_one_line_error(done, 2, *words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--precision int8 needs real inputs", "--calibration"]),
        (["--calibration", "c.npz", "--max-drop", "0.1"], ["--max-drop is the drop of a metric"]),
        (["--calibration", "c.npz", "--metric", "m.py:f", "--max-drop", "-1"], ["--max-drop is -1.0"]),
        (["--calibration", "c.npz", "--metric", "accuracy"], ["'accuracy' is no code reference"]),
    ],
    ids=["no calibration", "drop of nothing", "negative drop", "no reference"],
)
def test_int8_without_what_it_needs_is_a_usage_error_before_any_work(
    tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    done = deployer("export", "absent.pt", "--format", "exported", "--precision", "int8", *arguments, cwd=tmp_path)
    assert_one_line_error(done, 2, *words)
    assert list(tmp_path.iterdir()) == []


_LABELLED = """
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

digits = load_digits()
images = digits.images.astype(np.float32)[:, None] / 16
train, test = train_test_split(range(len(images)), test_size=0.2, random_state=0, stratify=digits.target)

def calibration():
    for start in range(0, 120, 30):
        yield {"image": images[train[start:start + 30]]}

def accuracy(predict):
    return (predict({"image": images[test]})["logits"].argmax(1) == digits.target[test]).mean()

def bad():
    return {"image": images[:40, 0]}
"""


@pytest.mark.parametrize("name", ["onnx", "exported", "aoti"])
def test_the_digits_network_keeps_its_accuracy(digits_folder: Path, tmp_path: Path, name: str) -> None:
    """As a user types it, from the recipe: accuracy falls by half a point at most; kept though it may be slow."""
    (tmp_path / "labelled.py").write_text(_LABELLED)
    (tmp_path / "deployer.yaml").write_text(
        f"checkpoint: {digits_folder}\nexport:\n  formats: [{name}]\n  precision: int8\n"
        "  calibration: labelled.py:calibration\n  metric: labelled.py:accuracy\n  max_drop: 0.005\n  keep_slow: true\n"
    )
    done = deployer("export", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["targets"]
    found = row["int8"]
    assert row["target"] == f"{name}-int8"
    assert found["metric_fp32"] >= 0.97
    assert found["metric_fp32"] - found["written"]["metric"] <= 0.005
    assert found["layers"] >= 1
    assert found["speed"]["fp32_ms"] > 0
    assert found["request"]["samples"] == 120
    assert deployer("validate", row["bundle"], cwd=tmp_path).returncode == 0
    again = deployer("export", "--reuse", cwd=tmp_path)
    assert "is up to date; kept" in again.stderr
    assert "speed against fp32" in again.stdout
    done = deployer("export", "--calibration", "labelled.py:bad", cwd=tmp_path)
    assert_one_line_error(done, 2, "calibration sample 0 of 'labelled.py:bad'", "number of axes", "float32[40, 8, 8]")
