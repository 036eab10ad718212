"""The model against itself: what it does is recorded or refused in one plain line, before anything is exported."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deployer.bundle import Bundle
from deployer.checkpoint import Checkpoint, load_checkpoint
from deployer.errors import GateError, ModelError, RequestError, UsageError
from deployer.export import export
from deployer.formats import FORMATS, Loaded, Target
from deployer.inspection import inspect
from deployer.package.settings import choose_settings
from deployer.runtime import Runner, open_bundle
from deployer.spec import Array, Dim, ModelSpec, TensorSpec
from deployer.validate import Reference, make_reference, run_gate

QUICK = ("torchscript", "exported", "onnx")
HERE = Path(__file__).name
BATCH = {"batch": Dim(1, 3, 8)}
X = TensorSpec("x", "float32", ("batch", 4))
ROWS = {"x": np.linspace(-1, 2, 20, dtype=np.float32).reshape(5, 4)}
FLAT = ModelSpec("flat", (X,), dims=BATCH, batch="batch")


def checkpoint_of(kind: type[nn.Module], spec: ModelSpec = FLAT, samples: dict[str, Array] = ROWS) -> Checkpoint:
    return load_checkpoint(model=f"{__file__}:{kind.__name__}", spec=spec, samples=samples)


def reference_of(kind: type[nn.Module], spec: ModelSpec = FLAT, samples: dict[str, Array] = ROWS) -> Reference:
    return make_reference(checkpoint_of(kind, spec, samples))


# -------------------------------------------------------------------------------------------------------------- chance


class DropsAlways(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.dropout(x, 0.5))


class NoisyPart(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


class NoisyInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Identity(), NoisyPart())

    def forward(self, x: Tensor) -> Tensor:
        return self.parts(x)


def test_dropout_that_ignores_eval_is_named_with_its_line() -> None:
    expected = (
        rf"not deterministic in eval mode: output 'output' differs by up to \S+ .*bernoulli_ \({HERE}:\d+: .*F\.dr"
    )
    with pytest.raises(GateError, match=expected) as caught:
        reference_of(DropsAlways)
    assert caught.value.reason == "nondeterministic"


def test_noise_is_named_with_the_module_that_draws_it() -> None:
    with pytest.raises(GateError, match=rf"randn_like in 'parts\.1' \({HERE}:\d+: return x \+ torch\.randn_like"):
        reference_of(NoisyInside)


class Attends(nn.Module):
    """Attention is tagged as random in torch; with a dropout of 0 it is not."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x[:, None, None, :]
        return F.scaled_dot_product_attention(heads, heads, heads)[:, 0, 0]


def test_attention_is_not_taken_for_chance() -> None:
    assert reference_of(Attends).batch_independent


# --------------------------------------------------------------------------------------------------------------- state


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.copy_(torch.maximum(self.seen, x.abs().max()))
        return x / self.seen


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + 1


def test_state_that_answers_depend_on_is_refused_by_name() -> None:
    with pytest.raises(GateError, match=r"carries state between calls: output 'output'.*after other calls.*'seen'"):
        reference_of(Remembers)


