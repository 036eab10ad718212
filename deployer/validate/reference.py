"""The eager model's answers to every case, and what was learnt about the model on the way."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file
from torch import nn

from deployer.bundle import REFERENCES, Bundle
from deployer.checkpoint import Checkpoint
from deployer.checkpoint.eager import run_eager
from deployer.errors import DeployerError, GateError, ModelError
from deployer.spec import Array, Arrays, ModelSpec, in_c_order
from deployer.validate.batching import measure_batching
from deployer.validate.cases import cases_for, stress_base, stress_cases
from deployer.validate.compare import NOISE_CEILING, allowed_scale, difference, rms
from deployer.validate.padding import measure_padding
from deployer.validate.ranges import with_id_ranges
from deployer.validate.selfcheck import (
    ModelFacts,
    changed_tensors,
    check_builds,
    check_modes,
    check_repeats,
    check_stateless,
    most_apart,
)

log = logging.getLogger(__name__)

_NUDGES = 2
_INDEX_WORDS = ("out of range", "out of bounds", "out-of-bounds", "is out of", "invalid index", "index error")


@dataclass(frozen=True)
class Reference:
    """The eager model's answers, by case and output.

    `noise`        by output: what the eager model moves by when a row runs in a batch, and its inputs by one ulp
    `case_noise`   by stress case and output: the same there
    `rounding`     by case and output: what the eager model moves by when it is rounded to an artifact's precision
    `errors`       stress cases in which the eager model ends with an index error, which must stay an error
    `skipped`      stress cases that nothing can be held to, with the reason
    `padding`      by Dim with a mask: why requests must not be padded along it, "" where they may
    `spec`         the checkpoint's, with the ranges of ids that the model was found to take
    """

    outputs: Mapping[str, Arrays]
    noise: dict[str, float]
    batch_independent: bool
    batch_reason: str = ""
    case_noise: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    facts: ModelFacts = field(default_factory=ModelFacts)
    spec: ModelSpec | None = None
    rounding: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    padding: Mapping[str, str] = field(default_factory=dict)

    def scales(self) -> dict[str, float]:
        """Largest root mean square of each output over the ordinary cases."""
        ordinary = [arrays for case, arrays in self.outputs.items() if case not in self.case_noise]
        return {name: max(rms(arrays[name]) for arrays in ordinary) for name in self.noise}

    def noise_at(self, case: str) -> Mapping[str, float]:
        """The noise of each output in a case: no less than in the ordinary ones."""
        own = self.case_noise.get(case, {})
        return {name: max(value, own.get(name, 0.0)) for name, value in self.noise.items()}

    def rounding_at(self, case: str) -> Mapping[str, float]:
        """The rounding of each output in a case; in one that was not measured, the most of the ordinary ones."""
        if case in self.rounding:
            return self.rounding[case]
        ordinary = [moved for name, moved in self.rounding.items() if name not in self.case_noise]
        return {name: max((moved[name] for moved in ordinary), default=0.0) for name in self.noise}


def all_inputs(spec: ModelSpec, samples: Arrays) -> Iterator[tuple[str, dict[str, Array]]]:
    """(name, inputs) of every case that is answered, ordinary ones first; made one at a time."""
    for case in cases_for(spec):
        yield case.name, case.inputs(spec, samples)
    for stress in stress_cases(spec, samples):
        yield stress.name, dict(stress.arrays)


def make_reference(checkpoint: Checkpoint) -> Reference:
    """Check the eager model against itself and run it on every case.

    Raises GateError where it answers one input in two ways, carries state between calls, stays in train mode or is
    built anew each time; ModelError where it does not run at a size that its spec claims, or answers NaN alone.
    """
    samples = checkpoint.samples
    model, fresh = checkpoint.build(), checkpoint.build()
    check_builds(model, fresh)
    check_modes(model)
    first = check_repeats(model, fresh, checkpoint.spec, samples)
    left = check_modes(model)
    spec = with_id_ranges(model, checkpoint.spec, samples)
    log.info("running the eager model on %d cases", len(cases_for(spec)) + len(stress_cases(spec, samples)))
    ordinary = _ordinary_outputs(model, spec, samples)
    _refuse_nothing_but_nan(ordinary)
    nudged = _nudged_noise(model, spec, samples, first.outputs)
    unstable = tuple(name for name, value in nudged.items() if not np.isfinite(value))
    nudged |= dict.fromkeys(unstable, 0.0)  # no measure, so nothing is loosened by it
    batching = measure_batching(lambda arrays: run_eager(model, spec, arrays), spec, samples, nudged)
    noise = {tensor.name: max(nudged[tensor.name], batching.noise.get(tensor.name, 0.0)) for tensor in spec.outputs}
    padding = measure_padding(lambda arrays: run_eager(model, spec, arrays), spec, samples, noise)
    for dim, reason in padding.items():
        if reason:
            log.warning("requests of other '%s' will not share a run: %s", dim, reason)
    reference = Reference(ordinary, noise, batching.independent, batching.reason, spec=spec, padding=padding)
    reference = _with_stress(reference, model, spec, samples)
    check_stateless(model, spec, samples, first.outputs, fresh)
    if spec.batch is not None and not batching.independent:
        log.warning("requests for '%s' will not share a run: %s", spec.name, batching.reason)
    facts = ModelFacts(
        first.mutated_inputs,
        first.aliased_outputs,
        changed_tensors(model, fresh),
        tuple(dict.fromkeys((*left, *check_modes(model)))),
        _unused_inputs(reference, model, spec, samples),
        unstable,
    )
    return replace(reference, facts=facts)


def _ordinary_outputs(model: nn.Module, spec: ModelSpec, samples: Arrays) -> dict[str, Arrays]:
    outputs: dict[str, Arrays] = {}
    for case in cases_for(spec):
        inputs = case.inputs(spec, samples)
        try:
            outputs[case.name] = run_eager(model, spec, inputs)
            spec.check_outputs(outputs[case.name], spec.check_inputs(inputs))
        except DeployerError as error:
            raise ModelError(f"the eager model does not fit its own spec at {case.name}: {error}") from error
    return outputs


def _refuse_nothing_but_nan(ordinary: Mapping[str, Arrays]) -> None:
    """Raises ModelError for an output that is NaN everywhere in every ordinary case: any broken artifact equals it."""
    for name in ordinary["samples"]:
        arrays = [outputs[name] for outputs in ordinary.values() if outputs[name].size]
        if arrays and all(array.dtype.kind == "f" and np.isnan(array).all() for array in arrays):
            raise ModelError(
                f"the eager model's output '{name}' is NaN everywhere, for every sample and at every size, so nothing "
                "can be held to it; give other samples, or a checkpoint of before its training diverged"
            )


# --------------------------------------------------------------------------------------------------------------- noise


def nudge(arrays: Arrays, turn: int) -> dict[str, Array]:
    """Every float but zero moved by one unit in the last place, up or down by a seeded coin; all else as it is."""
    coins = np.random.default_rng(turn)
    moved = {}
    for name, array in arrays.items():
        if array.dtype.kind != "f":
            moved[name] = array
            continue
        up = coins.integers(0, 2, array.shape).astype(bool)
        infinity = array.dtype.type(np.inf)
        with np.errstate(over="ignore", under="ignore"):
            stepped = np.where(up, np.nextafter(array, infinity), np.nextafter(array, -infinity))
        moved[name] = np.where(array == 0, array, stepped)  # a zero is meant, and its neighbours are denormal
    return moved


def _nudged_noise(model: nn.Module, spec: ModelSpec, inputs: Arrays, outputs: Arrays) -> dict[str, float]:
    """Largest difference of each float output under nudged inputs; infinite where its shape or its NaNs move."""
    noise = {tensor.name: 0.0 for tensor in spec.outputs}
    if not any(array.dtype.kind == "f" for array in inputs.values()):
        return noise
    for turn in range(_NUDGES):
        moved = run_eager(model, spec, nudge(inputs, turn))
        for name, array in outputs.items():
            if moved[name].shape != array.shape:
                noise[name] = float("inf")
            elif array.dtype.kind in "fc":
                noise[name] = max(noise[name], difference(moved[name], array))
    return noise


# -------------------------------------------------------------------------------------------------------------- stress


def _with_stress(reference: Reference, model: nn.Module, spec: ModelSpec, samples: Arrays) -> Reference:
    """The reference with the stress cases that an artifact can be held to."""
    outputs, case_noise = dict(reference.outputs), {}
    errors, skipped = {}, {}
    scales = reference.scales()
    for case in stress_cases(spec, samples):
        try:
            answer = run_eager(model, spec, case.arrays)
            spec.check_outputs(answer, spec.check_inputs(case.arrays))
            noise = _nudged_noise(model, spec, case.arrays, answer)
        except DeployerError as error:
            if any(word in str(error).lower() for word in _INDEX_WORDS):
                errors[case.name] = str(error)
            else:
                skipped[case.name] = f"the eager model gives no answer: {error}"
            continue
        if moving := _moving(answer, noise, scales):
            skipped[case.name] = moving
            continue
        outputs[case.name], case_noise[case.name] = answer, noise
    return replace(reference, outputs=outputs, case_noise=case_noise, errors=errors, skipped=skipped)


def _moving(answer: Arrays, noise: Mapping[str, float], scales: Mapping[str, float]) -> str:
    """Why the eager model's answer is no measure: it jumps when the inputs move by one ulp. Or nothing."""
    for name, array in answer.items():
        scale = allowed_scale(array, scales[name])
        if noise[name] > NOISE_CEILING * scale:
            share = f"by {noise[name] / scale:.2g} of its rms" if scale and np.isfinite(noise[name]) else "in kind"
            return f"the eager model's own output '{name}' moves {share} when inputs move by one unit in the last place"
    return ""


