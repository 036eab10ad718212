"""The zoo and what docs/coverage.md says of it; the classes of reason that refusals get."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from deployer.cli.export import _document
from deployer.errors import REASONS, DeployerError, ExportError, GateError, ModelError, with_reason
from deployer.export import Outcome, export
from deployer.formats import Target
from deployer.formats.decompositions import TABLE
from deployer.formats.refusals import explain_export_error, operator_in, reason_in
from deployer.formats.rewrites import Rewrites
from deployer.spec import Dim, ModelSpec, TensorSpec
from deployer.validate import make_reference
from tests.zoo import ENTRIES, MODULES

ROOT = Path(__file__).resolve().parent.parent
QUICK = ("torchscript", "exported", "onnx")
FORMATS = (*QUICK, "aoti")
SPEC = ModelSpec(
    "recorded", (TensorSpec("x", "float32", ("batch", "sequence")),), dims={"batch": Dim(), "sequence": Dim()}
)

#: what torch, its exporters and ONNX Runtime said (class of the error, text) → the class of reason
RECORDED = [
    (
        "GuardOnDataDependentSymNode",
        "Could not guard on data-dependent expression Eq(u0, 1) (unhinted: Eq(u0, 1)).  (Size-like symbols: none)",
        "data_dependent_control_flow",
    ),
    (
        "DynamicOutputShapeException",
        "aten.nonzero.default",
        "data_dependent_size",
    ),
    (
        "UserError",
        "Constraints violated (batch)!\n  - You marked batch as dynamic but your code specialized it to be a constant "
        "(4). If you're using mark_dynamic, either remove it",
        "specialized_axis",
    ),
    (
        "UserError",
        "Constraints violated (sequence)!\n  - Not all values of sequence = L['tensors'][0].size()[1] in the specified "
        "range sequence <= 12 satisfy the generated guard ((-1) + L['tensors'][0].size()[1]) != 1.",
        "specialized_axis",
    ),
    ("RuntimeError", ".numpy() is not supported for tensor subclasses.", "unsupported_python"),
    ("Unsupported", "Attempted to call unsupported builtin function open", "unsupported_python"),
    ("RuntimeError", "something that nobody has seen", "exporter_failed"),
]  # fmt: skip


def recorded_error(kind: str, text: str) -> Exception:
    return type(kind, (RuntimeError,), {})(text)


@pytest.mark.parametrize(("kind", "text", "reason"), RECORDED, ids=[f"{row[0]}-{row[2]}" for row in RECORDED])
def test_what_torch_export_said_gets_its_class_of_reason(kind: str, text: str, reason: str) -> None:
    error = explain_export_error(recorded_error(kind, text), SPEC)
    assert isinstance(error, ExportError)
    assert error.reason == reason
    assert error.advice == REASONS[reason]
    assert "\n" not in str(error)


def test_an_axis_is_named_in_the_message() -> None:
    assert "axis 'sequence'" in str(explain_export_error(recorded_error(*RECORDED[3][:2]), SPEC))


def test_the_innermost_cause_of_a_wrapped_error_decides() -> None:
    text = "No ONNX function found for <OpOverload(op='aten.cummax', overload='default')>. Failure message: none"
    error = RuntimeError("Failed to convert the exported program to an ONNX model.")
    error.__cause__ = recorded_error("DispatchError", text)
    assert reason_in(error) == "unsupported_operator"
    assert operator_in(error) == "aten.cummax"


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("CppCompileError", "C++ compile error", "compiler_failed"),
        ("NotImplemented", "[ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : Could not find an implementation for X(1)",
         "unsupported_operator"),
        ("RuntimeError", "Unknown builtin op: torchvision::nms.", "unsupported_operator"),
        ("KeyError", "s77", "exporter_failed"),
    ],
)  # fmt: skip
def test_what_compilers_and_engines_said_gets_its_class_of_reason(kind: str, text: str, reason: str) -> None:
    assert reason_in(recorded_error(kind, text)) == reason


def test_every_class_of_error_has_a_reason_with_advice_or_none() -> None:
    for kind in (ExportError, GateError, ModelError):
        assert kind("message").advice
    assert DeployerError("message").reason == ""
    assert ExportError("message", reason="specialized_axis").advice == REASONS["specialized_axis"]


def test_reasons_that_the_code_gives_all_have_advice() -> None:
    given = set()
    for path in (ROOT / "deployer").rglob("*.py"):
        given |= set(re.findall(r"\breason=\"(\w+)\"", path.read_text(encoding="utf-8")))
    assert {"nondeterministic", "specialized_axis", "unsupported_output"} <= given
    lacking = {reason for reason in given if reason not in REASONS}
    assert not lacking, f"no advice in errors.REASONS for {sorted(lacking)}"


def test_export_as_json_tells_reason_and_advice() -> None:
    error = ExportError("the model fixes an axis", reason="specialized_axis")
    (row,) = _document([Outcome(Target("onnx"), error=error)])["targets"]
    assert (row["reason"], row["advice"]) == ("specialized_axis", REASONS["specialized_axis"])
    assert with_reason(error) == "the model fixes an axis [specialized_axis]"


# --- a slice of the zoo, end to end ----------------------------------------------------------------------------------

SLICE = ("norms", "two_towers", "nested_outputs", "sdpa_masked", "scans", "in_place", "found_rows")


@pytest.fixture(scope="module")
def references() -> dict[str, tuple[object, object]]:
    """Checkpoint and eager reference of each model, made once for its three formats."""
    return {}


@pytest.mark.parametrize("format_name", QUICK)
@pytest.mark.parametrize("name", SLICE)
def test_a_slice_of_the_zoo_passes(
    name: str, format_name: str, references: dict[str, tuple[object, object]], tmp_path: Path
) -> None:
    if name not in references:
        checkpoint = ENTRIES[name].checkpoint(tmp_path)
        references[name] = (checkpoint, make_reference(checkpoint))
    checkpoint, reference = references[name]
    _, report = export(checkpoint, Target(format_name), tmp_path, reference=reference)
    assert report.passed


def test_how_a_model_was_traced_is_recorded(tmp_path: Path) -> None:
    bundle, _ = export(ENTRIES["scatter"].checkpoint(tmp_path), Target("exported"), tmp_path)
    details = bundle.manifest.details
    assert (details["tracing"], details["rewritten"]) == ("rewritten", ["take_along_dim"])
    assert "rewritten mode (take_along_dim)" in details["notes"][0]


@pytest.mark.parametrize(
    "layer",
    [
        nn.LSTM(3, 4, bidirectional=True, batch_first=True),
        nn.GRU(3, 4, bias=False),
        nn.RNN(3, 4, nonlinearity="relu"),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_a_recurrent_layer_as_a_scan_is_the_layer(layer: nn.RNNBase) -> None:
    x = torch.randn(5, 2, 3)
    with torch.no_grad():
        expected, state = layer.eval()(x)
        with Rewrites() as rewrites:
            got, other = layer(x)
    assert rewrites.used == [layer.mode.lower()]
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(other, state)


def test_attention_for_onnx_answers_zeros_where_a_row_may_look_at_nothing() -> None:
    query, key, value = torch.randn(3, 2, 4, 5, 8).unbind(0)
    mask = torch.ones(5, 5, dtype=torch.bool).tril(-1)
    replacement = TABLE[torch.ops.aten.scaled_dot_product_attention.default]
    expected = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    got = replacement(query, key, value, mask)
    assert (got[..., 0, :] == 0).all()
    torch.testing.assert_close(got, expected)
    float_mask = torch.zeros(5, 5).masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(replacement(query, key, value, float_mask), got)


def test_what_replaces_operators_for_onnx_equals_them() -> None:
    aten = torch.ops.aten
    x, y = torch.randn(4, 7), torch.randn(3, 7)
    ties = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 1.0, 5.0, 5.0]])
    for p in (0.0, 1.0, 2.0, 3.0, float("inf")):
        torch.testing.assert_close(TABLE[aten.cdist.default](x, y, p), torch.cdist(x, y, p))
    for name in ("cummax", "cummin"):
        for values in (ties, (ties * 2).long()):
            got, expected = TABLE[getattr(aten, name).default](values, 1), getattr(torch, name)(values, 1)
            torch.testing.assert_close(got[0], expected.values)
            torch.testing.assert_close(got[1], expected.indices)
    torch.testing.assert_close(TABLE[aten.cumprod.default](x, 0), x.cumprod(0))
    axis = torch.tensor([-2.0, -0.0, 0.0, 1.0])
    down, across = (part.flatten() for part in torch.meshgrid(axis, axis, indexing="ij"))
    torch.testing.assert_close(TABLE[aten.atan2.default](down, across), torch.atan2(down, across))


@pytest.mark.parametrize("name", [name for name, entry in ENTRIES.items() if entry.refused])
def test_what_must_be_refused_is_refused_with_its_reason(name: str, tmp_path: Path) -> None:
    entry = ENTRIES[name]
    format_name = next(name for name in QUICK if name not in entry.taken_by)
    with pytest.raises(DeployerError) as caught:
        export(entry.checkpoint(tmp_path), Target(format_name), tmp_path)
    assert caught.value.reason == entry.refused
    assert not list(tmp_path.glob("*/manifest.json"))


# --- the zoo and its document ----------------------------------------------------------------------------------------


def test_the_zoo_is_as_large_as_it_says_and_its_weights_repeat() -> None:
    assert sum(not entry.refused for entry in ENTRIES.values()) >= 60
    assert len(MODULES) == len({entry.build.__module__ for entry in ENTRIES.values()})
    from tests.zoo import build

    one, other = build("resnet").state_dict(), build("resnet").state_dict()
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_docs_coverage_is_in_step_with_the_zoo() -> None:
    text = (ROOT / "docs/coverage.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \|((?: (?:passed|refused|\*\*fault)[^|]* \|){4})$", text, re.MULTILINE)
    assert [name for name, _ in rows] == [
        *(name for name, entry in ENTRIES.items() if not entry.refused),
        *(name for name, entry in ENTRIES.items() if entry.refused),
    ], "docs/coverage.md is stale: run scripts/coverage"
    assert "**fault**" not in "".join(cells for _, cells in rows)


def test_docs_coverage_meets_its_target() -> None:
    text = (ROOT / "docs/coverage.md").read_text(encoding="utf-8")
    found = re.search(r"^\| all \| (\d+) \| (\d+) \| ([\d.]+) % \| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    assert found is not None
    cells, passed, share, refused, faults = (float(value) for value in found.groups())
    assert cells == len(FORMATS) * sum(not entry.refused for entry in ENTRIES.values())
    assert passed + refused == cells
    assert faults == 0
    assert share >= 95


@pytest.mark.parametrize("word", ["Command: `scripts/coverage`", "torch 2.13", "onnxruntime"])
def test_docs_coverage_says_how_it_was_made(word: str) -> None:
    assert word in (ROOT / "docs/coverage.md").read_text(encoding="utf-8")
