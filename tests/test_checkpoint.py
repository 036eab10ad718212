from __future__ import annotations

import dataclasses
import json
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from deployer.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from deployer.checkpoint.eager import flatten_outputs, run_eager
from deployer.checkpoint.keys import fit_keys
from deployer.checkpoint.probe import probe_spec
from deployer.checkpoint.sources import read_weights
from deployer.checkpoint.weights import load_weights
from deployer.errors import CheckpointError, DeployerError, IntegrityError, ModelError, SpecError
from deployer.references import load_reference
from deployer.spec import Dim, ModelSpec, TensorSpec

MODEL_SOURCE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.enc, self.head = nn.Linear(4, width), nn.Linear(width, 3)
    def forward(self, x):
        return self.head(torch.relu(self.enc(x)))

def build(width=8):
    torch.manual_seed(0)
    return Net(width)

def not_a_model():
    return 3
"""
SPEC = ModelSpec("net", (TensorSpec("x", "float32", ("batch", 4)),), dims={"batch": Dim()}, batch="batch")
SAMPLES = {"x": np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)}


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "model.py"
    path.write_text(MODEL_SOURCE)
    return path


@pytest.fixture
def reference(model_file: Path) -> str:
    return f"{model_file}:build"


def answer(checkpoint: Checkpoint) -> np.ndarray:
    return run_eager(checkpoint.build(), checkpoint.spec, SAMPLES)["output"]


def expected(reference: str) -> np.ndarray:
    with torch.no_grad():
        return load_reference(reference)().eval()(torch.tensor(SAMPLES["x"])).numpy()


def saved_state(reference: str) -> dict[str, torch.Tensor]:
    return load_reference(reference)().state_dict()


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".safetensors"])
def test_weights_files_answer_bit_for_bit(tmp_path: Path, reference: str, suffix: str) -> None:
    path = tmp_path / f"weights{suffix}"
    state = saved_state(reference)
    save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
    checkpoint = load_checkpoint(path, model=reference, spec=SPEC, samples=SAMPLES)
    np.testing.assert_array_equal(answer(checkpoint), expected(reference))
    assert checkpoint.spec.outputs == (TensorSpec("output", "float32", ("batch", 3)),)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_wrapper_prefixes_come_off_in_any_nesting(tmp_path: Path, reference: str, prefix: str) -> None:
    state = {prefix + name: tensor for name, tensor in saved_state(reference).items()}
    torch.save({"model": state, "optimizer": {"state": {}}, "epoch": 3}, tmp_path / "w.pt")
    checkpoint = load_checkpoint(tmp_path / "w.pt", model=reference, spec=SPEC, samples=SAMPLES)
    np.testing.assert_array_equal(answer(checkpoint), expected(reference))


def test_a_submodule_that_is_called_module_keeps_its_name() -> None:
    own = {"module.weight", "head.weight"}
    state = {"module.module.weight": torch.zeros(1), "module.head.weight": torch.ones(1)}
    fit = fit_keys(state, own)
    assert set(fit.targets.values()) == own
    assert fit.renamed == {"module.module.weight": "module.weight", "module.head.weight": "head.weight"}
    assert fit_keys({"module.weight": torch.zeros(1)}, own).renamed == {}


def test_missing_and_unexpected_keys_are_listed_with_the_nearest_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    state = {"0.weight": torch.zeros(2, 2), "0.bais": torch.zeros(2)}
    with pytest.raises(CheckpointError, match=r"missing: 0\.bias; unexpected: 0\.bais; did you mean '0\.bias'\?"):
        load_weights(model, state, "x.pt")


def test_other_shapes_and_nan_weights_are_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"weight is \[3, 2\], the model has \[2, 2\]"):
        load_weights(model, {"weight": torch.zeros(3, 2), "bias": torch.zeros(2)}, "x.pt")
    with pytest.raises(CheckpointError, match="NaN or infinity in: bias"):
        load_weights(model, {"weight": torch.zeros(2, 2), "bias": torch.tensor([0.0, float("nan")])}, "x.pt")


@pytest.mark.parametrize("content", ["truncated", "empty", "html"])
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_broken_files_are_one_line_with_path_and_size(
    tmp_path: Path, reference: str, content: str, suffix: str
) -> None:
    path = tmp_path / f"w{suffix}"
    state = saved_state(reference)
    save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
    whole = path.read_bytes()
    path.write_bytes({"truncated": whole[: len(whole) // 2], "empty": b"", "html": b"<!DOCTYPE html><html>"}[content])
    with pytest.raises(CheckpointError) as caught:
        read_weights(path)
    message = str(caught.value)
    assert str(path) in message
    assert f"{path.stat().st_size} bytes" in message
    assert "truncated or corrupt" in message
    assert "\n" not in message


class Marker:
    """Runs code when it is unpickled, if anything lets it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.write_text, (self.path, "ran"))


def test_pickled_code_is_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    torch.save({"model": {"w": torch.zeros(1)}, "extra": Marker(marker)}, tmp_path / "evil.pt")
    with pytest.raises(CheckpointError, match=r"pickles builtins.getattr beside its weights, which is not run"):
        read_weights(tmp_path / "evil.pt")
    assert not marker.exists()