def _unused_inputs(reference: Reference, model: nn.Module, spec: ModelSpec, samples: Arrays) -> tuple[str, ...]:
    """Inputs of several, whose stress cases all left every output as it was."""
    if len(spec.inputs) < 2:
        return ()
    base = run_eager(model, spec, stress_base(spec, samples))
    unused = []
    for tensor in spec.inputs:
        own = [case for case in stress_cases(spec, samples) if case.name.startswith(f"{tensor.name} ")]
        changed = [
            case
            for case in own
            if not np.array_equal(case.arrays[tensor.name], stress_base(spec, samples)[tensor.name])
        ]
        answers = [reference.outputs.get(case.name) for case in changed]
        if changed and all(answer is not None and not most_apart(answer, base)[0] for answer in answers):
            unused.append(tensor.name)
    return tuple(unused)


# --------------------------------------------------------------------------------------------------------------- files


def write_references(folder: Path, reference: Reference) -> None:
    """`references.safetensors`: the eager outputs of every case, so that the gate can run again anywhere."""
    arrays = {f"{case}/{name}": array for case, outputs in reference.outputs.items() for name, array in outputs.items()}
    save_file({name: in_c_order(array) for name, array in arrays.items()}, folder / REFERENCES)


def read_outputs(bundle: Bundle) -> dict[str, dict[str, Array]]:
    """What `write_references` wrote, by case and output. Raises GateError where a case of this deployer is absent."""
    outputs: dict[str, dict[str, Array]] = {}
    for key, array in load_file(bundle.path / REFERENCES).items():
        case, _, name = key.rpartition("/")
        outputs.setdefault(case, {})[name] = array
    if lacking := [case.name for case in cases_for(bundle.spec) if case.name not in outputs]:
        raise GateError(
            f"'{bundle.path}' records no reference for the case '{lacking[0]}'; another deployer made it: export it "
            "again, or give --checkpoint"
        )
    return {
        case: {tensor.name: arrays[tensor.name] for tensor in bundle.spec.outputs} for case, arrays in outputs.items()
    }
