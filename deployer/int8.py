"""INT8 of one target: the workbench's methods searched by measured error, the artifact written, scored and timed.

    accuracy gate   the metric's drop, or the fidelity of the outputs; of the candidates, and again of what was written
    speed gate      faster than the same format in fp32, or it is not worth its error

Everything that was tried is in the manifest, under `details.int8`.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from deployer.bundle import Bundle
from deployer.checkpoint import Checkpoint
from deployer.checkpoint.eager import run_eager
from deployer.errors import DeployerError, ExportError, RequestError, SampleError, first_line
from deployer.formats import ExportJob, Target, get_format
from deployer.quantize.calibration import Calibration, rows_of
from deployer.quantize.score import Call, Metric, Scorer
from deployer.quantize.search import Attempt, Found, Search
from deployer.quantize.speed import Speed, measure_speed
from deployer.quantize.workbench import Workbench
from deployer.runtime import Runner, device_fault, open_artifact, open_for_gate
from deployer.samples import sized_inputs
from deployer.spec import Arrays, ModelSpec, in_c_order
from deployer.validate import Reference, cases_for, compare, limits_for

log = logging.getLogger(__name__)

#: held-out samples that each attempt is scored on, at most: an export scores dozens of attempts
SCORED_SAMPLES = 256

#: attempts that the manifest lists; the others are counted
_LISTED = 60


@dataclass(frozen=True)
class Int8:
    """What the user gave for INT8: calibration data, and how accuracy and speed are judged.

    `metric` None: by fidelity. `max_drop` is absolute, in the metric's unit. `keep_slow` keeps an artifact that is not
    faster than fp32.
    """

    calibration: Calibration
    metric: Metric | None = None
    max_drop: float = 0.01
    keep_slow: bool = False

    def request(self) -> dict[str, Any]:
        """What a bundle was asked to be, for the manifest: a bundle is up to date while this stays as it was."""
        return {
            "calibration": self.calibration.source,
            "calibration_sha256": self.calibration.sha256,
            "samples": self.calibration.count,
            "metric": self.metric.reference if self.metric else None,
            "metric_sha256": self.metric.sha256 if self.metric else None,
            "max_drop": self.max_drop if self.metric else None,
            "keep_slow": self.keep_slow,
        }


@dataclass(frozen=True)
class Quantized:
    """A written artifact: the format's details with `int8` filled in, and why it is rejected ("" where it is not)."""

    details: dict[str, Any]
    rejected: str = ""
    reason: str = ""


def quantize(
    checkpoint: Checkpoint,
    target: Target,
    int8: Int8,
    reference: Reference,
    folder: Path,
    fp32: Bundle | None = None,
) -> Quantized:
    """Write the INT8 artifact of `target` into `folder`: of the candidates that are accurate the first that is faster
    than fp32. Where none is, the last stays, rejected. `fp32` is an up-to-date bundle of the same target in fp32, where
    there is one.

    Raises GateError where no candidate is accurate, ExportError where the model cannot be quantized.
    """
    record = get_format(target.format)
    spec = reference.spec or checkpoint.spec
    if record.workbench is None:
        raise ExportError(f"format '{record.name}' has no way to quantize")
    _check_ranges(int8.calibration, spec)
    eager = partial(run_eager, checkpoint.build(), spec)
    inputs = _scored_inputs(int8.calibration, spec)
    scorer = Scorer(spec, [*inputs, checkpoint.samples], eager, metric=int8.metric, max_drop=int8.max_drop)
    cases = _Cases(spec, checkpoint.samples, reference)
    bench = record.workbench(ExportJob(checkpoint.build(), spec, checkpoint.samples, target, folder), int8.calibration)
    search = Search(
        bench,
        score=lambda trial: scorer(trial.call),
        harm=lambda trial: scorer(trial.call, with_metric=False),
        confirm=lambda trial: cases.failing(trial.call),
    )
    before_writing = set(folder.iterdir())
    written: Quantized | None = None
    rejected: list[tuple[str, Quantized]] = []
    with _Baseline(checkpoint, target, spec, fp32) as baseline:
        for found in search.candidates():
            if written is not None:
                log.warning("%s: rejected (%s); trying %s", target.slug, written.rejected, found.trial.method)
                _clear(folder, before_writing)
            written = _write(found, bench, search, folder, spec, target, int8, scorer, checkpoint.samples, baseline)
            if not written.rejected:
                return written
            rejected.append((str(found.trial.method), written))
    if written is None:
        raise search.failure()
    return replace(written, rejected=_why_rejected(rejected))