def test_a_folder_describes_itself(tmp_path: Path, reference: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_reference(reference)()
    folder = save_checkpoint(tmp_path / "ck", model, factory=reference, spec=SPEC, samples=SAMPLES, step=7)
    (tmp_path / "model.py").unlink()  # the folder needs nothing outside itself
    monkeypatch.chdir("/")
    checkpoint = load_checkpoint(folder)
    np.testing.assert_array_equal(answer(checkpoint), expected(f"{folder}/model.py:build"))
    assert checkpoint.step == 7
    assert checkpoint.spec.outputs[0].shape == ("batch", 3)


@pytest.mark.parametrize("name", ["model.safetensors", "model.py", "samples.safetensors"])
def test_a_changed_file_of_a_folder_is_named(tmp_path: Path, reference: str, name: str) -> None:
    folder = save_checkpoint(
        tmp_path / "ck", load_reference(reference)(), factory=reference, spec=SPEC, samples=SAMPLES
    )
    data = bytearray((folder / name).read_bytes())
    data[-1] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(IntegrityError, match=name):
        load_checkpoint(folder)


@pytest.mark.parametrize("named", ["os:system", "../model.py:build"])
def test_a_folder_cannot_name_code_outside_itself(tmp_path: Path, reference: str, named: str) -> None:
    folder = save_checkpoint(
        tmp_path / "ck", load_reference(reference)(), factory=reference, spec=SPEC, samples=SAMPLES
    )
    record = json.loads((folder / "checkpoint.json").read_text())
    record["model"] = named
    (folder / "checkpoint.json").write_text(json.dumps(record))
    with pytest.raises(ModelError, match=r"--model|outside the folder"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("reference_tail", "message"),
    [
        ("model.py", "no code reference"),
        ("absent.py:build", "no file"),
        ("model.py:buidl", "did you mean 'build'"),
        ("model.py:not_a_model", "returned a int"),
    ],
)
def test_bad_model_references(model_file: Path, reference_tail: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_checkpoint(model=f"{model_file.parent}/{reference_tail}", spec=SPEC, samples=SAMPLES)


def test_wrong_factory_arguments_and_input_names(reference: str) -> None:
    with pytest.raises(ModelError, match="depth"):
        load_checkpoint(model=reference, args={"depth": 1}, spec=SPEC, samples=SAMPLES)
    other = ModelSpec("net", (TensorSpec("image", "float32", ("batch", 4)),), dims={"batch": Dim()})
    with pytest.raises(SpecError, match="no parameter 'image'"):
        load_checkpoint(model=reference, spec=other, samples={"image": SAMPLES["x"]})


def test_weights_alone_say_what_is_missing(tmp_path: Path, reference: str) -> None:
    torch.save(saved_state(reference), tmp_path / "w.pt")
    with pytest.raises(SpecError, match="model, spec, samples missing"):
        load_checkpoint(tmp_path / "w.pt")


@dataclasses.dataclass
class Answer:
    scores: torch.Tensor
    extra: torch.Tensor | None = None


Pair = namedtuple("Pair", "left right")
ONE = torch.ones(1)


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (ONE, ["output"]),
        ((ONE, ONE), ["output_0", "output_1"]),
        ({"b": ONE, "a": ONE}, ["b", "a"]),
        (Answer(ONE), ["scores"]),
        (Pair(ONE, ONE), ["left", "right"]),
        ({"layers": (ONE, ONE), "top": {"x": ONE}}, ["layers.0", "layers.1", "top.x"]),
    ],
)
def test_outputs_get_stable_names(value: object, names: list[str]) -> None:
    assert list(flatten_outputs(value)) == names


def test_an_output_that_is_no_tensor_is_named() -> None:
    with pytest.raises(ModelError, match=r"a str as output 'meta\.tag'"):
        flatten_outputs({"x": ONE, "meta": {"tag": "hello"}})


class Sequences(nn.Module):
    def forward(self, ids: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"same": ids * 2, "half": ids[:, ::2].float() * scale[:, None], "pooled": ids.float().mean(1)}


def test_probing_finds_which_output_axis_follows_which_input_axis() -> None:
    samples = {"ids": np.arange(12).reshape(2, 6), "scale": np.ones(2, np.float32)}
    spec, notes = probe_spec(Sequences(), "sequences", samples)
    assert notes == []
    assert spec.batch == "batch"
    assert {tensor.name: tensor.shape for tensor in spec.inputs} == {"ids": ("batch", "sequence"), "scale": ("batch",)}
    shapes = {tensor.name: tensor.shape for tensor in spec.outputs}
    assert shapes == {"same": ("batch", "sequence"), "half": ("batch", "?"), "pooled": ("batch",)}


def test_complex_outputs_are_refused_by_name() -> None:
    class Spectrum(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.rfft(x)

    with pytest.raises(DeployerError, match=r"'output' is complex64.*view_as_real"):
        probe_spec(Spectrum(), "fft", {"x": np.ones((2, 16), np.float32)})


def test_a_checkpoint_folder_is_plain_files_that_other_tools_read(digits_folder: Path) -> None:
    assert sorted(path.name for path in digits_folder.iterdir()) == [
        "checkpoint.json",
        "model.py",
        "model.safetensors",
        "samples.safetensors",
    ]
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in digits_folder.iterdir())
    assert "classify.weight" in load_file(digits_folder / "model.safetensors")
