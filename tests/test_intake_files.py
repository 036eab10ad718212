"""Weights files of every kind, through load_checkpoint: the right answer, or one line that says what to do."""

from __future__ import annotations

import argparse
import collections
import datetime
import enum
import os
import pathlib
import subprocess
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

from deployer.checkpoint import Checkpoint, Coverage, load_checkpoint, save_checkpoint
from deployer.checkpoint.eager import run_eager
from deployer.checkpoint.pickles import StandIn
from deployer.checkpoint.sources import open_source, open_weights, read_weights
from deployer.checkpoint.torch_file import read_torch_file
from deployer.errors import CheckpointError, DeployerError
from deployer.inspection import inspect
from deployer.spec import Dim, ModelSpec, TensorSpec

SPEC = ModelSpec("net", (TensorSpec("x", "float32", ("batch", 4)),), dims={"batch": Dim()}, batch="batch")
SAMPLES = {"x": np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)}


class Net(nn.Module):
    """x (batch, 4) → (batch, 3)."""

    def __init__(self, fill: float | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enc, self.norm, self.head = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        with torch.no_grad():
            self.norm.running_mean.uniform_()
            for parameter in self.parameters() if fill is not None else ():
                parameter.fill_(fill)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.enc(x))))


class Blank(Net):
    """As Net, with other weights and statistics: nothing of the right answer is in it."""

    def __init__(self) -> None:
        super().__init__(0.5)
        self.norm.running_mean.zero_()