def _why_rejected(rejected: Sequence[tuple[str, Quantized]]) -> str:
    told = "; ".join(f"{method}: {entry.rejected}" for method, entry in rejected)
    if all(entry.reason == "not_faster" for _, entry in rejected):
        return f"INT8 is not faster than fp32: {told}; export in fp32, or add --keep-slow"
    return told


def summary(found: Mapping[str, Any]) -> str:
    """`details.int8` of a manifest in one line."""
    kept = found["kept_float"]
    layers = f"{found.get('layers', len(found['quantized']))} layers in int8, {len(kept)} kept in float"
    names = f" ({', '.join(kept)})" if kept else ""
    speed = found["speed"]
    times = (
        f"{speed['ratio']:.2f}× fp32" if speed["ratio"] is not None else f"speed not measured ({speed['not_measured']})"
    )
    metric = found["written"]["metric"]
    accuracy = f"SQNR {found['written']['sqnr_db']:.1f} dB" + (
        f", metric {metric:.4g} (fp32 {found['metric_fp32']:.4g})" if metric is not None else ""
    )
    return f"{found['method']}, {layers}{names}, {accuracy}, {times}"


def _check_ranges(calibration: Calibration, spec: ModelSpec) -> None:
    """The gate may have found ranges of ids that the checkpoint's own spec does not declare."""
    for batch in (*calibration.batches, *calibration.held_out):
        try:
            spec.check_inputs(batch)
        except RequestError as error:
            raise SampleError(f"calibration data '{calibration.source}' does not fit the model: {error}") from error


def _scored_inputs(calibration: Calibration, spec: ModelSpec) -> list[Arrays]:
    """Held-out batches up to SCORED_SAMPLES samples; what the observers saw, where nothing was held out."""
    chosen: list[Arrays] = []
    samples = 0
    for batch in calibration.held_out or calibration.batches:
        if samples >= SCORED_SAMPLES:
            break
        chosen.append(batch)
        samples += rows_of(spec, batch)
    return chosen


class _Cases:
    """The gate's ordinary cases, asked of a candidate before it is written: a search ends with what the gate passes."""

    def __init__(self, spec: ModelSpec, samples: Arrays, reference: Reference) -> None:
        self._spec = spec
        self._samples = samples
        self._reference = reference
        self._scales = reference.scales()

    def failing(self, run: Call) -> str:
        """Why the gate would refuse the model, or ""."""
        for case in cases_for(self._spec):
            inputs = {name: in_c_order(array) for name, array in case.inputs(self._spec, self._samples).items()}
            try:
                got = run(inputs)
            except Exception as error:  # noqa: BLE001 - a quantized model may fail in any way; it is a verdict
                return f"at {case.name} it fails with {type(error).__name__}: {first_line(error)}"
            for name, expected in self._reference.outputs[case.name].items():
                found = compare(case.name, name, got[name], expected, limits_for("int8"), 0.0, self._scales[name])
                if not found.passed:
                    return f"output '{name}' at {case.name}: {found.reason}"
        return ""


