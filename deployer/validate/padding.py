"""Does padding leave an answer alone? Real rows at several lengths, alone and padded, on the eager model."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from deployer.errors import DeployerError
from deployer.padding import cut_outputs, pad_inputs
from deployer.samples import sized_inputs
from deployer.spec import Array, Arrays, ModelSpec, in_c_order
from deployer.validate.compare import TOLERANCES, compare

Run = Callable[[Arrays], dict[str, Array]]

_ROWS = 4


def measure_padding(run: Run, spec: ModelSpec, samples: Arrays, noise: Mapping[str, float]) -> dict[str, str]:
    """By Dim that the spec gives a mask: why it cannot be padded, "" where it can.

    Rows of real samples are cut to each of the Dim's sizes up to the typical one, run as they are, and padded to the
    typical and to the largest size; the answers, cut back, must agree within the fp32 tolerance and the noise.
    """
    return {dim: _why_not(run, spec, samples, noise, dim) for dim in spec.masks}


def _why_not(run: Run, spec: ModelSpec, samples: Arrays, noise: Mapping[str, float], name: str) -> str:
    dim = spec.dims[name]
    sizes = {other: entry.typical for other, entry in spec.dims.items()}
    if spec.batch is not None:
        sizes[spec.batch] = min(max(_ROWS, spec.dims[spec.batch].min), spec.dims[spec.batch].max)
    for short in (size for size in dim.sizes() if size <= dim.typical):
        arrays = _unmasked(sized_inputs(spec, samples, sizes | {name: short}), spec, name)
        try:
            expected = run(arrays)
            for long in sorted({dim.typical, dim.max} - {short}):
                padded = {key: in_c_order(array) for key, array in pad_inputs(spec, arrays, {name: long}).items()}
                got = cut_outputs(spec, run(padded), sizes | {name: short}, [name])
                for output, array in expected.items():
                    found = compare(
                        "", output, got[output], array, TOLERANCES["fp32"], noise.get(output, 0.0)
                    )  # fmt: skip
                    if not found.passed:
                        return f"output '{output}' at {name}={short} is another when padded to {long}: {found.reason}"
        except DeployerError as error:
            return f"it does not run padded: {error}"
    return ""


def _unmasked(arrays: Arrays, spec: ModelSpec, dim: str) -> dict[str, Array]:
    """Every position switched on, so that the padding alone is off."""
    mask = spec.masks[dim]
    return {name: array * 0 + 1 if name == mask else array for name, array in arrays.items()}
