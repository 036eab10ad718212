"""Names of weights against names of models, and files that hold several sets of weights."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.swa_utils import AveragedModel

from deployer.checkpoint.keys import fit_keys
from deployer.checkpoint.sources import open_source
from deployer.checkpoint.weights import load_weights, plan_load
from deployer.errors import CheckpointError
from tests.test_intake_files import Net, answer, coverage, load

OUTER = ["module.", "_orig_mod.", "_fsdp_wrapped_module.", "model.", "net."]


@pytest.mark.parametrize("outer", ["".join(pair) for pair in itertools.permutations(OUTER, 2)] + OUTER)
def test_wrappers_in_any_nesting_and_mid_key(tmp_path: Path, outer: str) -> None:
    state = {
        outer
        + key.replace("enc.", "enc._checkpoint_wrapped_module._orig_mod.").replace("head.", "module.head."): tensor
        for key, tensor in Net().state_dict().items()
    }
    torch.save({"model": state, "optimizer": {"state": {}}, "epoch": 3}, tmp_path / "w.pt")
    checkpoint = load(tmp_path / "w.pt")
    np.testing.assert_array_equal(answer(checkpoint), answer(Net()))
    found = coverage(checkpoint)
    assert (found.loaded, found.missing, found.unexpected) == (9, (), ())
    assert all(rule.endswith("removed") for rule in found.rules.values())
    assert len(found.rules) == len(found.renamed) == 9


WRAPPERS = st.sampled_from(["module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"])
KEYS = ["enc.weight", "enc.bias", "blocks.0.attn.q.weight", "blocks.1.attn.q.weight", "head.weight"]


@given(st.data())
def test_wrapper_parts_anywhere_come_off(data: st.DataObject) -> None:
    wrapped = {}
    for key in KEYS:
        parts = key.split(".")
        for _ in range(data.draw(st.integers(0, 3))):
            parts.insert(data.draw(st.integers(0, len(parts) - 1)), data.draw(WRAPPERS))
        wrapped[".".join(parts)] = key
    assert fit_keys(wrapped, KEYS).targets == wrapped


class Boxed(nn.Module):
    """Has real parts called `module` and `model`, and one of the same name beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.model, self.weight = nn.Linear(4, 3, bias=False), nn.Linear(3, 3), nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(self.module(x)) * self.weight


@pytest.mark.parametrize("outer", ["", "module.", "_orig_mod.", "model.", "module._orig_mod.module."])
def test_real_parts_of_those_names_keep_them(tmp_path: Path, outer: str) -> None:
    torch.manual_seed(7)
    source = Boxed()
    torch.save({outer + key: tensor for key, tensor in source.state_dict().items()}, tmp_path / "w.pt")
    model = Boxed()
    found = load_weights(model, dict(open_source(tmp_path / "w.pt").sets[0].weights), "w.pt")
    assert found.renamed == ({} if not outer else {outer + key: key for key in source.state_dict()})
    np.testing.assert_array_equal(answer(model), answer(source))


def test_a_model_that_wraps_what_was_saved(tmp_path: Path) -> None:
    inner = nn.Linear(4, 3)
    found = load_weights(nn.ModuleDict({"net": nn.ModuleDict({"fc": nn.Linear(4, 3)})}), {
        f"fc.{key}": tensor for key, tensor in inner.state_dict().items()}, "w")  # fmt: skip
    assert found.renamed == {"fc.weight": "net.fc.weight", "fc.bias": "net.fc.bias"}
    assert set(found.rules.values()) == {"prefix 'net.' added"}


def test_student_and_teacher_are_not_mixed_up() -> None:
    state = {
        f"{name}.{key}": tensor for name in ("left", "right") for key, tensor in nn.Linear(2, 2).state_dict().items()
    }
    with pytest.raises(CheckpointError, match=r"unexpected: right\.bias, right\.weight; the part 'left' fits alone"):
        load_weights(nn.Linear(2, 2), state, "w")


def test_nearest_names_are_suggested() -> None:
    state = {"0.wieght": torch.zeros(2, 2), "0.baes": torch.zeros(2)}
    with pytest.raises(CheckpointError) as error:
        load_weights(nn.Sequential(nn.Linear(2, 2)), state, "w")
    assert "did you mean '0.bias' for '0.baes', '0.weight' for '0.wieght'?" in str(error.value)


def test_a_missing_counter_of_batch_norm_is_kept_as_built_and_said() -> None:
    state = {key: tensor for key, tensor in Net().state_dict().items() if "num_batches" not in key}
    found = load_weights(Net(1.0), state, "w")
    assert list(found.defaulted) == ["norm.num_batches_tracked"]
    assert "evaluation never reads" in found.defaulted["norm.num_batches_tracked"]
    del state["norm.running_mean"]  # the statistics themselves are no such thing
    with pytest.raises(CheckpointError, match=r"missing: norm\.num_batches_tracked, norm\.running_mean"):
        load_weights(Net(1.0), state, "w")


