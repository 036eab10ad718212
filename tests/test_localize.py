"""`--localize`: a seeded fault in an artifact is found where it was put."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

from deployer.bundle import Bundle, file_hashes, read_bundle, write_manifest
from deployer.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from deployer.cli import cli
from deployer.errors import DeployerError, UsageError
from deployer.export import export
from deployer.formats import Target
from deployer.spec import Dim, ModelSpec, TensorSpec
from deployer.validate import localize, validate


class Net(nn.Module):
    """A convolution with batch norm (which formats fold together), a branch of two linears, a softmax."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.left, self.right = nn.Linear(16, 6), nn.Linear(16, 6)

    def forward(self, image: Tensor) -> Tensor:
        hidden = self.norm(self.conv(image)).relu().flatten(2).mean(1)
        return (self.left(hidden) + self.right(hidden).tanh()).softmax(-1)  # the last line


SPEC = ModelSpec(
    "net",
    (TensorSpec("image", "float32", ("batch", 1, 4, 4)),),
    dims={"batch": Dim(1, 4, 8)},
    batch="batch",
)


class OneRowOnly(nn.Module):
    """Answers a batch of one otherwise, which torch.export settles for good."""

    def forward(self, image: Tensor) -> Tensor:
        return image.flatten(1) * (3 if image.shape[0] == 1 else 2)


SAMPLES = {"image": np.random.default_rng(0).normal(size=(5, 1, 4, 4)).astype(np.float32)}


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return load_checkpoint(model=f"{__file__}:Net", spec=SPEC, samples=SAMPLES)


def broken_bundle(checkpoint: Checkpoint, name: str, place: Path, spoil: Callable[[Path], None]) -> Bundle:
    """A bundle whose artifact was changed after it passed, its hashes made to fit."""
    bundle, _ = export(checkpoint, Target(name), place)
    folder = place / "broken"
    shutil.copytree(bundle.path, folder)
    spoil(folder)
    write_manifest(folder, msgspec.structs.replace(bundle.manifest, sha256=file_hashes(folder)))
    return read_bundle(folder)


