"""The gate: right artifacts pass, wrong ones do not, and the report says what differs where."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployer.bundle import file_hashes, read_bundle, write_manifest
from deployer.checkpoint import Checkpoint
from deployer.cli.export import _finish, _worst
from deployer.cli.validate import _print_table
from deployer.errors import BundleError, GateError
from deployer.export import export, export_all
from deployer.formats import FORMATS, ExportJob, Loaded, LoadJob, Target
from deployer.spec import Array, Arrays, Dim, ModelSpec, TensorSpec
from deployer.validate import TOLERANCES, Reference, cases_for, compare, make_reference, run_gate, validate
from deployer.validate.compare import allowed_error, find_rankings, tied_indices
from tests.models import MixesRows, Noisy, Scale, checkpoint_of

FP32 = TOLERANCES["fp32"]
VALUES = np.linspace(-3, 5, 40, dtype=np.float32).reshape(4, 10)


def verdict(got: Array, expected: Array, noise: float = 0.0) -> bool:
    return compare("case", "y", got, expected, FP32, noise).passed


def test_the_tolerance_is_where_the_formula_says() -> None:
    expected = np.ones((2, 2), np.float32)  # rms 1: allowed is 2e-5 + 1e-4
    assert verdict(expected + np.float32(1.1e-4), expected)
    assert not verdict(expected + np.float32(1.3e-4), expected)


def test_noise_loosens_no_further_than_the_ceiling() -> None:
    expected = np.ones((2, 2), np.float32)
    assert verdict(expected + np.float32(3e-4), expected, noise=1e-4)  # 4·1e-4 + 1e-4
    assert not verdict(expected + np.float32(5e-3), expected, noise=1.0)  # capped at 4·1e-3 + 1e-4


@pytest.mark.parametrize(
    "break_it",
    [
        lambda y: y * np.float32(1.001),
        lambda y: y + np.float32(1e-2),
        lambda y: y[::-1],
        lambda y: y[:, ::-1],
        lambda y: np.where(np.arange(40).reshape(4, 10) == 7, np.nan, y),
        lambda y: np.where(np.arange(40).reshape(4, 10) == 7, np.inf, y),
        lambda y: np.zeros_like(y),
        lambda y: y[:3],
        lambda y: y.astype(np.float64),
    ],
    ids=["scale", "bias", "rows", "columns", "nan", "inf", "zeros", "shape", "dtype"],
)
def test_wrong_answers_do_not_pass(break_it: Callable[[Array], Array]) -> None:
    assert not verdict(break_it(VALUES), VALUES)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_the_verdict_does_not_depend_on_the_scale_of_the_output(scale: float) -> None:
    expected = (VALUES * scale).astype(np.float32)
    assert verdict(expected * np.float32(1 + 5e-5), expected)
    assert not verdict(expected * np.float32(1.001), expected)


def test_nan_equals_nan_only_at_the_same_place() -> None:
    expected = VALUES.copy()
    expected[1, 2] = np.nan
    check = compare("case", "y", expected.copy(), expected, FP32, 0.0)
    assert check.passed
    assert check.nan_count == 1
    assert not verdict(np.roll(expected, 1, axis=1), expected)


def test_integers_and_bools_must_be_equal() -> None:
    index = np.array([1000, 0])
    assert verdict(index, index)
    check = compare("case", "index", np.array([1001, 0]), index, FP32, 0.0)
    assert not check.passed
    assert "1 of 2 values differ" in check.reason
    assert not verdict(np.array([True, False]), np.array([True, True]))


def ties(scores: Array, index: Array, got: Array, got_scores: Array | None = None) -> tuple[bool, int]:
    """(passed, ties) for an index output that ranks `scores` along axis 1, given back as an output."""
    spec = ModelSpec(
        "ranked",
        (TensorSpec("x", "float32", ("batch", scores.shape[1])),),
        (TensorSpec("index", index.dtype.name, ("batch", *index.shape[1:])),
         TensorSpec("scores", "float32", ("batch", scores.shape[1]))),
        dims={"batch": Dim(1, len(scores), 16)}, batch="batch",
    )  # fmt: skip
    outputs = {"index": index, "scores": scores}
    ranking = find_rankings(spec, [({"x": np.zeros_like(scores)}, outputs)])["index"]
    assert (ranking.scores, ranking.from_inputs, ranking.axis) == ("scores", False, 1)
    own = scores if got_scores is None else got_scores
    tied = tied_indices(ranking, got, index, own, scores, allowed_error(scores, FP32))
    check = compare("case", "index", got, index, FP32, tied=tied)
    return check.passed, check.ties


def test_an_index_is_a_tie_only_where_the_scores_tie() -> None:
    scores = np.zeros((2, 1500), np.float32)
    scores[0, 1000] = scores[1, 0] = scores[1, 7] = 1.0
    index = scores.argmax(1)
    assert ties(scores, index, np.array([1000, 7])) == (True, 1)
    assert ties(scores, index, np.array([1001, 0])) == (False, 0)
    assert ties(scores, index, np.array([1000, 8])) == (False, 0)
    assert ties(scores, index, np.array([1000, 1500])) == (False, 0)  # beyond the scores
    assert ties(scores, index, np.array([1000, -1])) == (False, 0)


def test_a_near_tie_counts_only_by_the_artifacts_own_scores() -> None:
    scores = np.array([[1.0, 1.0 + 1e-6, 0.5]], np.float32)
    other = scores[:, [1, 0, 2]]  # the same within tolerance, the first ahead
    index, got = scores.argmax(1), np.array([0])
    assert ties(scores, index, got, other) == (True, 1)
    assert ties(scores, index, got, scores) == (False, 0)  # its own scores say 1


def test_the_best_few_may_change_places_where_they_tie_and_none_be_named_twice() -> None:
    scores = np.array([[3.0, 2.0, 2.0, 1.0]], np.float32)
    index = np.array([[0, 1, 2]])
    assert ties(scores, index, np.array([[0, 2, 1]])) == (True, 2)
    assert ties(scores, index, np.array([[0, 1, 1]])) == (False, 0)
    assert ties(scores, index, np.array([[0, 1, 3]])) == (False, 0)


def test_counts_are_no_ranking() -> None:
    spec = ModelSpec(
        "counts", (TensorSpec("x", "float32", ("batch", 3)),), (TensorSpec("n", "int64", ("batch",)),),
        dims={"batch": Dim(1, 2, 4)}, batch="batch",
    )  # fmt: skip
    x = np.array([[1.0, 2, 0], [5, 3, 1]], np.float32)
    assert find_rankings(spec, [({"x": x}, {"n": (x > 0).sum(1)})]) == {}


def test_complex_answers_are_compared_in_both_parts() -> None:
    expected = np.array([3 + 4j, 1 - 1j], np.complex64)
    assert verdict(expected * np.complex64(1 + 1e-6), expected)
    assert not verdict(expected.real.astype(np.complex64), expected)
    assert not verdict(expected.conj(), expected)


def test_half_precision_outputs_may_be_a_step_apart() -> None:
    expected = np.linspace(1, 2, 9, dtype=np.float16)
    assert verdict(np.nextafter(expected, np.float16(9)), expected)
    assert not verdict(expected * np.float16(1.01), expected)


def test_the_numbers_in_the_report_are_right() -> None:
    expected = np.array([[3.0, 4.0]], np.float32)
    check = compare("case", "y", np.array([[4.0, 3.0]], np.float32), expected, FP32, 0.0)
    assert check.max_abs == 1.0
    assert check.cosine == pytest.approx(24 / 25)
    assert check.argmax_agreement == 0.0
    assert check.max_rel == pytest.approx(1 / 3)


@given(st.floats(1e-3, 1e3), st.integers(0, 39))
def test_one_wrong_element_is_enough(size: float, place: int) -> None:
    got = VALUES.copy().ravel()
    got[place] += np.float32(size)
    assert not verdict(got.reshape(VALUES.shape), VALUES)


def test_cases_cover_every_axis_at_every_size() -> None:
    spec = ModelSpec(
        "m", (TensorSpec("x", "float32", ("batch", "length")),),
        dims={"batch": Dim(1, 8, 64), "length": Dim(2, 16, 128)}, batch="batch",
    )  # fmt: skip
    cases = cases_for(spec)
    assert len({case.name for case in cases}) == len(cases)
    for dim, sizes in (("batch", [1, 2, 3, 7, 8, 64]), ("length", [2, 3, 7, 16, 128])):
        assert sorted({case.sizes[dim] for case in cases if case.sizes}) == sizes
    together = [tuple(case.sizes.values()) for case in cases if case.sizes]
    assert (1, 2) in together
    assert (64, 128) in together
    scattered = cases[-1].inputs(spec, {"x": np.ones((2, 4), np.float32)})["x"]
    assert not scattered.flags.c_contiguous


@pytest.fixture(scope="module")
def scale() -> tuple[Checkpoint, Reference]:
    checkpoint = checkpoint_of(Scale)
    return checkpoint, make_reference(checkpoint)


def gate(scale: tuple[Checkpoint, Reference], run: Callable[[Arrays], dict[str, Array]]) -> list[str]:
    checkpoint, reference = scale
    report = run_gate(run, checkpoint.spec, checkpoint.samples, reference, "fp32", "test")
    assert report.passed == (not report.reasons)
    return list(report.reasons)


def test_an_artifact_that_is_right_passes(scale: tuple[Checkpoint, Reference]) -> None:
    assert gate(scale, lambda inputs: {"output": 2 * inputs["x"]}) == []


def test_a_frozen_batch_is_seen_at_the_other_sizes(scale: tuple[Checkpoint, Reference]) -> None:
    reasons = gate(scale, lambda inputs: {"output": np.resize(2 * inputs["x"], (4, 3))})
    assert any("batch=1" in reason for reason in reasons)
    assert any("batch=7" in reason for reason in reasons)
    assert not any("batch=4" in reason for reason in reasons)


def test_an_artifact_that_fails_is_a_verdict_not_a_crash(scale: tuple[Checkpoint, Reference]) -> None:
    def run(inputs: Arrays) -> dict[str, Array]:
        if len(inputs["x"]) == 7:
            raise RuntimeError("shape mismatch\nsecond line")
        return {"output": 2 * inputs["x"]}

    reasons = gate(scale, run)
    assert reasons == ["output at batch=7: the artifact failed with RuntimeError: shape mismatch"]


def test_an_answer_that_never_came_has_no_figures(
    scale: tuple[Checkpoint, Reference], capsys: pytest.CaptureFixture[str]
) -> None:
    def run(inputs: Arrays) -> dict[str, Array]:
        if len(inputs["x"]) == 7:
            raise RuntimeError("no")
        return {"output": 2 * inputs["x"]}

    checkpoint, reference = scale
    _print_table(run_gate(run, checkpoint.spec, checkpoint.samples, reference, "fp32", "test"))
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split()[2:] for line in lines if line.split()[1:2] == ["output"]}
    assert rows["batch=7"] == ["failed", "–", "–", "–", "–", "–"]
    assert rows["batch=3"] == ["passed", "0.00e+00", "0.00e+00", "1.000000", "100.0%", "0.000"]


def test_the_largest_error_of_the_table_is_that_of_real_data(scale: tuple[Checkpoint, Reference]) -> None:
    checkpoint, reference = scale

    def run(inputs: Arrays) -> dict[str, Array]:
        return {"output": 2 * inputs["x"] * np.float32(1 + 1e-5)}

    report = run_gate(run, checkpoint.spec, checkpoint.samples, reference, "fp32", "test")
    worst = _worst(report)
    assert 1e-5 < worst["max_abs"] < 1e-4  # outputs of up to 2, times 1e-5
    assert max(check.max_abs for check in report.checks) > 1e-3  # at a thousand times the samples
    assert worst["error_over_allowed"] == max(check.error_over_allowed for check in report.checks)


def test_mixed_up_rows_are_seen(scale: tuple[Checkpoint, Reference]) -> None:
    assert gate(scale, lambda inputs: {"output": 2 * inputs["x"][::-1]})


def test_a_random_model_is_refused_before_any_comparison() -> None:
    with pytest.raises(GateError, match="not deterministic in eval mode"):
        make_reference(checkpoint_of(Noisy))


def test_targets_that_fail_alike_end_with_their_common_reason(tmp_path: Path) -> None:
    outcomes = export_all(checkpoint_of(Noisy), [Target("torchscript"), Target("exported")], tmp_path)
    with pytest.raises(GateError, match="all targets failed") as caught:
        _finish(outcomes)
    assert caught.value.reason == "nondeterministic"


def test_rows_that_depend_on_their_neighbours_are_found() -> None:
    assert not make_reference(checkpoint_of(MixesRows)).batch_independent
    assert make_reference(checkpoint_of(Scale)).batch_independent


def broken_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchscript whose artifact answers 1.001 times too much."""
    record = FORMATS["torchscript"]

    def load(job: LoadJob) -> Loaded:
        loaded = record.load(job)
        return Loaded(lambda x: {k: v * np.float32(1.001) for k, v in loaded.call(x).items()}, loaded.engine)

    monkeypatch.setitem(FORMATS, "torchscript", __import__("dataclasses").replace(record, load=load))


