"""`deployer export`: one gated bundle a target."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deployer.cli.console import emit_json, error_line, make_table, out, parse_json_object, working
from deployer.cli.intake import intake_options
from deployer.errors import DeployerError, GateError, SomeTargetsFailedError, UsageError, nearest, with_reason
from deployer.references import split_reference

if TYPE_CHECKING:
    from deployer.export import Outcome
    from deployer.formats import Target
    from deployer.recipe import ExportEntry
    from deployer.validate import ValidationReport

log = logging.getLogger(__name__)

_MAX_DROP = 0.01


@click.command("export")
@click.argument("checkpoint", required=False, type=click.Path(path_type=Path))
@click.option(
    "--format", "formats", multiple=True, metavar="FORMAT", help="torchscript, exported, aoti, onnx, trt; repeatable."
)
@click.option("--precision", metavar="PRECISION", help="fp32, fp16, bf16 or int8.  [default: fp32]")
@click.option(
    "--compile", "compile_mode", metavar="MODE", help="default, reduce-overhead or max-autotune (exported, aoti)."
)
@click.option("--device", metavar="DEVICE", help="cpu, cuda or tensorrt.  [default: the format's own]")
@click.option("--builder", metavar="BUILDER", help="onnx-rtx or torch-trt (trt).  [default: by what the machine has]")
@click.option(
    "--gpu-arch", "gpu_archs", multiple=True, metavar="ARCH", help="GPU generation, e.g. sm86 (trt); repeatable."
)
@click.option("--calibration", metavar="DATA", help="Real inputs for int8: .npz, .npy, .safetensors, module:function.")
@click.option(
    "--metric",
    metavar="FUNCTION",
    help="module:function: a number of predict() over labelled data, higher is better (int8).",
)
@click.option("--max-drop", type=float, metavar="DROP", help="Of the metric, absolute (int8).  [default: 0.01]")
@click.option("--keep-slow", is_flag=True, help="Keep an int8 artifact that is not faster than fp32.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder for the bundles.  [default: build]")
@click.option("--model", help="path.py:factory or package.module:factory.")
@click.option("--args", "args_json", metavar="JSON", help="Arguments of the factory, as a JSON object.")
@click.option("--samples", help="Real inputs: .npz, .npy, .safetensors or module:function.")
@intake_options
@click.option("--name", help="Name of the model, where neither recipe nor checkpoint gives one.")
@click.option(
    "--recipe", type=click.Path(path_type=Path), help="Recipe file.  [default: deployer.yaml where it stands]"
)
@click.option(
    "--reuse", is_flag=True, help="Keep bundles that were made from these weights and model file by these versions."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    checkpoint: Path | None,
    formats: tuple[str, ...],
    precision: str | None,
    compile_mode: str | None,
    device: str | None,
    builder: str | None,
    gpu_archs: tuple[str, ...],
    calibration: str | None,
    metric: str | None,
    max_drop: float | None,
    keep_slow: bool,
    output: Path | None,
    model: str | None,
    args_json: str | None,
    samples: str | None,
    weights: str | None,
    allow_globals: tuple[str, ...],
    trust_pickle: bool,
    name: str | None,
    recipe: Path | None,
    reuse: bool,
    as_json: bool,
) -> None:
    """Export CHECKPOINT (a checkpoint of any kind), one bundle a target, each passed through the gate.

    A bundle that fails the gate is kept apart as NAME.rejected, and so is an int8 artifact that is not faster than fp32
    in the same format. Without CHECKPOINT, deployer.yaml says what to export.
    """
    from deployer.export import export_all
    from deployer.int8 import Int8
    from deployer.quantize.calibration import read_calibration
    from deployer.quantize.score import load_metric
    from deployer.recipe import find_recipe, load_described

    args = parse_json_object(args_json, "--args")
    found, folder = find_recipe(recipe)
    entry = found.export
    targets = _targets(
        formats or entry.formats,
        precision or entry.precision,
        compile_mode or entry.compile,
        device or entry.device,
        builder or entry.builder,
        gpu_archs or entry.gpu_archs,
    )
    asked = _int8_settings(targets, entry, folder, calibration, metric, max_drop, keep_slow=keep_slow)
    with working("reading the checkpoint"):
        loaded = load_described(
            found, folder, checkpoint, model=model, args=args, samples=samples, name=name,
            weights=weights, allow_globals=allow_globals, trust_pickle=trust_pickle,
        )  # fmt: skip
    int8 = None
    if asked is not None:
        with working("reading the calibration data"):
            scored_by = load_metric(asked.metric) if asked.metric is not None else None
            data = read_calibration(asked.calibration, loaded.spec)
        for note in data.notes:
            log.warning("%s", note)
        int8 = Int8(data, scored_by, asked.max_drop, asked.keep_slow)
    with working(f"exporting {loaded.spec.name}"):
        outcomes = export_all(loaded, targets, output or Path(found.export.output), reuse=reuse, int8=int8)
    if as_json:
        emit_json(_document(outcomes))
    else:
        _print_table(outcomes)
    _finish(outcomes)


@dataclass(frozen=True)
class _Int8Settings:
    calibration: str
    metric: str | None
    max_drop: float
    keep_slow: bool


def _int8_settings(
    targets: Sequence[Target],
    entry: ExportEntry,
    folder: Path | None,
    calibration: str | None,
    metric: str | None,
    max_drop: float | None,
    *,
    keep_slow: bool,
) -> _Int8Settings | None:
    """What goes with --precision int8, flags before the recipe, or None for other precisions. Raises UsageError."""
    from deployer.recipe import resolve_in

    if not any(target.precision == "int8" for target in targets):
        for given, flag in (
            (calibration is not None, "--calibration"),
            (metric is not None, "--metric"),
            (max_drop is not None, "--max-drop"),
            (keep_slow, "--keep-slow"),
        ):
            if given:
                raise UsageError(
                    f"{flag} goes with --precision int8, which was not asked for; add it or leave {flag} out"
                )
        return None
    base = folder or Path()
    calibration = calibration if calibration is not None else resolve_in(base, entry.calibration)
    metric = metric if metric is not None else resolve_in(base, entry.metric)
    max_drop = max_drop if max_drop is not None else entry.max_drop
    if not calibration:
        raise UsageError(
            "--precision int8 needs real inputs to take ranges from (nothing is made up); add --calibration with a "
            ".npz, .npy, .safetensors or module:function"
        )
    if max_drop is not None and metric is None:
        raise UsageError("--max-drop is the drop of a metric; add --metric module:function, or leave it out")
    if max_drop is not None and not (math.isfinite(max_drop) and max_drop >= 0):
        raise UsageError(f"--max-drop is {max_drop}; a number of 0 or more, in the metric's unit, is expected")
    if metric is not None:
        split_reference(metric)
    drop = max_drop if max_drop is not None else _MAX_DROP
    return _Int8Settings(calibration, metric, drop, keep_slow or entry.keep_slow)


def _targets(
    formats: Sequence[str],
    precision: str,
    compile_mode: str | None,
    device: str | None,
    builder: str | None,
    gpu_archs: Sequence[str],
) -> list[Target]:
    """Every flag checked, and what this machine lacks found, before any work is done. `builder` and `gpu_archs` are for
    those of the formats that have them."""
    from deployer.formats import COMPILE_MODES, FORMATS, PRECISIONS, Target, get_format

    if not formats:
        raise UsageError(f"no format given; add --format {', '.join(FORMATS)}")
    for value, valid, flag in ((precision, PRECISIONS, "--precision"), (compile_mode, COMPILE_MODES, "--compile")):
        if value is not None and value not in valid:
            raise UsageError(f"{flag} {value} is unknown{nearest(value, valid)}")
    records = [get_format(name) for name in dict.fromkeys(formats)]
    for given, flag, takes in (
        (builder, "--builder", any(record.builders for record in records)),
        (gpu_archs, "--gpu-arch", any(record.gpu_archs for record in records)),
    ):
        if given and not takes:
            raise UsageError(f"{flag} does not go with --format {', '.join(formats)}; it goes with trt")
    targets = [
        Target(
            record.name,
            precision,
            device or record.devices[0],
            compile_mode,
            builder if record.builders else None,
            tuple(gpu_archs) if record.gpu_archs else (),
        )
        for record in records
    ]
    for record, target in zip(records, targets, strict=True):
        record.check_target(target)
    return targets


def _document(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    rows = []
    for outcome in outcomes:
        row: dict[str, Any] = {"target": outcome.target.slug, "passed": outcome.bundle is not None}
        if outcome.bundle is not None and outcome.report is not None:
            row |= {"bundle": str(outcome.bundle.path), "executed": outcome.bundle.manifest.executed}
            row |= {"engine": outcome.report.engine, **_worst(outcome.report)}
            row |= {
                "batch_independent": outcome.report.batch_independent,
                "batch_reason": outcome.report.batch_reason,
                "notes": list(outcome.report.notes),
            }
            if outcome.target.precision == "int8":
                row["int8"] = outcome.bundle.manifest.details["int8"]
        else:
            row |= _failure(outcome.error)
        rows.append(row)
    return {"schema_version": 1, "targets": rows}


def _failure(error: DeployerError | None) -> dict[str, Any]:
    """The error in one line, its class of reason and the advice that goes with that class."""
    if error is None:
        return {"error": "", "reason": "", "advice": "", "exit_code": 0}
    return {"error": str(error), "reason": error.reason, "advice": error.advice, "exit_code": error.exit_code}


def _worst(report: ValidationReport) -> dict[str, Any]:
    judged = [check for check in report.checks if check.kind != "structure"]  # those figures judge nothing
    return {
        "cases": len({check.case for check in report.checks}),
        # of real data: a stress input a thousand times too large makes errors as large, and no user meets them
        "max_abs": max(check.max_abs for check in judged if check.case not in report.case_noise),
        "min_cosine": min(check.cosine for check in judged),
        "error_over_allowed": max(check.error_over_allowed for check in judged),
    }


def _print_table(outcomes: Sequence[Outcome]) -> None:
    numbers = ("cases", "max abs error", "min cosine", "error / allowed", "size MB")
    table = make_table("target", "gate", *numbers, "bundle", numbers=numbers)
    for outcome in outcomes:
        if outcome.bundle is None or outcome.report is None:
            reason = outcome.error.reason if outcome.error else ""
            table.add_row(outcome.target.slug, "[red]failed[/]", "", "", "", "", "", reason.replace("_", " "))
            continue
        worst = _worst(outcome.report)
        size_bytes = sum(file.stat().st_size for file in outcome.bundle.path.iterdir())
        table.add_row(
            outcome.target.slug,
            "[green]passed[/]" if outcome.bundle.manifest.executed else "[yellow]built, not executed[/]",
            str(worst["cases"]),
            f"{worst['max_abs']:.2e}",
            f"{worst['min_cosine']:.6f}",
            f"{worst['error_over_allowed']:.3f}",
            f"{size_bytes / 1e6:.2f}",
            str(outcome.bundle.path),
        )
    out.print(table)
    _print_int8(outcomes)


def _print_int8(outcomes: Sequence[Outcome]) -> None:
    """What INT8 did to each target that has it: accuracy is the metric where one was given, else the fidelity."""
    numbers = ("int8 layers", "in float", "whole model", "as written", "min cosine", "speed against fp32")
    table = make_table("target", "method", *numbers, numbers=numbers)
    for outcome in outcomes:
        if outcome.bundle is None or outcome.target.precision != "int8":
            continue
        found = outcome.bundle.manifest.details["int8"]
        speed, written = found["speed"], found["written"]
        measured = speed["ratio"] is not None
        table.add_row(
            outcome.target.slug,
            found["method"],
            str(found.get("layers", len(found["quantized"]))),
            str(len(found["kept_float"])),
            _accuracy(found["whole_model"], found["metric_fp32"]),
            _accuracy(written, found["metric_fp32"]),
            f"{min(entry['cosine'] for entry in written['outputs'].values()):.4f}",
            f"{speed['ratio']:.2f}× ({speed['low']:.2f}–{speed['high']:.2f})" if measured else "not measured",
        )
    if table.row_count:
        out.print(table)


def _accuracy(score: dict[str, Any], metric_fp32: float | None) -> str:
    if score["metric"] is None or metric_fp32 is None:
        return f"{score['sqnr_db']:.1f} dB"
    return f"{score['metric']:.4g} (fp32 {metric_fp32:.4g})"


def _finish(outcomes: Sequence[Outcome]) -> None:
    """One line for each failure; all failed alike: their own exit code, some failed: 3."""
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if not errors:
        return
    if len(outcomes) == 1:
        raise errors[0]
    for outcome in outcomes:
        if outcome.error is not None:
            error_line(f"{outcome.target.slug}: {with_reason(outcome.error)}")
    names = ", ".join(outcome.target.slug for outcome in outcomes if outcome.error is not None)
    if len(errors) < len(outcomes):
        raise SomeTargetsFailedError(f"{len(errors)} of {len(outcomes)} targets failed: {names}")
    alike = len({(type(error), error.reason) for error in errors}) == 1
    last = (type(errors[0]) if alike else GateError)(f"all targets failed: {names}")
    last.reason = errors[0].reason if alike else ""
    raise last
