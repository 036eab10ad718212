"""Checkpoint + target → gated bundle."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from deployer.bundle import (
    REJECTED_SUFFIX,
    VALIDATION,
    Bundle,
    Machine,
    Manifest,
    Source,
    file_hashes,
    read_bundle,
    write_manifest,
    write_samples,
)
from deployer.checkpoint import Checkpoint
from deployer.errors import DeployerError, GateError, UsageError
from deployer.files import publish_folder, staged_folder
from deployer.formats import ExportJob, Format, Target, get_format
from deployer.int8 import Int8, Quantized, quantize
from deployer.machine import architecture, cpu_features
from deployer.runtime import device_fault, open_for_gate, preflight
from deployer.validate import (
    Reference,
    ValidationReport,
    make_reference,
    measure_rounding,
    read_report,
    run_gate,
    without_found_ranges,
    write_references,
)
from deployer.versions import tool_versions

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What became of one target: a bundle, or the error that ended it (with the folder of a rejected bundle)."""

    target: Target
    bundle: Bundle | None = None
    report: ValidationReport | None = None
    error: DeployerError | None = None


def export(
    checkpoint: Checkpoint,
    target: Target,
    output: str | Path,
    *,
    reference: Reference | None = None,
    int8: Int8 | None = None,
) -> tuple[Bundle, ValidationReport]:
    """Export one target to `output/NAME-TARGET` and pass it through the gate. `int8` goes with that precision, which
    needs it.

    The folder appears whole or not at all; an older bundle of that name is replaced in one step. A bundle that fails
    the gate goes to `NAME-TARGET.rejected` instead, an older good one stays, and GateError says which case failed.
    Raises ExportError, MachineError, NotBuiltYetError, UsageError, ModelError as well.
    """
    record = get_format(target.format)
    record.check_target(target)
    _check_int8(target, int8)
    reference = reference or make_reference(checkpoint)
    final = _place(checkpoint, target, output)
    rejected = final.with_name(final.name + REJECTED_SUFFIX)
    fp32 = None
    if int8 is not None:
        fp32 = current_bundle(checkpoint, msgspec.structs.replace(target, precision="fp32"), output)
    with staged_folder(final) as staging:
        report, reason = _build(checkpoint, target, record, reference, staging, int8, fp32)
        publish_folder(staging, final if report.passed else rejected)
    if not report.passed:
        kept = f"; the older '{final}' was left as it is" if final.exists() else ""
        more = f" (and {len(report.reasons) - 1} more)" if len(report.reasons) > 1 else ""
        raise GateError(
            f"{target.slug} failed the gate: {report.reasons[0]}{more}; see '{rejected}'{kept}", reason=reason
        )
    shutil.rmtree(rejected, ignore_errors=True)
    return read_bundle(final), report


def export_all(
    checkpoint: Checkpoint,
    targets: Sequence[Target],
    output: str | Path,
    *,
    reuse: bool = False,
    int8: Int8 | None = None,
) -> list[Outcome]:
    """Export several targets; one that fails does not stop the others. The eager reference is computed once.

    With `reuse`, a bundle that is there, whole, passed and made from these weights and this model file for this spec by
    these versions is kept as it is.
    """
    for target in targets:
        get_format(target.format).check_target(target)
        _check_int8(target, int8)
    outcomes = []
    reference: Reference | None = None
    for target in targets:
        try:
            if reuse and (current := current_bundle(checkpoint, target, output, int8=int8)):
                log.warning("'%s' is up to date; kept", current.path)
                outcomes.append(Outcome(target, current, read_report(current)))
                continue
            reference = reference or make_reference(checkpoint)
            bundle, report = export(checkpoint, target, output, reference=reference, int8=int8)
            outcomes.append(Outcome(target, bundle, report))
        except DeployerError as error:
            outcomes.append(Outcome(target, error=error))
    return outcomes


def current_bundle(
    checkpoint: Checkpoint, target: Target, output: str | Path, *, int8: Int8 | None = None
) -> Bundle | None:
    """The bundle of this target in `output` if an export now would make the same one, else None."""
    try:
        bundle = read_bundle(_place(checkpoint, target, output))
        if bundle.manifest.executed:
            preflight(bundle.manifest)
        read_report(bundle)
    except DeployerError:
        return None
    manifest = bundle.manifest
    choices = get_format(target.format).choices(target)
    same = (
        manifest.passed
        and manifest.target == target
        and (manifest.executed or bool(device_fault(target, manifest.details)))
        and (int8 is None or manifest.details.get("int8", {}).get("request") == int8.request())
        and all(manifest.details.get(name) == value for name, value in choices.items())
        and (manifest.source.sha256, manifest.source.weight_set) == (checkpoint.sha256, checkpoint.weight_set)
        and (manifest.source.model, manifest.source.model_sha256) == (checkpoint.model, checkpoint.code_sha256())
        and without_found_ranges(manifest.spec, checkpoint.spec) == checkpoint.spec
        and manifest.tool_versions == tool_versions("numpy", *get_format(target.format).tools)
    )
    return bundle if same else None


def _place(checkpoint: Checkpoint, target: Target, output: str | Path) -> Path:
    return Path(output) / f"{checkpoint.spec.name}-{target.slug}"


def _check_int8(target: Target, int8: Int8 | None) -> None:
    if (target.precision == "int8") != (int8 is not None):
        raise UsageError(
            f"{target.slug} needs calibration data: add --calibration"
            if int8 is None
            else f"calibration data goes with --precision int8, not with {target.slug}"
        )


def _build(
    checkpoint: Checkpoint,
    target: Target,
    record: Format,
    reference: Reference,
    staging: Path,
    int8: Int8 | None,
    fp32: Bundle | None,
) -> tuple[ValidationReport, str]:
    """The report and, where INT8 was rejected for itself, the class of reason."""
    spec, samples = reference.spec or checkpoint.spec, checkpoint.samples
    reference = measure_rounding(checkpoint, reference, target.precision)
    log.info("exporting %s", target.slug)
    if int8 is not None:
        quantized = quantize(checkpoint, target, int8, reference, staging, fp32)
    else:
        quantized = Quantized(record.export(ExportJob(checkpoint.build(), spec, samples, target, staging)))
    details = quantized.details
    for note in details.get("notes", ()):
        log.warning("%s: %s", target.slug, note)
    log.info("gate: %s on %d cases", target.slug, len(reference.outputs))
    with open_for_gate(staging, spec, target, details) as runner:
        report = run_gate(runner, spec, samples, reference, target.precision, runner.engine)
        executed = runner.executed
    if quantized.rejected:
        report = msgspec.structs.replace(report, passed=False, reasons=(quantized.rejected, *report.reasons))
    for note in report.notes:
        log.info("%s", note)
    write_samples(staging, samples, reference.outputs["samples"])
    write_references(staging, reference)
    (staging / VALIDATION).write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    write_manifest(
        staging,
        Manifest(
            spec=spec,
            target=target,
            passed=report.passed,
            batch_independent=report.batch_independent,
            batch_reason=report.batch_reason,
            padding=dict(reference.padding),
            sha256=file_hashes(staging),
            source=Source(
                checkpoint.source,
                checkpoint.sha256,
                checkpoint.model,
                checkpoint.code_sha256(),
                checkpoint.weight_set,
                checkpoint.step,
                checkpoint.intake,
            ),
            machine=Machine(architecture(), cpu_features() if record.native_code else ()),
            tool_versions=tool_versions("numpy", *record.tools),
            details=details,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            executed=executed,
        ),
    )
    return report, quantized.reason
