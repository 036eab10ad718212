"""A bundle measured in process: identities between the figures, and wrong answers that never become a number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from deployer.bench import BenchReport, bench, inprocess
from deployer.bench.inprocess import bench_bundle, device_name
from deployer.bundle import Bundle
from deployer.checkpoint import load_checkpoint
from deployer.errors import BundleError, GateError, MachineError, UsageError
from deployer.export import export
from deployer.formats import Target
from deployer.machine import cpu_name
from deployer.runtime import Runner, open_bundle
from deployer.spec import Array, Arrays, Dim, ModelSpec, TensorSpec

QUICK: dict[str, Any] = {"duration_s": 0.05, "min_runs": 5, "warmup_max_s": 1.0}


@pytest.mark.parametrize("name", ["torchscript", "exported", "onnx"])
def test_figures_of_a_bundle(digits_bundles: Mapping[str, Path], name: str) -> None:
    report = bench_bundle(digits_bundles[name], batch_sizes=[1, 7, 64], threads=1, **QUICK)
    assert report.passed
    assert report.open_s is not None
    assert report.open_s > 0
    assert [row.batch_size for row in report.rows] == [1, 7, 64]  # type: ignore[union-attr]
    for row in report.rows:
        assert isinstance(row, inprocess.InProcessRow)
        assert row.runs == row.latency.samples >= 5
        assert row.wall_s >= 0.05
        assert row.runs_per_s == pytest.approx(row.runs / row.wall_s)
        assert row.items_per_s == pytest.approx(row.runs * (row.batch_size or 1) / row.wall_s)
        assert row.latency.mean_ms is not None
        assert row.latency.mean_ms * row.runs <= row.wall_s * 1e3  # one caller: runs cannot overlap
        assert row.warmup.runs >= 2
        assert row.warmup.first_ms / 1e3 <= row.warmup.wall_s


def test_environment_says_what_ran_where(digits_bundles: Mapping[str, Path]) -> None:
    report = bench(digits_bundles["onnx"], batch_sizes=[2], threads=1, duration_s=0.02)
    assert report.environment.device == "cpu"
    assert report.environment.device_name == cpu_name()
    assert report.environment.engine is not None
    assert "onnxruntime" in report.environment.engine
    assert report.environment.threads == 1
    assert "onnxruntime" in report.environment.versions
    assert report.command == f"deployer bench {digits_bundles['onnx']} --batch-sizes 2 --duration-s 0.02 --threads 1"
    assert report.options["min_runs"] == 20


def test_report_survives_json(digits_bundles: Mapping[str, Path]) -> None:
    report = bench_bundle(digits_bundles["onnx"], batch_sizes=[1], **QUICK)
    document = msgspec.json.encode(report)
    assert msgspec.json.decode(document)["schema_version"] == 1
    assert msgspec.json.decode(document, type=BenchReport) == msgspec.convert(
        msgspec.to_builtins(report), type=BenchReport
    )


def test_default_batch_sizes(digits_bundles: Mapping[str, Path]) -> None:
    report = bench_bundle(digits_bundles["onnx"], **QUICK)
    assert [row.batch_size for row in report.rows] == [1, 8, 32]  # type: ignore[union-attr]


def test_few_runs_carry_a_note(digits_bundles: Mapping[str, Path]) -> None:
    report = bench_bundle(digits_bundles["onnx"], batch_sizes=[1], duration_s=1e-6, min_runs=5)
    assert any("5 samples are too few for" in note and "p99" in note for note in report.notes)


@contextmanager
def _wrong_after(calls: int, bundle: Bundle, **options: Any) -> Iterator[Runner]:
    """The bundle's own runner, whose answers are off by one from call number `calls` on."""
    with open_bundle(bundle, **options) as runner:
        inner: Callable[[Arrays], dict[str, Array]] = runner._call
        made = 0

        def call(arrays: Arrays) -> dict[str, Array]:
            nonlocal made
            made += 1
            return {name: array + (made > calls) for name, array in inner(arrays).items()}

        runner._call = call
        yield runner


