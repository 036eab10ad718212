"""`deployer export`: one gated bundle a target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deployer.cli.console import emit_json, error_line, make_table, out, parse_json_object, working
from deployer.cli.intake import intake_options
from deployer.errors import DeployerError, GateError, SomeTargetsFailedError, UsageError, nearest, with_reason

if TYPE_CHECKING:
    from deployer.export import Outcome
    from deployer.formats import Target
    from deployer.validate import ValidationReport


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

    A bundle that fails the gate is kept apart as NAME.rejected. Without CHECKPOINT, deployer.yaml says what to export.
    """
    from deployer.export import export_all
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
    with working("reading the checkpoint"):
        loaded = load_described(
            found, folder, checkpoint, model=model, args=args, samples=samples, name=name,
            weights=weights, allow_globals=allow_globals, trust_pickle=trust_pickle,
        )  # fmt: skip
    with working(f"exporting {loaded.spec.name}"):
        outcomes = export_all(loaded, targets, output or Path(found.export.output), reuse=reuse)
    if as_json:
        emit_json(_document(outcomes))
    else:
        _print_table(outcomes)
    _finish(outcomes)


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
    return {
        "cases": len({check.case for check in report.checks}),
        "max_abs": max(check.max_abs for check in report.checks),
        "min_cosine": min(check.cosine for check in report.checks),
        "error_over_allowed": max(check.error_over_allowed for check in report.checks),
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