class Tied(nn.Module):
    """x (batch, 4) → (batch, 4), the two layers one tensor."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def load(path: Path, model: str = "Blank", **options: Any) -> Checkpoint:
    return load_checkpoint(path, model=f"{__file__}:{model}", spec=SPEC, samples=SAMPLES, **options)


def answer(model: nn.Module | Checkpoint) -> np.ndarray:
    if isinstance(model, Checkpoint):
        return run_eager(model.build(), model.spec, SAMPLES)["output"]
    with torch.no_grad():
        return model.eval()(torch.tensor(SAMPLES["x"])).numpy()


def coverage(checkpoint: Checkpoint) -> Coverage:
    assert checkpoint.intake is not None
    assert checkpoint.intake.coverage is not None
    return checkpoint.intake.coverage


def one_line(error: pytest.ExceptionInfo[DeployerError], *words: str) -> None:
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


WAYS = {
    "plain": lambda sd: sd,
    "model": lambda sd: {"model": sd, "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}}, "epoch": 3},
    "state_dict": lambda sd: {"state_dict": sd, "epoch": 3},
    "module": lambda sd: {"module": sd, "lr_scheduler": {"last": 1}},
    "net": lambda sd: {"net": sd, "acc": 0.5},
    "two levels": lambda sd: {"checkpoint": {"model": {"state_dict": sd}}, "step": 4},
    "loose": lambda sd: {**sd, "epoch": 3},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt"])
def test_weights_are_found_where_training_scripts_put_them(tmp_path: Path, way: str, suffix: str) -> None:
    torch.save(WAYS[way](Net().state_dict()), tmp_path / f"w{suffix}")
    np.testing.assert_array_equal(answer(load(tmp_path / f"w{suffix}")), answer(Net()))


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("zipped", [True, False])
def test_old_streams_and_newer_pickle_protocols(tmp_path: Path, protocol: int, zipped: bool) -> None:
    state = Net().state_dict()
    state["enc.weight"] = state["enc.weight"].t().contiguous().t()  # strided
    torch.save(
        {"model": state, "epoch": 1}, tmp_path / "w.pt", _use_new_zipfile_serialization=zipped, pickle_protocol=protocol
    )
    np.testing.assert_array_equal(answer(load(tmp_path / "w.pt")), answer(Net()))


def test_views_of_one_storage(tmp_path: Path) -> None:
    """Slices of one flat buffer, as some trainers keep their parameters, in both containers."""
    state = Net().state_dict()
    flat = torch.cat([tensor.flatten().float() for tensor in state.values()])
    pieces = flat.split([tensor.numel() for tensor in state.values()])
    views = {key: piece.view(tensor.shape) for (key, tensor), piece in zip(state.items(), pieces, strict=True)}
    views["norm.num_batches_tracked"] = state["norm.num_batches_tracked"]
    for zipped in (True, False):
        torch.save(views, tmp_path / "w.pt", _use_new_zipfile_serialization=zipped)
        np.testing.assert_array_equal(answer(load(tmp_path / "w.pt")), answer(Net()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_are_cast_and_counted(tmp_path: Path, dtype: torch.dtype) -> None:
    net = Net().to(dtype)
    torch.save(net.state_dict(), tmp_path / "w.pt")
    save_file(net.state_dict(), tmp_path / "w.safetensors")
    for name in ("w.pt", "w.safetensors"):
        checkpoint = load(tmp_path / name)
        np.testing.assert_array_equal(answer(checkpoint), answer(net.float()))
        assert coverage(checkpoint).casts == {f"{str(dtype).removeprefix('torch.')}→float32": 8}
        net = Net().to(dtype)


def test_weights_saved_on_a_gpu_load_without_one(tmp_path: Path) -> None:
    with mock.patch("torch.serialization.location_tag", return_value="cuda:3"):
        torch.save(Net().state_dict(), tmp_path / "w.pt")
    assert b"cuda:3" in (tmp_path / "w.pt").read_bytes()
    np.testing.assert_array_equal(answer(load(tmp_path / "w.pt")), answer(Net()))


def test_parameters_and_tensors_with_attributes_are_their_values(tmp_path: Path) -> None:
    state: dict[str, Any] = dict(Net().state_dict(keep_vars=True))
    state["head.bias"].note = "kept by torch.save"
    torch.save(state, tmp_path / "w.pt")
    np.testing.assert_array_equal(answer(load(tmp_path / "w.pt")), answer(Net()))


def test_a_tied_weight_is_stored_once_and_restored(tmp_path: Path) -> None:
    model = Tied(3)
    folder = save_checkpoint(tmp_path / "ck", model, factory=f"{__file__}:Tied", spec=SPEC, samples=SAMPLES)
    assert (folder / "model.safetensors").stat().st_size < 2 * 64 + 200  # 64 bytes of values, once
    checkpoint = load_checkpoint(folder, model=f"{__file__}:Tied")
    np.testing.assert_array_equal(answer(checkpoint), answer(Tied(3)))
    assert coverage(checkpoint).tied == {"last.weight": "first.weight"}
    save_model(Tied(3), str(tmp_path / "m.safetensors"))
    np.testing.assert_array_equal(answer(load(tmp_path / "m.safetensors", "Tied")), answer(Tied(3)))
    save_file({"last.weight": model.last.weight.detach().clone()}, tmp_path / "one.safetensors")  # no word about ties
    np.testing.assert_array_equal(answer(load(tmp_path / "one.safetensors", "Tied")), answer(Tied(3)))


def test_two_values_for_one_tied_tensor_are_refused(tmp_path: Path) -> None:
    torch.save({"first.weight": torch.zeros(4, 4), "last.weight": torch.ones(4, 4)}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError) as error:
        load(tmp_path / "w.pt", "Tied")
    one_line(error, "different values", "first.weight", "last.weight")


class Mode(enum.Enum):
    FAST = 1


METADATA = {
    "best": np.float64(0.91),
    "count": np.int32(3),
    "array": np.arange(3),
    "rng": np.random.default_rng(0).bit_generator.state,
    "args": argparse.Namespace(lr=0.1, path=pathlib.PurePosixPath("/x")),
    "simple": types.SimpleNamespace(a=1),
    "where": pathlib.PosixPath("/data/runs"),
    "when": datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
    "took": datetime.timedelta(seconds=3),
    "seen": {1, 2},
    "frozen": frozenset("ab"),
    "counter": collections.Counter("aab"),
    "nested": collections.defaultdict(list, {"a": [1]}),
    "dtype": torch.float16,
    "device": torch.device("cpu"),
    "torch": torch.__version__,
    "complex": 1 + 2j,
    "bytes": b"abc",
}


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("name", METADATA)
def test_harmless_things_beside_weights_are_no_obstacle(tmp_path: Path, name: str, zipped: bool) -> None:
    held = {"model": Net().state_dict(), name: METADATA[name], "epoch": 7}
    torch.save(held, tmp_path / "w.pt", _use_new_zipfile_serialization=zipped)
    checkpoint = load(tmp_path / "w.pt")
    np.testing.assert_array_equal(answer(checkpoint), answer(Net()))
    assert checkpoint.step == 7


def test_options_of_omegaconf_and_its_like_are_skipped(tmp_path: Path) -> None:
    """Packages that are not installed here need not be: nothing of them is imported."""
    fake = types.ModuleType("omegaconf.dictconfig")
    fake.DictConfig = type("DictConfig", (), {"__module__": "omegaconf.dictconfig"})
    config = fake.DictConfig()
    config.content = {"lr": 0.1}
    with mock.patch.dict(sys.modules, {"omegaconf": types.ModuleType("omegaconf"), "omegaconf.dictconfig": fake}):
        torch.save({"model": Net().state_dict(), "cfg": config}, tmp_path / "w.pt")
    np.testing.assert_array_equal(answer(load(tmp_path / "w.pt")), answer(Net()))
    assert open_source(tmp_path / "w.pt").classes == ("omegaconf.dictconfig.DictConfig",)


def test_an_unknown_class_is_named_with_the_flag_that_skips_it(tmp_path: Path) -> None:
    torch.save({"model": Net().state_dict(), "mode": Mode.FAST}, tmp_path / "w.pt")
    name = f"{Mode.__module__}.Mode"
    with pytest.raises(CheckpointError) as error:
        load(tmp_path / "w.pt")
    one_line(error, str(tmp_path / "w.pt"), name, f"--allow-global {name}", "--trust-pickle")
    checkpoint = load(tmp_path / "w.pt", allow_globals=[name])
    np.testing.assert_array_equal(answer(checkpoint), answer(Net()))
    assert checkpoint.intake is not None
    assert checkpoint.intake.allowed_globals == (name,)
    trusted = load(tmp_path / "w.pt", trust_pickle=True)
    np.testing.assert_array_equal(answer(trusted), answer(Net()))
    assert trusted.intake is not None
    assert trusted.intake.trusted_pickle


class Touch:
    """Makes a file when it is unpickled, if anything lets it."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("zipped", [True, False])