@pytest.mark.parametrize("calls", [0, 12])
def test_a_wrong_answer_is_an_error(
    digits_bundles: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    monkeypatch.setattr(inprocess, "open_bundle", lambda bundle, **options: _wrong_after(calls, bundle, **options))
    with pytest.raises(GateError, match=r"wrong answer at batch=3, output 'logits'.*deployer validate") as caught:
        bench_bundle(digits_bundles["onnx"], batch_sizes=[3], **QUICK)
    assert caught.value.exit_code == 1


def test_thread_count_of_the_process_is_put_back(digits_bundles: Mapping[str, Path]) -> None:
    before = torch.get_num_threads()
    bench_bundle(digits_bundles["exported"], batch_sizes=[1], threads=before + 1, **QUICK)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_sizes": [65]}, "outside what the model takes"),
        ({"batch_sizes": [0]}, "--batch-sizes is"),
        ({"batch_sizes": []}, "--batch-sizes is"),
        ({"threads": 0}, "--threads is 0"),
        ({"duration_s": 0.0}, "--duration-s is 0"),
        ({"duration_s": float("nan")}, "--duration-s is nan"),
        ({"concurrency": [1]}, "--concurrency does not go with a bundle"),
        ({"input_path": "x.npy"}, "--input does not go with a bundle"),
        ({"token_file": "t"}, "--token-file does not go with a bundle"),
        ({"requests": 3}, "--requests does not go with a bundle"),
    ],
)
def test_bad_options_are_refused(digits_bundles: Mapping[str, Path], options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        bench(digits_bundles["onnx"], **options)


def test_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no bundle folder"):
        bench(tmp_path / "absent")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here; its name is then the right one")
def test_no_cpu_figure_under_a_gpus_name() -> None:
    with pytest.raises(MachineError, match="no figure is given under its name"):
        device_name("cuda")


_MODELS = """
import torch
from torch import nn

class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(dim=0, keepdim=True)

class Doubled(nn.Module):
    def forward(self, x):
        return x * 2
"""


def _small_bundle(tmp_path: Path, factory: str, spec: ModelSpec, samples: Arrays) -> Path:
    (tmp_path / "models.py").write_text(_MODELS)
    checkpoint = load_checkpoint(model=f"{tmp_path / 'models.py'}:{factory}", spec=spec, samples=samples)
    return export(checkpoint, Target("torchscript"), tmp_path / "out")[0].path


def test_rows_that_depend_on_each_other_are_checked_at_recorded_sizes(tmp_path: Path) -> None:
    spec = ModelSpec(
        "centred", (TensorSpec("x", "float32", ("n", 4)),), (TensorSpec("output", "float32", ("n", 4)),),
        {"n": Dim(1, 8, 16)}, batch="n",
    )  # fmt: skip
    samples = {"x": np.arange(48, dtype=np.float32).reshape(12, 4) / 48}
    path = _small_bundle(tmp_path, "Centred", spec, samples)
    report = bench_bundle(path, batch_sizes=[7, 16], **QUICK)
    assert [row.batch_size for row in report.rows] == [7, 16]  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="batch size 5 has no recorded reference"):
        bench_bundle(path, batch_sizes=[5], **QUICK)


def test_model_without_a_batch_axis(tmp_path: Path) -> None:
    spec = ModelSpec("doubled", (TensorSpec("x", "float32", (3, 4)),), (TensorSpec("output", "float32", (3, 4)),))
    path = _small_bundle(tmp_path, "Doubled", spec, {"x": np.arange(12, dtype=np.float32).reshape(3, 4)})
    row = bench_bundle(path, **QUICK).rows[0]
    assert isinstance(row, inprocess.InProcessRow)
    assert row.batch_size is None
    assert row.items_per_s == row.runs_per_s
    with pytest.raises(UsageError, match="has no batch axis"):
        bench_bundle(path, batch_sizes=[1])
