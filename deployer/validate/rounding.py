"""What a lower precision does to the model itself, measured on the eager model: the share of an artifact's error that
no artifact of that precision is without.

Every value that the eager model computes is rounded to the precision on the way, weights and inputs too, each operator
still computing in float32: as tensor cores do it, with sums in float32. It runs on any CPU and knows no format.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deployer.checkpoint import Checkpoint
from deployer.checkpoint.eager import run_eager
from deployer.errors import DeployerError
from deployer.spec import Array, Arrays, ModelSpec
from deployer.validate.cases import is_float_pattern
from deployer.validate.reference import Reference, all_inputs

log = logging.getLogger(__name__)

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_STANDS_FOR_INFINITY = 1e30  # what masks are filled with; exporters write the largest number of the precision for it


def measure_rounding(checkpoint: Checkpoint, reference: Reference, precision: str) -> Reference:
    """`reference` with `rounding`, by case and output; the same object for a precision that rounds no more than it.

    Values that become NaN or infinite allow nothing: they are left out of the measure, and an artifact that answers so
    fails. Of the stress inputs that scale floats, those that take the model beyond the precision's largest number prove
    nothing about an artifact and are skipped, with the reason.
    """
    dtype = _DTYPES.get(precision)
    if dtype is None:
        return reference
    spec = reference.spec or checkpoint.spec
    model = checkpoint.build()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            _round_in_place(tensor, dtype)
    log.info("measuring what %s does to the eager model", precision)
    outputs, rounding, skipped = dict(reference.outputs), {}, dict(reference.skipped)
    for case, inputs in all_inputs(spec, checkpoint.samples):
        if case not in outputs:
            continue
        try:
            got = _run_rounded(model, spec, inputs, dtype)
        except DeployerError as error:
            log.debug("no measure of %s at %s: %s", precision, case, error)
            continue
        if is_float_pattern(case) and (name := _beyond(got, outputs[case])):
            del outputs[case]
            skipped[case] = (
                f"{precision} ends at {torch.finfo(dtype).max:g}: the eager model with every value rounded to it "
                f"answers output '{name}' with NaN or infinity"
            )
            continue
        rounding[case] = {name: _apart(got[name], array) for name, array in outputs[case].items()}
    return replace(reference, outputs=outputs, rounding=rounding, skipped=skipped)


def _run_rounded(model: nn.Module, spec: ModelSpec, inputs: Arrays, dtype: torch.dtype) -> dict[str, Array]:
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # whole layers as one operator: nothing inside would be rounded
    try:
        with sdpa_kernel(SDPBackend.MATH), _Rounded(dtype):
            return run_eager(model, spec, {name: _rounded_array(array, dtype) for name, array in inputs.items()})
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


class _Rounded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Rounds what every operator gives, and what it writes into. Views show what is rounded already."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor):
                    _round_in_place(tensor, self._dtype)
        return result


def _round_in_place(tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != torch.float32 or tensor.layout != torch.strided:
        return
    limit = torch.finfo(dtype).max
    large = tensor.isfinite() & (tensor.abs() >= _STANDS_FOR_INFINITY)
    tensor.copy_(torch.where(large, tensor.clamp(-limit, limit), tensor.to(dtype).to(torch.float32)))


def _rounded_array(array: Array, dtype: torch.dtype) -> Array:
    if array.dtype != np.float32:
        return array
    tensor = torch.tensor(array)
    _round_in_place(tensor, dtype)
    return tensor.numpy()


def _beyond(got: Arrays, expected: Arrays) -> str:
    """The first float output that has a value where the eager model answers and the rounded one does not, or ""."""
    for name, array in expected.items():
        same = array.dtype.kind == "f" and got[name].shape == array.shape
        if same and (np.isfinite(array) & ~np.isfinite(got[name])).any():
            return name
    return ""


def _apart(got: Array, expected: Array) -> float:
    """Largest difference of the values that both have; 0 where there is nothing to measure."""
    if expected.dtype.kind != "f" or got.shape != expected.shape:
        return 0.0
    both = np.isfinite(expected) & np.isfinite(got)
    return float(np.abs(got[both].astype(np.float64) - expected[both]).max(initial=0.0))