class _Baseline:
    """The same target in fp32, exported when it is first needed and open until the end."""

    def __init__(self, checkpoint: Checkpoint, target: Target, spec: ModelSpec, bundle: Bundle | None) -> None:
        self._checkpoint = checkpoint
        self._target = msgspec.structs.replace(target, precision="fp32")
        self._spec = spec
        self._bundle = bundle
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._runner: Runner | None = None

    def __enter__(self) -> _Baseline:
        return self

    def __exit__(self, *_: object) -> None:
        if self._runner is not None:
            self._runner.close()
        if self._folder is not None:
            self._folder.cleanup()

    def runner(self) -> Runner:
        if self._runner is not None:
            return self._runner
        if self._bundle is not None:
            manifest = self._bundle.manifest
            self._runner = open_artifact(self._bundle.path, manifest.spec, self._target, manifest.details)
            return self._runner
        log.info("exporting %s to compare the speed with", self._target.slug)
        self._folder = tempfile.TemporaryDirectory(prefix="deployer-fp32-")
        place = Path(self._folder.name)
        record = get_format(self._target.format)
        job = ExportJob(self._checkpoint.build(), self._spec, self._checkpoint.samples, self._target, place)
        self._runner = open_artifact(place, self._spec, self._target, record.export(job))
        return self._runner


def _write(
    found: Found,
    bench: Workbench,
    search: Search,
    folder: Path,
    spec: ModelSpec,
    target: Target,
    int8: Int8,
    scorer: Scorer,
    samples: Arrays,
    baseline: _Baseline,
) -> Quantized:
    """Write one candidate; score and time what was written."""
    log.info("writing %s: %s over %d layers", target.slug, found.trial.method, len(found.trial.layers))
    details = bench.write(found.trial)
    log.info("scoring what was written")
    with open_for_gate(folder, spec, target, details) as runner:
        score = scorer(runner)
        speed = _speed(runner, spec, target, details, samples, baseline)
    own = dict(details.get("int8", {}))
    own |= {
        "method": str(found.trial.method),
        "settings": msgspec.to_builtins(found.trial.method),
        "quantized": list(found.trial.layers),
        "kept_float": sorted(found.trial.kept_float),
        "metric_fp32": scorer.before,
        "whole_model": msgspec.to_builtins(found.before),
        "simulated": msgspec.to_builtins(found.score),
        "written": msgspec.to_builtins(score),
        "damage": msgspec.to_builtins(found.damage),
        "speed": msgspec.to_builtins(speed),
        "tried": [_row(attempt) for attempt in search.attempts[:_LISTED]],
        "attempts": len(search.attempts),
        "request": int8.request(),
        "calibration_notes": list(int8.calibration.notes),
        "notes": list(found.trial.notes),
    }
    details = {**details, "int8": own}
    if not score.passed:
        return Quantized(details, f"what was written is not accurate enough: {score.reason}", "accuracy_lost")
    log.info("%s", speed)
    if not speed.faster and not int8.keep_slow:
        return Quantized(details, str(speed), "not_faster")
    return Quantized(details)


def _row(attempt: Attempt) -> dict[str, Any]:
    """An attempt for the manifest, in brief."""
    score = attempt.score
    return {
        "method": attempt.method,
        "layers": attempt.layers,
        "float_layers": len(attempt.kept_float),
        "passed": bool(score and score.passed),
        "sqnr_db": score.sqnr_db if score else None,
        "cosine": min((entry.cosine for entry in score.outputs.values()), default=None) if score else None,
        "metric": score.metric if score else None,
        "reason": score.reason if score else attempt.error,
    }


def _speed(
    runner: Runner, spec: ModelSpec, target: Target, details: dict[str, Any], samples: Arrays, baseline: _Baseline
) -> Speed:
    if not runner.executed:
        return Speed(not_measured=device_fault(target, details))
    sizes = {name: dim.typical for name, dim in spec.dims.items()}
    try:
        arrays = sized_inputs(spec, samples, sizes)
        other = baseline.runner()
        return measure_speed(partial(runner, arrays), partial(other, arrays), sizes)
    except DeployerError as error:  # no fp32 artifact to compare with is no fault of this one
        return Speed(sizes, not_measured=f"the same target in fp32 cannot be run: {error}")


def _clear(folder: Path, keep: set[Path]) -> None:
    """Remove what an earlier candidate wrote."""
    for path in set(folder.iterdir()) - keep:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
