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
from deployer.errors import DeployerError, GateError
from deployer.files import publish_folder, staged_folder
from deployer.formats import ExportJob, Format, Target, get_format
from deployer.machine import architecture, cpu_features
from deployer.runtime import device_fault, open_for_gate, preflight
from deployer.validate import (
    Reference,
    ValidationReport,
    make_reference,
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
    checkpoint: Checkpoint, target: Target, output: str | Path, *, reference: Reference | None = None
) -> tuple[Bundle, ValidationReport]:
    """Export one target to `output/NAME-TARGET` and pass it through the gate.

    The folder appears whole or not at all; an older bundle of that name is replaced in one step. A bundle that fails
    the gate goes to `NAME-TARGET.rejected` instead, an older good one stays, and GateError says which case failed.
    Raises ExportError, MachineError, NotBuiltYetError, UsageError, ModelError as well.
    """
    record = get_format(target.format)
    record.check_target(target)
    reference = reference or make_reference(checkpoint)
    final = _place(checkpoint, target, output)
    rejected = final.with_name(final.name + REJECTED_SUFFIX)
    with staged_folder(final) as staging:
        report = _build(checkpoint, target, record, reference, staging)
        publish_folder(staging, final if report.passed else rejected)
    if not report.passed:
        kept = f"; the older '{final}' was left as it is" if final.exists() else ""
        more = f" (and {len(report.reasons) - 1} more)" if len(report.reasons) > 1 else ""
        raise GateError(f"{target.slug} failed the gate: {report.reasons[0]}{more}; see '{rejected}'{kept}")
    shutil.rmtree(rejected, ignore_errors=True)
    return read_bundle(final), report


def export_all(
    checkpoint: Checkpoint, targets: Sequence[Target], output: str | Path, *, reuse: bool = False
) -> list[Outcome]:
    """Export several targets; one that fails does not stop the others. The eager reference is computed once.

    With `reuse`, a bundle that is there, whole, passed and made from these weights and this model file for this spec by
    these versions is kept as it is.
    """
    for target in targets:
        get_format(target.format).check_target(target)
    outcomes = []
    reference: Reference | None = None
    for target in targets:
        try:
            if reuse and (current := current_bundle(checkpoint, target, output)):
                log.warning("'%s' is up to date; kept", current.path)
                outcomes.append(Outcome(target, current, read_report(current)))
                continue
            reference = reference or make_reference(checkpoint)
            bundle, report = export(checkpoint, target, output, reference=reference)
            outcomes.append(Outcome(target, bundle, report))
        except DeployerError as error:
            outcomes.append(Outcome(target, error=error))
    return outcomes


def current_bundle(checkpoint: Checkpoint, target: Target, output: str | Path) -> Bundle | None:
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
        and all(manifest.details.get(name) == value for name, value in choices.items())
        and (manifest.source.sha256, manifest.source.weight_set) == (checkpoint.sha256, checkpoint.weight_set)
        and (manifest.source.model, manifest.source.model_sha256) == (checkpoint.model, checkpoint.code_sha256())
        and without_found_ranges(manifest.spec, checkpoint.spec) == checkpoint.spec
        and manifest.tool_versions == tool_versions("numpy", *get_format(target.format).tools)
    )
    return bundle if same else None


def _place(checkpoint: Checkpoint, target: Target, output: str | Path) -> Path:
    return Path(output) / f"{checkpoint.spec.name}-{target.slug}"


def _build(
    checkpoint: Checkpoint, target: Target, record: Format, reference: Reference, staging: Path
) -> ValidationReport:
    spec, samples = reference.spec or checkpoint.spec, checkpoint.samples
    log.info("exporting %s", target.slug)
    details = record.export(ExportJob(checkpoint.build(), spec, samples, target, staging))
    for note in details.get("notes", ()):
        log.warning("%s: %s", target.slug, note)
    log.info("gate: %s on %d cases", target.slug, len(reference.outputs))
    with open_for_gate(staging, spec, target, details) as runner:
        report = run_gate(runner, spec, samples, reference, target.precision, runner.engine)
        executed = runner.executed
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
            batch_independent=reference.batch_independent,
            batch_reason=reference.batch_reason,
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
    return report