class Frozen(nn.Module):
    """Batch norm with constant statistics, as detection models have it: no counter."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.ones(3))
        self.register_buffer("steps", torch.arange(3), persistent=False)


def test_what_the_model_does_without_is_skipped_and_said() -> None:
    state = {**nn.BatchNorm1d(3).state_dict(), "steps": torch.arange(3)}
    found = load_weights(Frozen(), state, "w")
    assert set(found.skipped) == {"num_batches_tracked", "steps"}
    with pytest.raises(CheckpointError, match="unexpected: steps"):  # other values than the model's own mean something
        load_weights(Frozen(), state | {"steps": torch.arange(3) + 1}, "w")


def test_models_with_a_loader_of_their_own_load_by_it() -> None:
    """Old weight_norm keys are renamed by a hook of the parametrization."""
    old = nn.utils.weight_norm(nn.Linear(3, 2))
    new = weight_norm(nn.Linear(3, 2))
    found = load_weights(new, old.state_dict(), "w")
    assert found.fits
    assert "by the model's own loader" in found.rules.values()
    x = torch.ones(1, 3)
    assert torch.equal(new(x), old(x))
    with pytest.raises(CheckpointError, match="missing"):
        load_weights(weight_norm(nn.Linear(3, 2)), {"bias": torch.zeros(2)}, "w")


def test_lazy_parameters_take_the_shape_of_the_file() -> None:
    model = nn.LazyLinear(2)
    load_weights(model, nn.Linear(3, 2).state_dict(), "w")
    assert model.weight.shape == (2, 3)


# Several sets of weights in one file.

RAW, EMA = Net(1.0), Net(2.0)


def ema_state(prefix: str = "module.") -> dict[str, Any]:
    return {prefix + key: tensor for key, tensor in EMA.state_dict().items()}


LAYOUTS: dict[str, dict[str, Any]] = {
    "timm": {"state_dict": RAW.state_dict(), "state_dict_ema": ema_state(), "n_averaged": torch.tensor(1000)},
    "model_ema": {"model": RAW.state_dict(), "model_ema": ema_state(""), "optimizer": {"state": {}}},
    "ema": {"model": RAW.state_dict(), "ema": {"module": ema_state("")}, "step": 3},
    "averaged model": {
        "model": RAW.state_dict(), "swa_model": {"n_averaged": torch.tensor(3), **ema_state()},
    },
    "by prefix": {
        "state_dict": {
            **{f"model.{key}": tensor for key, tensor in RAW.state_dict().items()},
            **{f"ema_model.{key}": tensor for key, tensor in ema_state().items()},
            "ema_model.n_averaged": torch.tensor(3),
        }
    },
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_raw_and_averaged_weights(tmp_path: Path, layout: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "w.pt"
    torch.save(LAYOUTS[layout], path)
    opened = open_source(path)
    assert [item.averaged for item in opened.sets] == [False, True]
    by_default = load(path)
    assert "holds 2 sets of weights" in caplog.text
    assert "taking raw" in caplog.text
    caplog.clear()
    ema = load(path, weights="ema")
    assert caplog.text == ""  # who chose needs no note
    assert (by_default.weight_set, ema.weight_set) == ("raw", "ema")
    assert ema.intake is not None
    assert len(ema.intake.weight_sets) == 2
    np.testing.assert_array_equal(answer(by_default), answer(Net(1.0)))
    np.testing.assert_array_equal(answer(load(path, weights="raw")), answer(Net(1.0)))
    np.testing.assert_array_equal(answer(ema), answer(Net(2.0)))
    np.testing.assert_array_equal(answer(load(path, weights=opened.sets[1].place)), answer(Net(2.0)))


def test_the_state_of_an_averaged_model_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.save(AveragedModel(EMA, use_buffers=True).state_dict(), tmp_path / "swa.pt")
    checkpoint = load(tmp_path / "swa.pt")
    np.testing.assert_array_equal(answer(checkpoint), answer(Net(2.0)))
    assert checkpoint.weight_set == "ema"
    assert coverage(checkpoint).skipped == {"n_averaged": "the counter of an AveragedModel"}
    assert "averaged weights alone" in caplog.text


class WithAverage(nn.Module):
    """A model that has an averaged copy of its layer as a part of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.ema_layer = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) - self.ema_layer(x)


def test_a_model_with_a_part_called_ema_keeps_it(tmp_path: Path) -> None:
    torch.manual_seed(11)
    model = WithAverage()
    torch.save(model.state_dict(), tmp_path / "w.pt")
    checkpoint = load_by_class(tmp_path / "w.pt")
    np.testing.assert_array_equal(answer(checkpoint), answer(model))


def load_by_class(path: Path) -> Any:
    from deployer.checkpoint import load_checkpoint
    from tests.test_intake_files import SAMPLES, SPEC

    return load_checkpoint(path, model=f"{__file__}:WithAverage", spec=SPEC, samples=SAMPLES)


def test_a_choice_that_is_not_there_lists_what_is(tmp_path: Path) -> None:
    torch.save({"model": RAW.state_dict()}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"holds no weights 'ema'; it holds 'model' \(9 tensors\)"):
        load(tmp_path / "w.pt", weights="ema")
    with pytest.raises(CheckpointError, match="did you mean 'model'"):
        load(tmp_path / "w.pt", weights="modle")


def test_several_networks_need_a_name(tmp_path: Path) -> None:
    torch.save({"generator": RAW.state_dict(), "discriminator": EMA.state_dict()}, tmp_path / "gan.pt")
    with pytest.raises(CheckpointError, match=r"several sets.*'generator' .*'discriminator' .*--weights generator"):
        load(tmp_path / "gan.pt")
    np.testing.assert_array_equal(answer(load(tmp_path / "gan.pt", weights="discriminator")), answer(Net(2.0)))


def test_a_plan_loads_nothing() -> None:
    model = Net(1.0)
    found = plan_load(model, Net(2.0).state_dict(), "w").coverage
    assert (found.loaded, found.fits) == (9, True)
    np.testing.assert_array_equal(answer(model), answer(Net(1.0)))
