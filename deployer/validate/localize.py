"""Where an artifact leaves the eager model: the first operator whose inputs agree and whose output does not.

    deployer validate BUNDLE --checkpoint CHECKPOINT --localize

The checkpoint's model is exported anew and run operator by operator; the artifact is taken apart as far as its format
allows. Operators that the artifact fused away have no value there and are looked through. From an output that departs
the way leads back along operands that depart, to an operator whose operands all agree.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from deployer.bundle import Bundle, read_bundle
from deployer.checkpoint import Checkpoint
from deployer.checkpoint.eager import call_model
from deployer.errors import DeployerError, GateError, UsageError
from deployer.formats import ExportJob, LoadJob, get_format
from deployer.formats.traceable import export_program
from deployer.formats.trail import Inside, Step, eager_steps
from deployer.spec import Array, Arrays, in_c_order
from deployer.validate.compare import TOLERANCES, Tolerance, compare
from deployer.validate.gate import ValidationReport
from deployer.validate.reference import all_inputs

_LISTED = 4


class Departure(msgspec.Struct, frozen=True):
    """Where the artifact leaves the eager model in one case.

    `operator` and `node` are torch.export's; `module` is the path in the user's model, "" for its root; `line` is the
    user's. All empty where no operator could be named; `explanation` then says why. `compared` counts the operators
    whose values were held against each other, of `operators`.
    """

    case: str
    explanation: str
    operator: str = ""
    node: str = ""
    module: str = ""
    line: str = ""
    compared: int = 0
    operators: int = 0

    def __str__(self) -> str:
        if not self.node:
            return f"at {self.case}: {self.explanation}"
        place = f" in module '{self.module}'" if self.module else ""
        line = f" ({self.line})" if self.line else ""
        return f"at {self.case}: {self.operator}{place}{line}: {self.explanation}"


def localize(path: str | Path, report: ValidationReport, checkpoint: Checkpoint) -> Departure:
    """The operator at which the bundle departs, in the first case of `report` that it answers wrongly.

    Raises UsageError for a report that passed or that holds no wrong answer and for INT8, ExportError where
    torch.export does not take the model or the artifact cannot be taken apart, GateError for another model's
    checkpoint.
    """
    bundle = read_bundle(path)
    if bundle.manifest.target.precision == "int8":
        raise UsageError(
            f"'{bundle.path}' is INT8, which departs at every layer by design; its manifest (details.int8) names the "
            "layers that were tried and kept in float"
        )
    case = _wrong_case(bundle, report)
    record = get_format(bundle.manifest.target.format)
    if record.look is None:
        raise UsageError(f"an artifact of format '{record.name}' cannot be taken apart")
    if checkpoint.sha256 != bundle.manifest.source.sha256:
        raise GateError(f"'{checkpoint.source}' is not the checkpoint that '{bundle.path}' was made from")
    samples, _ = bundle.samples()
    arrays = {name: in_c_order(array) for name, array in dict(all_inputs(bundle.spec, samples))[case].items()}
    with tempfile.TemporaryDirectory() as folder:
        job = ExportJob(checkpoint.build(), bundle.spec, samples, bundle.manifest.target, Path(folder))
        program = export_program(job).program
        tolerance = TOLERANCES[bundle.manifest.target.precision]
        if astray := _export_astray(job, program, arrays, tolerance, case):
            return astray
        load = LoadJob(bundle.path, bundle.spec, bundle.manifest.target, bundle.manifest.details)
        inside: Inside = record.look(load, program, arrays)
    return _first_departure(inside, tolerance, case)


def _wrong_case(bundle: Bundle, report: ValidationReport) -> str:
    """The first case in which an output is there and wrong."""
    failed = [check for check in report.checks if not check.passed]
    if not failed:
        raise UsageError(f"'{bundle.path}' passes the gate; there is nothing to localise")
    answered = [check.case for check in failed if check.kind == "answer" and "artifact failed with" not in check.reason]
    if not answered:
        raise UsageError(f"'{bundle.path}' gives no wrong answer to localise, it fails: {report.reasons[0]}")
    return answered[0]


@dataclass(frozen=True)
class _Verdict:
    """`agrees` None: the artifact has no comparable value for the step."""

    agrees: bool | None
    reason: str = ""


def _judge(step: Step, values: tuple[Array, ...] | None, tolerance: Tolerance) -> _Verdict:
    if values is None:
        return _Verdict(None)
    pairs = list(zip(values, step.values, strict=False))
    if len(values) > len(step.values) or any(got.shape != expected.shape for got, expected in pairs):
        return _Verdict(None)  # another layout of the same thing, not another value
    for got, expected in pairs:
        check = compare("", step.name, got.astype(expected.dtype), expected, tolerance)
        if not check.passed:
            return _Verdict(False, check.reason)
    return _Verdict(True)


def _first_departure(inside: Inside, tolerance: Tolerance, case: str) -> Departure:
    verdicts = {step.name: _judge(step, inside.values.get(step.name), tolerance) for step in inside.steps}
    compared = sum(verdict.agrees is not None for verdict in verdicts.values())
    counts: dict[str, Any] = {"compared": compared, "operators": len(inside.steps)}
    note = f"; {inside.note}" if inside.note else ""
    origins = _origins(inside.steps, verdicts)
    if not origins:
        explanation = (
            f"none of {compared} operators that could be compared departs alone: the fault lies between operators (a "
            f"fused kernel, the outputs' order or names, the file){note}"
        )
        return Departure(case, explanation, **counts)
    step = origins[0]
    unseen = _looked_through(step, inside.steps, verdicts)
    operands = f"what feeds it agrees with eager ({unseen} between have no value of their own in the artifact)"
    return Departure(
        case,
        f"{operands if unseen else 'its operands agree with eager'}, its output does not: "
        f"{verdicts[step.name].reason}{note}",
        step.operator,
        step.name,
        step.module,
        str(step.line or ""),
        **counts,
    )


def _origins(steps: list[Step], verdicts: Mapping[str, _Verdict]) -> list[Step]:
    """Departing steps none of whose operands departs and on which a departing end of the graph rests, in order;
    operators without a value are looked through."""
    tainted: dict[str, bool] = {}
    origins = []
    for step in steps:
        below = any(tainted.get(name, False) for name in step.inputs)
        agrees = verdicts[step.name].agrees
        tainted[step.name] = agrees is False or (agrees is None and below)
        if agrees is False and not below:
            origins.append(step)
    used = {name for step in steps for name in step.inputs}
    live = {step.name for step in steps if step.name not in used}  # the ends: what no other step takes
    for step in reversed(steps):
        if step.name in live and verdicts[step.name].agrees is not True:
            live.update(step.inputs)
    return [step for step in origins if step.name in live]


def _looked_through(step: Step, steps: list[Step], verdicts: Mapping[str, _Verdict]) -> str:
    """The operators without a value in the artifact on which `step` rests directly, in words; or nothing."""
    by_name = {entry.name: entry for entry in steps}
    unseen: dict[str, Step] = {}
    waiting = list(step.inputs)
    while waiting:
        entry = by_name.get(waiting.pop())
        if entry is not None and entry.name not in unseen and verdicts[entry.name].agrees is None:
            unseen[entry.name] = entry
            waiting += entry.inputs
    words = [
        entry.operator + (f" in '{entry.module}'" if entry.module else "") for entry in steps if entry.name in unseen
    ]
    return ", ".join(words[-_LISTED:])


# ----------------------------------------------------------------------------------------------- the export is at fault


def _export_astray(
    job: ExportJob, program: torch.export.ExportedProgram, arrays: Arrays, tolerance: Tolerance, case: str
) -> Departure | None:
    """The first module that torch.export's own graph answers otherwise than the eager module, or None: a branch on a
    size, say, that export settled for good."""
    eager = _module_outputs(job.model, arrays)
    steps = eager_steps(program, job.spec, arrays)
    compared = 0
    for module, expected in eager.items():
        own = [step for step in steps if step.module == module and step.values[0].shape == expected.shape]
        if not own:
            continue
        compared += 1
        checks = [compare("", module, step.values[0].astype(expected.dtype), expected, tolerance) for step in own]
        if any(check.passed for check in checks):
            continue
        last = own[-1]
        explanation = f"the graph that torch.export makes is not the model any more: {checks[-1].reason}"
        return Departure(
            case, explanation, last.operator, last.name, module, str(last.line or ""), compared, len(steps)
        )
    return None


def _module_outputs(model: nn.Module, arrays: Arrays) -> dict[str, Array]:
    """The tensor that each module called once returns, innermost first, by path ("" is the root)."""
    seen: dict[str, list[Array]] = {}

    def hook(path: str) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor) and output.layout == torch.strided:
                seen.setdefault(path, []).append(output.detach().contiguous().clone().numpy())

        return keep

    handles = [module.register_forward_hook(hook(path)) for path, module in model.named_modules()]
    try:
        call_model(model, arrays)
    except DeployerError:
        return {}
    finally:
        for handle in handles:
            handle.remove()
    return {path: values[0] for path, values in seen.items() if len(values) == 1}