def test_nothing_runs_unless_it_was_asked_for(tmp_path: Path, zipped: bool) -> None:
    marker = tmp_path / "ran"
    path = tmp_path / "w.pt"
    torch.save({"model": Net().state_dict(), "x": Touch(marker)}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=r"pickles posix\.mkdir beside its weights"):
        load(path)
    read_torch_file(path)
    np.testing.assert_array_equal(answer(load(path, allow_globals=["posix.mkdir"])), answer(Net()))
    assert not marker.exists()
    load(path, trust_pickle=True)
    assert marker.exists()  # which is what the flag says


def test_a_stand_in_answers_every_demand_of_a_pickle_with_itself(tmp_path: Path) -> None:
    held = read_tree(tmp_path, {"x": collections.deque([1, 2]), "y": Touch(tmp_path / "ran"), "z": slice(1)})
    assert all(isinstance(held[name], StandIn) for name in "xyz")
    assert held["x"].kind == "collections.deque"


def read_tree(tmp_path: Path, tree: Any) -> Any:
    torch.save(tree, tmp_path / "tree.pt")
    return read_torch_file(tmp_path / "tree.pt").tree


def whole_module(path: Path, inside: bool = False) -> None:
    """torch.save(model) of a training script: the class lives in its __main__."""
    code = (
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.enc, self.norm, self.head = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)\n"
        "        self.register_buffer('scratch', torch.ones(2), persistent=False)\n"
        "torch.manual_seed(5)\nmodel = Net()\n"
        f"torch.save({{'model': model, 'epoch': 1}} if {inside} else model, {str(path)!r})\n"
        f"torch.save(model.state_dict(), {str(path)!r} + '.sd.pt')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_whole_pickled_module_is_refused_and_its_weights_taken_on_demand(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    whole_module(path)
    with pytest.raises(CheckpointError) as error:
        load(path)
    one_line(error, "whole pickled module", "__main__.Net", "state_dict()", "--allow-global __main__.Net")
    # The class is not here, so unpickling fails in one line as well.
    with pytest.raises(CheckpointError, match=r"cannot be unpickled: AttributeError"):
        load(path, trust_pickle=True)
    taken = load(path, allow_globals=["__main__.Net"])
    np.testing.assert_array_equal(answer(taken), answer(load(tmp_path / "model.pt.sd.pt")))


