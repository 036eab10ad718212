"""An axis that a model fixes is named before anything is written: which, to what, and the line that did it."""

from __future__ import annotations

import linecache
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from deployer.checkpoint import Checkpoint, load_checkpoint
from deployer.errors import ExportError, ModelError
from deployer.export import export
from deployer.formats import ExportJob, Target
from deployer.formats.traceable import MODES, export_program
from deployer.spec import Dim, ModelSpec, TensorSpec


class Repeat(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        rows = int(x.shape[0])  # fixed
        return x + torch.ones(1, 3).repeat(rows, 1)


class Full(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.full((int(x.shape[0]), 3), 0.5)  # fixed


class View(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(int(x.shape[0]), 3, 1).sum(2)  # fixed


class HardCodedView(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(4, 3) * 2  # fixed


class HardCodedBuffer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.zeros(4, 3)  # fixed


class RangeLoop(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        rows = []
        for row in range(x.shape[0]):  # fixed
            rows.append(2 * x[row])
        return torch.stack(rows)


class Comprehension(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([2 * row for row in x])  # fixed


class TwoPaths(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x if x.shape[0] > 5 else x  # fixed


class FixedLength(nn.Module):
    """x (batch, length) → x; the second dynamic axis is the one that is fixed."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.ones(int(x.shape[1]))  # fixed


def plain_export(checkpoint: Checkpoint, folder: Path) -> None:
    """torch.export in its plain mode alone; the other modes follow int(x.shape[0])."""
    export_program(
        ExportJob(checkpoint.build(), checkpoint.spec, checkpoint.samples, Target("exported"), folder), MODES[:1]
    )


def checkpoint_of(kind: type[nn.Module], spec: ModelSpec | None = None) -> Checkpoint:
    rows = TensorSpec("x", "float32", ("batch", 3))
    output = TensorSpec("output", "float32", ("batch", 3))
    spec = spec or ModelSpec("fixed", (rows,), (output,), dims={"batch": Dim(1, 4, 16)}, batch="batch")
    samples = {"x": np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)}
    return load_checkpoint(model=f"{__file__}:{kind.__name__}", spec=spec, samples=samples)


def marked_line(kind: type[nn.Module]) -> tuple[int, str]:
    """Number and text of the line of `kind` that ends in `# fixed`."""
    start = kind.forward.__code__.co_firstlineno
    number = next(line for line in range(start, start + 9) if "# fixed" in linecache.getline(__file__, line))
    return number, " ".join(linecache.getline(__file__, number).split())


FROZEN = [Repeat, Full, View, RangeLoop, Comprehension]


@pytest.mark.parametrize("kind", FROZEN, ids=lambda kind: kind.__name__)
def test_the_axis_its_value_and_the_line_are_named(kind: type[nn.Module], tmp_path: Path) -> None:
    number, code = marked_line(kind)
    line = re.escape(f"({Path(__file__).name}:{number}: {code})")
    with pytest.raises(
        ExportError, match=rf"fixes the dynamic axis 'batch' to 4 {line}: its size is used as"
    ) as caught:
        plain_export(checkpoint_of(kind), tmp_path)
    assert caught.value.reason == "specialized_axis"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [Repeat, Full, View], ids=lambda kind: kind.__name__)
def test_a_size_read_with_int_is_followed_in_strict_mode_and_recorded(kind: type[nn.Module], tmp_path: Path) -> None:
    bundle, report = export(checkpoint_of(kind), Target("exported"), tmp_path)
    assert report.passed
    assert bundle.manifest.details["tracing"] == "strict"
    assert "fixes the dynamic axis 'batch' to 4" in bundle.manifest.details["notes"][0]


@pytest.mark.parametrize("kind", [RangeLoop, Comprehension], ids=lambda kind: kind.__name__)
def test_what_no_mode_follows_is_refused_in_the_words_of_the_plain_one(kind: type[nn.Module], tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="fixes the dynamic axis 'batch' to 4"):
        export(checkpoint_of(kind), Target("exported"), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [HardCodedView, HardCodedBuffer], ids=lambda kind: kind.__name__)
def test_a_model_that_runs_at_one_size_only_is_told_so(kind: type[nn.Module], tmp_path: Path) -> None:
    number, code = marked_line(kind)
    line = re.escape(f"({Path(__file__).name}:{number}: {code})")
    refused = rf"failed on x\[\d+, 3\] with RuntimeError: .* {line}|at batch=1: output .* came as float32\[4, 3\]"
    with pytest.raises(ModelError, match=refused):
        export(checkpoint_of(kind), Target("exported"), tmp_path)
    with pytest.raises(ExportError, match=rf"fixes the dynamic axis 'batch' to 4 {line}"):  # the exporter, asked alone
        plain_export(checkpoint_of(kind), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_axis_is_the_one_that_was_fixed_not_the_first(tmp_path: Path) -> None:
    spec = ModelSpec(
        "two",
        (TensorSpec("x", "float32", ("batch", "length")),),
        (TensorSpec("output", "float32", ("batch", "length")),),
        dims={"batch": Dim(1, 4, 16), "length": Dim(1, 3, 8)},
        batch="batch",
    )
    number, _ = marked_line(FixedLength)
    with pytest.raises(ExportError, match=rf"fixes the dynamic axis 'length' to 5 \({Path(__file__).name}:{number}:"):
        plain_export(checkpoint_of(FixedLength, spec), tmp_path)


def test_a_path_for_some_sizes_only_is_told_with_its_condition(tmp_path: Path) -> None:
    number, _ = marked_line(TwoPaths)
    expected = rf"one path for some sizes of the dynamic axis 'batch' .*{Path(__file__).name}:{number}: .*batch <= 5"
    with pytest.raises(ExportError, match=expected):
        export(checkpoint_of(TwoPaths), Target("exported"), tmp_path)