def spoil_onnx(name: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        import onnx
        from onnx import numpy_helper

        model = onnx.load(folder / "model.onnx")
        tensor = next(entry for entry in model.graph.initializer if entry.name.endswith(name))
        array = numpy_helper.to_array(tensor).copy()
        array.flat[3] += 0.5
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
        onnx.save(model, folder / "model.onnx")

    return spoil


def spoil_exported(name: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        program = torch.export.load(str(folder / "model.pt2"))
        program.state_dict[f"model.{name}"].view(-1)[3] += 0.5
        torch.export.save(program, str(folder / "model.pt2"))

    return spoil


def spoil_torchscript(name: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        model: Any = Net().eval()
        with torch.no_grad():
            model.get_parameter(name).view(-1)[3] += 0.5
            traced = torch.jit.trace(_Tuple(model).eval(), torch.tensor(SAMPLES["image"]), check_trace=False)
        torch.jit.save(torch.jit.freeze(traced), str(folder / "model.pt"))

    return spoil


class _Tuple(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> tuple[Tensor]:
        return (self.model(image),)


SPOILERS = {"onnx": spoil_onnx, "exported": spoil_exported, "torchscript": spoil_torchscript}


@pytest.mark.parametrize("name", SPOILERS)
@pytest.mark.parametrize("module", ["left", "right", "conv"])
def test_one_altered_weight_names_its_operator(name: str, module: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    bundle = broken_bundle(checkpoint, name, tmp_path, SPOILERS[name](f"{module}.weight"))
    report = validate(bundle.path)
    assert not report.passed
    found = localize(bundle.path, report, checkpoint)
    assert found.module in ((module,) if module != "conv" else ("conv", "norm")), str(found)  # the two are folded
    assert found.case == "samples"
    expected = ("aten::linear",) if module != "conv" else ("aten::conv2d", "aten::batch_norm", "aten::convolution")
    assert found.operator in (*expected, "aten::_native_batch_norm_legit_no_training"), str(found)
    assert found.line.startswith(f"{Path(__file__).name}:")
    assert re.search(r"(its operands agree|what feeds it agrees) with eager.*, its output does not", found.explanation)
    assert 3 <= found.compared <= found.operators


def test_an_artifact_that_passes_has_nothing_to_localise(checkpoint: Checkpoint, tmp_path: Path) -> None:
    bundle, report = export(checkpoint, Target("exported"), tmp_path)
    with pytest.raises(UsageError, match="passes the gate"):
        localize(bundle.path, report, checkpoint)


def test_what_torch_export_itself_got_wrong_is_said_so(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(model=f"{__file__}:OneRowOnly", spec=SPEC, samples=SAMPLES)
    with pytest.raises(DeployerError, match="batch=1"):
        export(checkpoint, Target("exported"), tmp_path)
    rejected = tmp_path / "net-exported-fp32.rejected"
    report = validate(rejected)
    found = localize(rejected, report, checkpoint)
    assert found.case == "batch=1"
    assert "not the model any more" in found.explanation
    assert "* (3 if image.shape[0] == 1 else 2)" in found.line


def test_the_command_needs_the_checkpoint_and_prints_the_place(checkpoint: Checkpoint, tmp_path: Path) -> None:
    save_checkpoint(
        tmp_path / "checkpoint",
        checkpoint.build(),
        factory=f"{__file__}:Net",
        spec=checkpoint.spec,
        samples=SAMPLES,
    )
    loaded = load_checkpoint(tmp_path / "checkpoint")
    bundle = broken_bundle(loaded, "onnx", tmp_path, spoil_onnx("left.weight"))
    runner = CliRunner()
    refused = runner.invoke(cli, ["validate", str(bundle.path), "--localize"])
    assert isinstance(refused.exception, UsageError) or "add --checkpoint" in refused.output
    done = runner.invoke(
        cli, ["validate", str(bundle.path), "--localize", "--checkpoint", str(tmp_path / "checkpoint"), "--json"]
    )
    document = json.loads(done.stdout)
    assert document["departure"]["module"] == "left"
    assert document["passed"] is False


class OutputNamedAsInput(nn.Module):
    """The output `x` is written to the ONNX file under another name, since the input has it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.left(x)
        return {"x": self.right(hidden).tanh(), "hidden": hidden}


@pytest.mark.parametrize("module", ["left", "right"])
def test_an_output_named_as_an_input_is_in_nobodys_way(module: str, tmp_path: Path) -> None:
    spec = ModelSpec(
        "named", (TensorSpec("x", "float32", ("batch", 3)),), dims={"batch": Dim(1, 4, 8)}, batch="batch"
    )  # fmt: skip
    samples = {"x": np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)}
    checkpoint = load_checkpoint(model=f"{__file__}:OutputNamedAsInput", spec=spec, samples=samples)
    bundle = broken_bundle(checkpoint, "onnx", tmp_path, spoil_onnx(f"{module}.weight"))
    found = localize(bundle.path, validate(bundle.path), checkpoint)
    assert (found.module, found.operator) == (module, "aten::linear")


def test_what_the_aoti_compiler_gets_wrong_is_found(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler whose tanh is a thousandth too large: too little to be compiled again, too much for the gate."""
    compile_rightly = torch._inductor.aoti_compile_and_package

    def compile_wrongly(program: torch.export.ExportedProgram, **options: Any) -> str:
        wrong = {torch.ops.aten.tanh.default: lambda x: (x.exp() - (-x).exp()) / (x.exp() + (-x).exp()) * 1.001}
        return str(compile_rightly(program.run_decompositions(wrong), **options))

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compile_wrongly)
    with pytest.raises(DeployerError, match="failed the gate"):
        export(checkpoint, Target("aoti"), tmp_path)
    rejected = tmp_path / "net-aoti-fp32.rejected"
    report = validate(rejected)
    found = localize(rejected, report, checkpoint)
    assert found.operator == "aten::tanh", str(found)
    assert found.line.startswith(f"{Path(__file__).name}:")
    assert "every operator exposed" in found.explanation
    assert found.compared >= 5