def test_a_bundle_that_fails_is_kept_apart_and_the_old_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = checkpoint_of(Scale)
    good, _ = export(checkpoint, Target("torchscript"), tmp_path)
    before = (good.path / "manifest.json").read_bytes()
    with monkeypatch.context() as patched:
        broken_format(patched)
        with pytest.raises(GateError, match=r"output at .*times what is allowed.*\.rejected.*left as it is"):
            export(checkpoint, Target("torchscript"), tmp_path)
    assert (good.path / "manifest.json").read_bytes() == before
    rejected = good.path.with_name(good.path.name + ".rejected")
    assert msgspec.json.decode((rejected / "manifest.json").read_bytes())["passed"] is False
    export(checkpoint, Target("torchscript"), tmp_path)
    assert not rejected.exists()  # the good export that follows clears it
    assert sorted(path.name for path in tmp_path.iterdir()) == [good.path.name]


def test_one_target_that_fails_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken_format(monkeypatch)
    outcomes = export_all(checkpoint_of(Scale), [Target("torchscript"), Target("exported")], tmp_path)
    assert [outcome.bundle is not None for outcome in outcomes] == [False, True]
    assert isinstance(outcomes[0].error, GateError)


def test_a_crash_of_an_exporter_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(job: ExportJob) -> dict[str, object]:
        (job.folder / "half").write_text("written")
        raise RuntimeError("boom")

    record = __import__("dataclasses").replace(FORMATS["exported"], export=explode)
    monkeypatch.setitem(FORMATS, "exported", record)
    with pytest.raises(RuntimeError):
        export(checkpoint_of(Scale), Target("exported"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_validate_runs_the_gate_again(digits_bundles: Mapping[str, Path], digits_checkpoint: Checkpoint) -> None:
    for path in digits_bundles.values():
        recorded = validate(path)
        fresh = validate(path, checkpoint=digits_checkpoint)
        assert recorded.passed
        assert fresh.passed
        assert [check.case for check in recorded.checks] == [check.case for check in fresh.checks]


def test_a_report_of_an_older_deployer_says_what_to_do(digits_bundles: Mapping[str, Path], tmp_path: Path) -> None:
    bundle = read_bundle(digits_bundles["onnx"])
    folder = tmp_path / "old"
    shutil.copytree(bundle.path, folder)
    document = msgspec.json.decode((folder / "validation.json").read_bytes())
    assert document["schema_version"] == 2
    (folder / "validation.json").write_bytes(msgspec.json.encode(document | {"schema_version": 1}))
    write_manifest(folder, msgspec.structs.replace(bundle.manifest, sha256=file_hashes(folder)))
    with pytest.raises(BundleError, match="schema_version 1; this deployer reads 2: export the bundle again"):
        validate(folder)


def test_validate_refuses_another_models_checkpoint(digits_bundles: Mapping[str, Path]) -> None:
    with pytest.raises(GateError, match="give the checkpoint it was made from"):
        validate(digits_bundles["onnx"], checkpoint=checkpoint_of(Scale))


def test_reuse_keeps_what_an_export_would_make_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = checkpoint_of(Scale)
    first = export_all(checkpoint, [Target("exported")], tmp_path, reuse=True)[0]
    written = first.bundle.path.joinpath("manifest.json").stat().st_mtime_ns
    again = export_all(checkpoint, [Target("exported")], tmp_path, reuse=True)[0]
    assert again.report == first.report
    assert again.bundle.path.joinpath("manifest.json").stat().st_mtime_ns == written
    monkeypatch.setattr(sys.modules["deployer.export"], "tool_versions", lambda *names: {"torch": "0"})
    export_all(checkpoint, [Target("exported")], tmp_path, reuse=True)
    assert again.bundle.path.joinpath("manifest.json").stat().st_mtime_ns > written