def test_a_module_of_torch_alone_is_taken_without_a_word(tmp_path: Path) -> None:
    torch.save(nn.Sequential(nn.Linear(4, 3)), tmp_path / "m.pt")
    assert set(read_weights(tmp_path / "m.pt")) == {"0.weight", "0.bias"}


@pytest.mark.parametrize("how", ["truncated", "empty", "html", "one record short"])
@pytest.mark.parametrize("kind", ["zip", "stream", "safetensors", "torchscript", "pt2", "onnx"])
def test_broken_files_are_one_line_with_path_and_size(tmp_path: Path, how: str, kind: str) -> None:
    suffix = {"zip": ".pt", "stream": ".pth", "torchscript": ".pt"}.get(kind, f".{kind}")
    path = tmp_path / f"w{suffix}"
    if kind == "safetensors":
        save_file(Net().state_dict(), path)
    elif kind == "torchscript":
        torch.jit.script(Net()).save(str(path))
    else:
        torch.save(Net().state_dict(), path, _use_new_zipfile_serialization=kind != "stream")
    whole = path.read_bytes()
    broken = {"truncated": whole[: len(whole) // 2], "empty": b"", "html": b"<!DOCTYPE html><html>404</html>"}
    path.write_bytes(broken.get(how, whole[:-1]))
    with pytest.raises(CheckpointError) as error:
        load(path)
    one_line(error, str(path), f"{path.stat().st_size} bytes", "truncated or corrupt")


def test_a_flipped_byte_of_a_tensor_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    torch.save(Net().state_dict(), path)
    data = bytearray(path.read_bytes())
    place = data.find(Net().head.weight.detach().numpy().tobytes())
    data[place + 5] ^= 16
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"truncated or corrupt: a tensor differs from its recorded checksum"):
        load(path)


def test_a_file_that_changes_after_it_was_opened_is_refused(tmp_path: Path) -> None:
    torch.save(Net().state_dict(), tmp_path / "w.pt")
    checkpoint = load(tmp_path / "w.pt")
    torch.save(Net(1.0).state_dict(), tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match="changed since it was opened"):
        checkpoint.build()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["norm.running_var", "enc.weight"])
def test_values_that_are_not_finite_are_refused_by_name(tmp_path: Path, name: str, value: float) -> None:
    state = Net().state_dict()
    state[name].view(-1)[1] = value
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=f"holds NaN or infinity in: {name}"):
        load(tmp_path / "w.pt")


def test_an_overflow_of_a_cast_is_not_finite_either(tmp_path: Path) -> None:
    state = Net().double().state_dict()
    state["enc.bias"][0] = 1e300
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"infinity in: enc\.bias"):
        load(tmp_path / "w.pt")


