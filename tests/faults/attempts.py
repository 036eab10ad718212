"""Ways to put something before the gate; each gives the reasons of its refusal, none where the gate lets it pass."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deployer.checkpoint.eager import run_eager
from deployer.errors import DeployerError
from deployer.export import export
from deployer.formats import ExportJob, Loaded, Target, get_format
from deployer.runtime import Runner, open_artifact
from deployer.spec import Array, Arrays
from deployer.validate import make_reference, measure_rounding, run_gate
from tests.faults.models import checkpoint_of, reference_of

Attempt = Callable[[], list[str]]
Answers = dict[str, Array]


def _gate(model: str, run: Callable[[Arrays], Answers] | Runner, precision: str = "fp32") -> list[str]:
    reference = measure_rounding(checkpoint_of(model), reference_of(model), precision)
    assert reference.spec is not None
    report = run_gate(run, reference.spec, checkpoint_of(model).samples, reference, precision, "seeded")
    assert report.passed == (not report.reasons)
    return list(report.reasons)


def answers(model: str, change: Callable[[Answers, Arrays], Any], precision: str = "fp32") -> Attempt:
    """An artifact that answers what `change` makes of the right outputs and the inputs (an array: the sole output)."""

    def attempt() -> list[str]:
        eager, spec = checkpoint_of(model).build(), checkpoint_of(model).spec

        def run(arrays: Arrays) -> Answers:
            changed = change(run_eager(eager, spec, arrays), arrays)
            return changed if isinstance(changed, dict) else {spec.outputs[0].name: changed}

        return _gate(model, run, precision)

    return attempt


def output(model: str, change: Callable[[Array], Array], precision: str = "fp32") -> Attempt:
    """An artifact whose first output is changed."""

    def first(outputs: Answers, _: Arrays) -> Answers:
        name = next(iter(outputs))
        return outputs | {name: change(outputs[name])}

    return answers(model, first, precision)


def inputs(model: str, change: Callable[[dict[str, Array]], dict[str, Array]]) -> Attempt:
    """An artifact that answers other inputs than it was given."""

    def attempt() -> list[str]:
        eager, spec = checkpoint_of(model).build(), checkpoint_of(model).spec
        return _gate(model, lambda arrays: run_eager(eager, spec, change(dict(arrays))))

    return attempt


def module(model: str, alter: Callable[[Any], nn.Module | None], precision: str = "fp32") -> Attempt:
    """An artifact that is the model after `alter` (which changes it in place, or gives another)."""

    def attempt() -> list[str]:
        eager, spec = checkpoint_of(model).build(), checkpoint_of(model).spec
        with torch.no_grad():
            other = alter(eager) or eager
        return _gate(model, lambda arrays: run_eager(other, spec, arrays), precision)

    return attempt


def artifact(
    model: str,
    format_name: str,
    alter: Callable[[Any], None] = lambda eager: None,
    spoil: Callable[[Path], None] = lambda folder: None,
) -> Attempt:
    """A real artifact of a format, made of the model after `alter`, its files after `spoil`."""

    def attempt() -> list[str]:
        checkpoint, reference, target = checkpoint_of(model), reference_of(model), Target(format_name)
        assert reference.spec is not None
        eager = checkpoint.build()
        with torch.no_grad(), tempfile.TemporaryDirectory() as place:
            alter(eager)
            folder = Path(place)
            job = ExportJob(eager, reference.spec, checkpoint.samples, target, folder)
            details = get_format(format_name).export(job)
            spoil(folder)
            try:
                with open_artifact(folder, reference.spec, target, details) as runner:
                    return _gate(model, runner)
            except DeployerError as error:
                return [str(error)]

    return attempt


def exported(model: str, format_name: str) -> Attempt:
    """The whole way: export as a user does it."""

    def attempt() -> list[str]:
        try:
            with tempfile.TemporaryDirectory() as place:
                export(checkpoint_of(model), Target(format_name), place, reference=reference_of(model))
        except DeployerError as error:
            return [str(error)]
        return []

    return attempt


def traced(model: str) -> Attempt:
    """A plain `torch.jit.trace` of the samples, as careless scripts make it."""

    def attempt() -> list[str]:
        checkpoint = checkpoint_of(model)
        tensors = tuple(torch.tensor(array) for array in checkpoint.samples.values())
        frozen = torch.jit.freeze(torch.jit.trace(checkpoint.build(), tensors, check_trace=False))
        return _gate(
            model, lambda arrays: {"output": frozen(*(torch.tensor(array) for array in arrays.values())).numpy()}
        )

    return attempt


class Unchecked(Runner):
    """An artifact behind a runtime that checks nothing."""

    def __call__(self, arrays: Arrays) -> Answers:
        outputs: Answers = self._call(dict(arrays))
        return outputs


def behind(kind: type[Runner], model: str) -> Attempt:
    """The right model, behind this runtime."""

    def attempt() -> list[str]:
        eager, reference = checkpoint_of(model).build(), reference_of(model)
        assert reference.spec is not None
        spec = reference.spec
        known = [tensor.name for tensor in spec.inputs]

        def call(arrays: Arrays) -> Answers:
            return run_eager(eager, spec, {name: arrays[name] for name in known if name in arrays})

        return _gate(model, kind(spec, Loaded(call, "seeded")))

    return attempt


def reference(model: str) -> Attempt:
    """The model itself, before anything is exported."""

    def attempt() -> list[str]:
        try:
            make_reference(checkpoint_of(model))
        except DeployerError as error:
            return [str(error)]
        return []

    return attempt