@pytest.mark.parametrize("name", QUICK)
def test_a_counter_that_no_answer_depends_on_is_recorded_and_the_artifact_is_right(name: str, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(Counts)
    bundle, report = export(checkpoint, Target(name), tmp_path)
    assert report.facts.changed_tensors == ("calls",)
    assert any("forward changes 'calls'" in note for note in report.notes)
    with open_bundle(bundle) as run:
        for _ in range(3):
            np.testing.assert_array_equal(run(ROWS)["output"], ROWS["x"] + 1)


# --------------------------------------------------------------------------------------------------------------- modes


class NormInTraining(nn.Module):
    """Overrides train(), so that eval() does not reach its batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def train(self, mode: bool = True) -> NormInTraining:
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class HarmlessMode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = HarmlessPart()

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)


class HarmlessPart(nn.Module):
    def train(self, mode: bool = True) -> HarmlessPart:
        return self

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def test_a_batch_norm_left_in_train_mode_is_refused_by_name() -> None:
    with pytest.raises(GateError, match=r"stays in train mode after eval\(\): BatchNorm1d 'norm'") as caught:
        reference_of(NormInTraining, msgspec.structs.replace(FLAT, outputs=(TensorSpec("y", "float32", ("batch", 4)),)))
    assert caught.value.reason == "train_mode"


def test_a_mode_without_effect_is_recorded() -> None:
    reference = reference_of(HarmlessMode)
    assert reference.facts.train_mode_modules == ("part",)
    assert "'part' stay in train mode after eval()" in reference.facts.notes()[0]


# -------------------------------------------------------------------------------------------------- inputs and aliases


class Mutates(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x.mul_(2)
        return x, x + 1


def test_inputs_written_into_and_outputs_that_alias_are_recorded() -> None:
    facts = reference_of(Mutates).facts
    assert facts.mutated_inputs == ("x",)
    assert facts.aliased_outputs == {"output_0": "input 'x'"}


class Optional(nn.Module):
    """`kind` is never read; `mask` may be left out."""

    def forward(self, x: Tensor, kind: Tensor | None = None, *, mask: Tensor | None = None) -> Tensor:
        y = x.sum(-1)
        return y if mask is None else y * mask


KIND, MASK = TensorSpec("kind", "int64", ("batch", 4)), TensorSpec("mask", "float32", ("batch",))
ONES = {"x": np.ones((2, 4), np.float32), "kind": np.zeros((2, 4), np.int64)}
GIVEN = ONES | {"mask": np.array([1, 0], np.float32)}


@pytest.mark.parametrize("name", QUICK)
def test_an_unused_input_stays_and_an_optional_one_is_used_or_refused(name: str, tmp_path: Path) -> None:
    spec = ModelSpec("with_mask", (X, KIND, MASK), dims=BATCH, batch="batch")
    bundle, report = export(checkpoint_of(Optional, spec, GIVEN), Target(name), tmp_path)
    assert [tensor.name for tensor in bundle.spec.inputs] == ["x", "kind", "mask"]
    assert report.facts.unused_inputs == ("kind",)
    with open_bundle(bundle) as run:
        np.testing.assert_array_equal(run(GIVEN)["output"], [4, 0])
        np.testing.assert_array_equal(run(GIVEN | {"kind": ONES["kind"] + 3})["output"], [4, 0])
    without = ModelSpec("no_mask", (X, KIND), dims=BATCH, batch="batch")
    bundle, _ = export(checkpoint_of(Optional, without, ONES), Target(name), tmp_path)
    with open_bundle(bundle) as run:
        np.testing.assert_array_equal(run(ONES)["output"], [4, 4])
        with pytest.raises(RequestError, match="unknown input 'mask'"):
            run(GIVEN)


# ---------------------------------------------------------------------------------------------------------------- rows


class SequenceFirst(nn.Module):
    """x (time, batch, 4) → (time, batch, 6), as recurrent modules have it unless told otherwise."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn = nn.GRU(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


FRAMES = {"x": np.random.default_rng(0).normal(size=(5, 3, 4)).astype(np.float32)}


def test_a_batch_axis_declared_wrongly_is_caught_with_the_right_one(tmp_path: Path) -> None:
    wrong = ModelSpec("wrong", (TensorSpec("x", "float32", ("batch", 3, 4)),), dims=BATCH, batch="batch")
    reference = reference_of(SequenceFirst, wrong, FRAMES)
    assert not reference.batch_independent
    assert re.search(
        r"not answered as alone: output 'output' of row \d differs by .* times its rms", reference.batch_reason
    )
    assert reference.batch_reason.endswith("declare the batch on axis 1")
    right = ModelSpec("right", (TensorSpec("x", "float32", (5, "batch", 4)),), dims=BATCH, batch="batch")
    assert reference_of(SequenceFirst, right, FRAMES).batch_independent


class Branches(nn.Module):
    """A sum over the batch decides: no sample shows it, a loud neighbour does."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x.sum() < 100, 2 * x, x - 10)


class Centres(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)


def test_a_loud_neighbour_is_seen() -> None:
    reference = reference_of(Branches)
    assert "beside extreme neighbours: output 'output' of row" in reference.batch_reason
    assert not reference.batch_independent


class Found(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x[:, 0] > 0]


def test_rows_found_in_the_data_are_no_batch() -> None:
    assert "as many rows as the data decides" in reference_of(Found).batch_reason


def test_mixing_does_not_count_as_noise() -> None:
    assert reference_of(Centres).noise["output"] < 1e-6


def test_the_reason_travels_to_the_package_and_to_inspect(tmp_path: Path) -> None:
    bundle, report = export(checkpoint_of(Centres), Target("torchscript"), tmp_path)
    assert report.batch_reason == bundle.manifest.batch_reason
    assert "row in a batch of 5 is not answered as alone: output 'output'" in bundle.manifest.batch_reason
    assert bundle.manifest.batch_reason in str(inspect(bundle.path).facts["batch independent"])
    with pytest.raises(UsageError, match=r"--batch-size 4: requests for 'flat' cannot share a run, a row in a batch"):
        choose_settings(bundle.manifest, batch_size=4, max_batch_delay_ms=None, workers=None)
    assert choose_settings(bundle.manifest, batch_size=None, max_batch_delay_ms=None, workers=None).batch_size == 1


# ----------------------------------------------------------------------------------------------------------------- ids


class Embeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(11, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids).sum(1)


class Indexes(nn.Module):
    """Plain indexing counts negative ids from the end."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(7.0))

    def forward(self, ids: Tensor) -> Tensor:
        return self.table[ids]


class OneHot(nn.Module):
    """A range that no table shows: the gate's own −1 is an error of the model."""

    def forward(self, ids: Tensor) -> Tensor:
        if not torch.jit.is_tracing() and not torch.compiler.is_compiling() and bool((ids < 0).any()):
            raise IndexError("an id is out of range")
        return 2 * ids


def ids_spec(**limits: int) -> ModelSpec:
    return ModelSpec("ids", (TensorSpec("ids", "int64", ("batch", 2), **limits),), dims=BATCH, batch="batch")


IDS = {"ids": np.array([[1, 2], [3, 4], [5, 0]])}


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize(("kind", "low", "high"), [(Embeds, 0, 10), (Indexes, -7, 6)])
def test_the_range_of_ids_is_found_on_the_model_and_enforced(
    kind: type[nn.Module], low: int, high: int, name: str, tmp_path: Path
) -> None:
    bundle, report = export(checkpoint_of(kind, ids_spec(), IDS), Target(name), tmp_path)
    assert (bundle.spec.inputs[0].low, bundle.spec.inputs[0].high) == (low, high)
    assert {f"ids of {low - 1}", f"ids of {high + 1}"} <= {check.case for check in report.checks if check.passed}
    with open_bundle(bundle) as run:
        run({"ids": np.array([[low, high]])})
        for wrong in (low - 1, high + 1):
            with pytest.raises(RequestError, match=f"holds {wrong} at index") as caught:
                run({"ids": np.array([[low, wrong]])})
            assert caught.value.field == "ids"


def test_a_declared_range_is_kept_and_tried(tmp_path: Path) -> None:
    reference = reference_of(Embeds, ids_spec(low=0, high=5), IDS)
    assert reference.spec is not None
    assert (reference.spec.inputs[0].low, reference.spec.inputs[0].high) == (0, 5)
    with pytest.raises(ModelError, match=r"input 'ids' declares high 11, and the model fails there.*out of range"):
        reference_of(Embeds, ids_spec(low=0, high=11), IDS)


class Share(nn.Module):
    """Each row's share of its sum, and of nothing: NaN in rows of zeros, or everywhere."""

    def __init__(self, *, everywhere: bool) -> None:
        super().__init__()
        self.everywhere = everywhere

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        rows = x * 0 if self.everywhere else x
        return {"x": x, "share": rows / rows.sum(1, keepdim=True)}


def test_an_output_of_nothing_but_nan_is_refused_and_some_nan_is_not() -> None:
    spec = ModelSpec("share", (TensorSpec("x", "float32", ("batch", 3)),), dims=BATCH, batch="batch")
    samples = {"x": np.array([[0, 0, 0], [1, 2, 3]], np.float32)}

    def reference(*, everywhere: bool) -> Reference:
        return make_reference(
            load_checkpoint(model=f"{__file__}:Share", args={"everywhere": everywhere}, spec=spec, samples=samples)
        )

    assert np.isnan(reference(everywhere=False).outputs["samples"]["share"][0]).all()
    with pytest.raises(ModelError, match="output 'share' is NaN everywhere"):
        reference(everywhere=True)


def test_an_index_error_must_stay_an_error() -> None:
    checkpoint = checkpoint_of(OneHot, ids_spec(), IDS)
    reference = make_reference(checkpoint)
    assert list(reference.errors) == ["ids below zero"]
    report = run_gate(lambda x: {"output": 2 * x["ids"]}, checkpoint.spec, IDS, reference, "fp32", "test")
    assert len(report.reasons) == 1
    assert "ids below zero: the artifact answers where the eager model fails" in report.reasons[0]

    def refusing(arrays: Any) -> dict[str, Array]:
        if (arrays["ids"] < 0).any():
            raise IndexError("out of range")
        return {"output": 2 * arrays["ids"]}

    assert run_gate(refusing, checkpoint.spec, IDS, reference, "fp32", "test").passed


# -------------------------------------------------------------------------------------------------------------- values


class Chaotic(nn.Module):
    """Amplifies one ulp beyond measure for inputs of a thousand, and is tame for the samples."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x * 1e4)


def test_inputs_at_which_the_model_itself_is_chaotic_are_skipped_with_the_reason() -> None:
    skipped = reference_of(Chaotic).skipped
    assert "floats ×1000" in skipped
    assert "moves by" in skipped["floats ×1000"]
    assert "one unit in the last place" in skipped["floats ×1000"]


class Picky(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch._assert_async(x.abs().max() < 1000)
        return x


def test_inputs_that_the_model_does_not_answer_are_skipped_with_the_reason() -> None:
    assert "the eager model gives no answer" in reference_of(Picky).skipped["floats ×1000"]


def test_sizes_beyond_the_spec_are_checks_of_the_gate() -> None:
    checkpoint = checkpoint_of(Counts)
    reference = make_reference(checkpoint)

    class Careless(Runner):
        def __call__(self, arrays: Any) -> dict[str, Array]:
            return {"output": arrays["x"] + 1 if "x" in arrays else ROWS["x"]}

    runner = Careless(checkpoint.spec, Loaded(lambda arrays: {}, "careless"))
    report = run_gate(runner, checkpoint.spec, ROWS, reference, "fp32", "careless")
    assert [check.case for check in report.checks if not check.passed] == [
        "batch=9", "batch=0", "x as float64", "without x", "with not_an_input",
    ]  # fmt: skip
    assert all("not allowed by the spec, and answered all the same" in reason for reason in report.reasons)


def test_every_format_has_a_way_to_be_taken_apart() -> None:
    assert [name for name, record in FORMATS.items() if record.precisions and record.look is None] == []


def test_a_bundle_names_its_spec_with_the_ranges_found(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(Embeds, ids_spec(), IDS)
    bundle, _ = export(checkpoint, Target("exported"), tmp_path)
    from deployer.export import current_bundle

    again = current_bundle(checkpoint, Target("exported"), tmp_path)  # the ranges found make it no other model
    assert isinstance(again, Bundle)
    assert again.path == bundle.path