class Masked(Net):
    """With the causal mask of a decoder as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))


def test_the_infinities_of_a_constant_mask_are_no_fault(tmp_path: Path) -> None:
    torch.save(Masked().state_dict(), tmp_path / "w.pt")
    np.testing.assert_array_equal(answer(load(tmp_path / "w.pt", "Masked")), answer(Net()))
    state = Masked().state_dict()
    state["mask"][0, 0] = -torch.inf
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match="infinity in: mask"):
        load(tmp_path / "w.pt", "Masked")


def test_integers_do_not_pass_for_weights(tmp_path: Path) -> None:
    state = Net().state_dict()
    state["enc.weight"] = torch.ones(8, 4, dtype=torch.int8)
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"enc\.weight is int8, the model has float32"):
        load(tmp_path / "w.pt")


@pytest.mark.parametrize("name", ["w.pt", "w.pt.rank1"])
def test_a_flat_shard_of_one_rank_is_named_and_refused(tmp_path: Path, name: str) -> None:
    torch.save({"model": {"_fsdp_wrapped_module._flat_param": torch.ones(29)}, "epoch": 3}, tmp_path / name)
    with pytest.raises(CheckpointError) as error:
        load(tmp_path / name)
    words = "FSDP flat-parameter shard of one rank (keys _fsdp_wrapped_module._flat_param)"
    one_line(error, words, "save a FULL state dict", "sharded-DCP")
    assert words in inspect(tmp_path / name).facts["as weights"]


def test_files_that_are_no_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "w.pt.txt").write_text("how w.pt was made")
    (tmp_path / "x.distcp").write_bytes(b"PK\x03\x04")
    (tmp_path / "empty").mkdir()
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"epoch": 3}, tmp_path / "meta.pt")
    for name, words in (
        ("notes.txt", "no known checkpoint suffix"),
        ("w.pt.txt", "no known checkpoint suffix"),
        ("x.distcp", "give its folder"),
        ("empty", "holds no checkpoint.json"),
        ("list.pt", "holds a list"),
        ("meta.pt", "its keys are: epoch"),
        ("absent.pt", "no checkpoint at"),
    ):
        with pytest.raises(CheckpointError, match=words):
            load(tmp_path / name)


def lightning(path: Path, **extra: Any) -> None:
    """As Lightning writes it: the module's keys begin with the name that the LightningModule gave the model."""
    torch.save(
        {
            "epoch": 2, "global_step": 120, "pytorch-lightning_version": "2.5.0",
            "state_dict": {f"model.{key}": tensor for key, tensor in Net().state_dict().items()} | extra,
            "loops": {"fit_loop": {"state_dict": {}}},
            "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_score": torch.tensor(0.5)}},
            "optimizer_states": [{"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1}]}],
            "lr_schedulers": [], "hparams_name": "kwargs",
            "hyper_parameters": {"lr": 0.1, "out": pathlib.PosixPath("/x")},
        },
        path,
    )  # fmt: skip


def test_lightning(tmp_path: Path) -> None:
    lightning(tmp_path / "last.ckpt")
    checkpoint = load(tmp_path / "last.ckpt")
    np.testing.assert_array_equal(answer(checkpoint), answer(Net()))
    assert checkpoint.intake is not None
    assert checkpoint.intake.kind == "Lightning checkpoint"
    assert checkpoint.step == 120
    assert set(coverage(checkpoint).rules.values()) == {"prefix 'model.' removed"}


def test_a_part_of_a_file_is_taken_by_its_place(tmp_path: Path) -> None:
    """A loss with weights of its own is too many for the model; --weights state_dict.model takes the model's part."""
    lightning(tmp_path / "last.ckpt", **{"loss.weight": torch.ones(3)})
    with pytest.raises(CheckpointError, match=r"unexpected: loss\.weight; the part 'model' fits alone"):
        load(tmp_path / "last.ckpt")
    checkpoint = load(tmp_path / "last.ckpt", weights="state_dict.model")
    np.testing.assert_array_equal(answer(checkpoint), answer(Net()))
    assert checkpoint.weight_set == "state_dict.model"


def test_weights_stay_in_their_file(tmp_path: Path) -> None:
    torch.save({"model": Net().state_dict()}, tmp_path / "w.pt")
    chosen = open_weights(tmp_path / "w.pt")
    assert all(type(tensor).__name__ == "FileTensor" for tensor in chosen.weights.values())
