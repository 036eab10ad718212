"""Intake of checkpoints: the only place that knows file layouts and wrapper prefixes."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.numpy import load_file
from torch import nn

from deployer.checkpoint.eager import check_signature
from deployer.checkpoint.folder import RECORD, SAMPLES, WEIGHTS, read_record, save_checkpoint
from deployer.checkpoint.probe import probe_outputs, probe_spec
from deployer.checkpoint.weights import StateDict, load_weights, read_weights
from deployer.errors import CheckpointError, ModelError, SpecError, first_line
from deployer.files import sha256_of
from deployer.references import is_file_reference, load_reference, source_sha256, split_reference
from deployer.samples import check_samples, read_samples
from deployer.spec import Arrays, ModelSpec

__all__ = ["Checkpoint", "build_model", "load_checkpoint", "probe_spec", "save_checkpoint"]


@dataclass(frozen=True)
class Checkpoint:
    """Weights, the reference that builds their model, spec, samples, provenance. `build()` gives a fresh model."""

    model: str
    args: Mapping[str, Any]
    state: StateDict | None
    spec: ModelSpec
    samples: Arrays
    source: str
    sha256: str
    folder: Path | None = None
    step: int | None = None
    weight_set: str = "raw"
    renamed: Mapping[str, str] = field(default_factory=dict)

    def build(self) -> nn.Module:
        """A new model with these weights: float32, eval mode, gradients off."""
        model = build_model(self.model, self.args, self.folder)
        if self.state is not None:
            load_weights(model, self.state, f"'{self.source}'")
        return model.float().eval().requires_grad_(False)

    def code_sha256(self) -> str:
        """Hex sha256 of the file that builds the model."""
        return source_sha256(self.model, self.folder)


def build_model(reference: str, args: Mapping[str, Any], folder: Path | None = None) -> nn.Module:
    """Call the factory `reference` with `args`. Raises ModelError when it does not give an nn.Module."""
    factory = load_reference(reference, folder)
    try:
        inspect.signature(factory).bind(**args)
    except TypeError as error:
        raise ModelError(f"'{reference}' does not take these arguments: {error}") from error
    except ValueError:
        pass  # builtins have no signature; the call below tells
    try:
        model = factory(**args)
    except Exception as error:
        raise ModelError(f"'{reference}' failed with {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"'{reference}' returned a {type(model).__name__}; a torch.nn.Module is expected")
    return model


def load_checkpoint(
    path: str | Path | None = None,
    *,
    model: str | None = None,
    args: Mapping[str, Any] | None = None,
    spec: ModelSpec | None = None,
    samples: str | Path | Arrays | None = None,
) -> Checkpoint:
    """Read a checkpoint; what is given here wins over what a self-describing folder says.

    `path`     a checkpoint folder, a `.safetensors` or weights-only `.pt`/`.pth` file, or None when the factory brings
               its own weights
    `model`    `path.py:factory` or `package.module:factory`, called with `args`
    `spec`     inputs, outputs (probed where absent) and dynamic axes
    `samples`  real inputs: named arrays, a `.npz`/`.safetensors` file, or `module:function`

    The weights are fitted to the model at once, so a wrong checkpoint fails here. Raises InputError.
    """
    source = Path(path) if path is not None else None
    if source is not None and source.is_dir():
        checkpoint = _from_folder(source, model, args, spec, samples)
    else:
        checkpoint = _from_parts(source, model, args or {}, spec, samples)
    module = checkpoint.build()
    check_signature(module, checkpoint.spec)
    if not checkpoint.spec.outputs:
        complete = probe_outputs(module, checkpoint.spec, checkpoint.samples)
        checkpoint = Checkpoint(**{**vars(checkpoint), "spec": complete})
    return checkpoint


def _from_folder(
    folder: Path,
    model: str | None,
    args: Mapping[str, Any] | None,
    spec: ModelSpec | None,
    samples: str | Path | Arrays | None,
) -> Checkpoint:
    if not (folder / RECORD).is_file():
        raise CheckpointError(f"'{folder}' holds no {RECORD}; give a checkpoint folder or a weights file")
    record = read_record(folder)
    if model is None:
        if not is_file_reference(record.model):
            raise ModelError(
                f"'{folder}' asks for the model '{record.model}'; code that a checkpoint names runs only when you "
                f"name it too: add --model {record.model}"
            )
        if Path(split_reference(record.model)[0]).name != split_reference(record.model)[0]:
            raise ModelError(f"'{folder / RECORD}' names the model file '{record.model}' outside the folder")
    spec = spec or record.spec
    return Checkpoint(
        model=model or record.model,
        args=record.args if args is None else args,
        state=read_weights(folder / WEIGHTS),
        spec=spec,
        samples=_samples(spec, samples if samples is not None else load_file(folder / SAMPLES)),
        source=str(folder),
        sha256=record.sha256[WEIGHTS],
        folder=None if model is not None else folder,
        step=record.step,
        weight_set=record.weight_set,
    )


def _from_parts(
    path: Path | None,
    model: str | None,
    args: Mapping[str, Any],
    spec: ModelSpec | None,
    samples: str | Path | Arrays | None,
) -> Checkpoint:
    if path is not None and not path.exists():
        raise CheckpointError(f"no checkpoint at '{path}'; give a checkpoint folder or a weights file")
    missing = [name for name, value in (("model", model), ("spec", spec), ("samples", samples)) if value is None]
    if model is None or spec is None or samples is None:
        raise SpecError(
            f"{', '.join(missing)} missing: a weights file alone says neither its model nor its inputs; "
            "run `deployer init` and fill deployer.yaml, or give a checkpoint folder"
        )
    state = read_weights(path) if path is not None else None
    digest = sha256_of(path) if path is not None else _factory_digest(model, args)
    return Checkpoint(
        model=model, args=args, state=state, spec=spec, samples=_samples(spec, samples),
        source=str(path) if path is not None else model, sha256=digest,
    )  # fmt: skip


def _factory_digest(model: str, args: Mapping[str, Any]) -> str:
    """A hash of the weights that the factory itself brings: names, dtypes, shapes and bytes in the order of names."""
    digest = hashlib.sha256(json.dumps(dict(args), sort_keys=True, default=str).encode())
    for name, tensor in sorted(build_model(model, args).state_dict().items()):
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _samples(spec: ModelSpec, samples: str | Path | Arrays) -> Arrays:
    arrays = read_samples(samples) if isinstance(samples, str | Path) else samples
    return check_samples(spec, arrays)
