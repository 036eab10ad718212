"""Intake of checkpoints: the only place that knows file layouts and wrapper prefixes.

sources.py     what a file or folder is, by its content; the weight sets in it
torch_file.py, safetensors_file.py, dcp.py, hugging_face.py, programs.py     one kind of source each
pickles.py     pickles read without running them
tensors.py     tensors that stay in their file until they are needed
sets.py        raw, averaged and other sets of weights
keys.py        fitting names; weights.py: filling a model strictly; coverage.py: the account of it
folder.py      the self-describing folder
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.numpy import load_file
from torch import nn

from deployer.checkpoint import hugging_face
from deployer.checkpoint.coverage import Coverage, Intake
from deployer.checkpoint.eager import check_signature
from deployer.checkpoint.folder import RECORD, SAMPLES, WEIGHTS, read_record, save_checkpoint
from deployer.checkpoint.probe import probe_outputs, probe_spec
from deployer.checkpoint.safetensors_file import read_safetensors
from deployer.checkpoint.sources import Chosen, open_weights
from deployer.checkpoint.tensors import StoredTensor
from deployer.checkpoint.weights import load_weights
from deployer.errors import CheckpointError, DeployerError, ModelError, SpecError, first_line
from deployer.files import publish_folder, staged_folder
from deployer.references import is_file_reference, load_reference, source_sha256, split_reference
from deployer.samples import check_samples, read_samples
from deployer.spec import Arrays, ModelSpec

__all__ = [
    "Checkpoint", "Coverage", "Intake", "build_filled", "build_model", "describe_model", "import_checkpoint",
    "load_checkpoint", "probe_spec", "save_checkpoint",
]  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """Weights that stay in their file: by name, with names stored under others, and the set before it was split."""

    weights: Mapping[str, StoredTensor]
    aliases: Mapping[str, str]
    whole: Mapping[str, StoredTensor] | None = None

    def load_into(self, model: nn.Module, source: str) -> Coverage:
        return load_weights(model, self.weights, source, aliases=self.aliases, whole=self.whole)


@dataclass(frozen=True)
class Checkpoint:
    """Weights, the reference that builds their model, spec, samples, provenance. `build()` gives a fresh model.

    The weights stay in their file: a Checkpoint is small, and each build reads them into its model anew. A file that
    changed in between is refused.
    """

    model: str
    args: Mapping[str, Any]
    state: Stored | None
    spec: ModelSpec
    samples: Arrays
    source: str
    sha256: str
    folder: Path | None = None
    step: int | None = None
    weight_set: str = "raw"
    intake: Intake | None = None

    def build(self) -> nn.Module:
        """A new model with these weights: float32, eval mode, gradients off."""
        return self.build_with_coverage()[0]

    def build_with_coverage(self) -> tuple[nn.Module, Coverage | None]:
        """The same, and what became of every key; None where the factory brings its own weights."""
        model = build_model(self.model, self.args, self.folder)
        coverage = None if self.state is None else self.state.load_into(model, f"'{self.source}'")
        return model.float().eval().requires_grad_(False), coverage

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
    except DeployerError:
        raise
    except (Exception, SystemExit) as error:
        raise ModelError(f"'{reference}' failed with {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"'{reference}' returned a {type(model).__name__}; a torch.nn.Module is expected")
    return model


def build_filled(
    reference: str,
    args: Mapping[str, Any],
    path: Path | None,
    *,
    weights: str | None = None,
    allow_globals: Collection[str] = (),
    trust_pickle: bool = False,
) -> nn.Module:
    """The model of a factory with the weights of `path`, float32 and in eval mode. Raises InputError."""
    module = build_model(reference, args)
    if path is not None:
        chosen = open_weights(path, weights=weights, allow_globals=allow_globals, trust_pickle=trust_pickle)
        _stored(chosen).load_into(module, chosen.source)
    return module.float().eval()


def describe_model(path: Path) -> tuple[str, dict[str, Any]] | None:
    """Reference and arguments of the model that a Hugging Face folder describes; None for anything else."""
    if path.is_dir() and not (path / RECORD).is_file() and hugging_face.is_folder(path):
        return hugging_face.describe_model(path)
    return None


def load_checkpoint(
    path: str | Path | None = None,
    *,
    model: str | None = None,
    args: Mapping[str, Any] | None = None,
    spec: ModelSpec | None = None,
    samples: str | Path | Arrays | None = None,
    weights: str | None = None,
    allow_globals: Collection[str] = (),
    trust_pickle: bool = False,
) -> Checkpoint:
    """Read a checkpoint; what is given here wins over what a self-describing folder says.

    `path`     a checkpoint folder, a weights file of any kind in docs/checkpoints.md, a Hugging Face or a
               torch.distributed folder, or None when the factory brings its own weights
    `model`    `path.py:factory` or `package.module:factory`, called with `args`
    `spec`     inputs, outputs (probed where absent) and dynamic axes
    `samples`  real inputs: named arrays, a `.npz`/`.safetensors` file, or `module:function`
    `weights`  which set of a file that holds several: "raw" (the default where there is one), "ema" or its place
    `allow_globals`  full names of pickled classes beside the weights to skip; nothing of them runs
    `trust_pickle`   unpickle the file with all that it asks for: this runs code that the file chooses

    The weights are fitted to the model at once, so a wrong checkpoint fails here. Raises InputError, MachineError.
    """
    source = Path(path) if path is not None else None
    if source is not None and (source / RECORD).is_file():
        checkpoint = _from_folder(source, model, args, spec, samples, weights)
    else:
        model, args = _completed(source, model, args)
        chosen = None
        if source is not None:
            chosen = open_weights(source, weights=weights, allow_globals=allow_globals, trust_pickle=trust_pickle)
        if model is None or spec is None or samples is None:
            raise _incomplete(model=model, spec=spec, samples=samples)
        checkpoint = _from_parts(chosen, model, args, spec, samples)
    module, coverage = checkpoint.build_with_coverage()
    if checkpoint.intake is not None and checkpoint.intake.coverage is None:
        intake = msgspec.structs.replace(checkpoint.intake, coverage=coverage)
        checkpoint = replace(checkpoint, intake=intake)
    check_signature(module, checkpoint.spec)
    if not checkpoint.spec.outputs:
        checkpoint = replace(checkpoint, spec=probe_outputs(module, checkpoint.spec, checkpoint.samples))
    return checkpoint


def _from_folder(
    folder: Path,
    model: str | None,
    args: Mapping[str, Any] | None,
    spec: ModelSpec | None,
    samples: str | Path | Arrays | None,
    weights: str | None,
) -> Checkpoint:
    record = read_record(folder)
    if model is None:
        _require_own_code(folder, record.model)
    if weights not in (None, record.weight_set):
        raise CheckpointError(f"'{folder}' holds the weights '{record.weight_set}' alone, not '{weights}'")
    spec = spec or record.spec
    tensors, aliases = read_safetensors(folder / WEIGHTS)
    digest = record.sha256[WEIGHTS]
    return Checkpoint(
        model=model or record.model,
        args=record.args if args is None else args,
        state=Stored(tensors, aliases),
        spec=spec,
        samples=_samples(spec, samples if samples is not None else load_file(folder / SAMPLES)),
        source=str(folder),
        sha256=digest,
        folder=None if model is not None else folder,
        step=record.step,
        weight_set=record.weight_set,
        intake=record.origin or Intake("checkpoint folder", str(folder), digest, record.weight_set),
    )


def _require_own_code(folder: Path, reference: str) -> None:
    """A folder may name a file of its own, or the builder of Hugging Face models. Raises ModelError."""
    if reference == hugging_face.BUILDER:
        return
    if not is_file_reference(reference):
        raise ModelError(
            f"'{folder}' asks for the model '{reference}'; code that a checkpoint names runs only when you "
            f"name it too: add --model {reference}"
        )
    source, _ = split_reference(reference)
    if Path(source).name != source:
        raise ModelError(f"'{folder / RECORD}' names the model file '{reference}' outside the folder")


def _completed(
    path: Path | None, model: str | None, args: Mapping[str, Any] | None
) -> tuple[str | None, Mapping[str, Any]]:
    """Model and arguments as given, or as a Hugging Face folder describes them."""
    if path is not None and not path.exists():
        raise CheckpointError(f"no checkpoint at '{path}'; give a checkpoint folder or a weights file")
    if model is None and path is not None and (described := describe_model(path)) is not None:
        return described[0], {**described[1], **(args or {})}
    return model, args or {}


def _incomplete(**parts: object) -> SpecError:
    missing = ", ".join(name for name, value in parts.items() if value is None)
    return SpecError(
        f"{missing} missing: a weights file alone says neither its model nor its inputs; "
        "run `deployer init` and fill deployer.yaml, or give a checkpoint folder"
    )


def _from_parts(
    chosen: Chosen | None, model: str, args: Mapping[str, Any], spec: ModelSpec, samples: str | Path | Arrays
) -> Checkpoint:
    common = {"model": model, "args": args, "spec": spec, "samples": _samples(spec, samples)}
    if chosen is None:
        return Checkpoint(**common, state=None, source=model, sha256=_factory_digest(model, args))  # type: ignore[arg-type]
    return Checkpoint(
        **common,  # type: ignore[arg-type]
        state=_stored(chosen),
        source=str(chosen.opened.path),
        sha256=chosen.opened.sha256,
        step=chosen.opened.step,
        weight_set=chosen.name,
        intake=chosen.intake(),
    )


def _stored(chosen: Chosen) -> Stored:
    return Stored(chosen.weights, chosen.opened.aliases, chosen.whole)


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


def import_checkpoint(checkpoint: Checkpoint, folder: str | Path) -> Path:
    """Write `checkpoint` as a self-describing folder, whole or not at all: it is loaded once before it takes its name.

    The weights are float32; where they came from stands in `checkpoint.json` and, later, in every bundle's manifest.
    Raises InputError, among others for a model file that imports files beside it, which the folder would lack.
    """
    final = Path(folder)
    factory = checkpoint.model
    named = factory
    if is_file_reference(factory):
        source, name = split_reference(factory)
        path = (checkpoint.folder or Path()) / source
        _require_no_siblings(path)
        factory, named = f"{path}:{name}", None  # type: ignore[assignment]
    elif factory == hugging_face.BUILDER:
        named = None  # type: ignore[assignment]
    with staged_folder(final) as staging:
        written = save_checkpoint(
            staging / "folder", checkpoint.build(), factory=factory, spec=checkpoint.spec,
            samples=checkpoint.samples, args=checkpoint.args, step=checkpoint.step,
            weight_set=checkpoint.weight_set, origin=checkpoint.intake,
        )  # fmt: skip
        load_checkpoint(written, model=named)
        publish_folder(written, final)
    return final


def _require_no_siblings(path: Path) -> None:
    """Raises ModelError where the file imports modules that lie beside it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""] if not node.level else ["."]
        for name in names:
            beside = path.parent / name.split(".")[0]
            if name == "." or (name and (beside.with_suffix(".py").is_file() or any(beside.glob("*.py")))):
                raise ModelError(
                    f"'{path}' imports '{name}' from beside it, which the folder would lack; put the model into one "
                    "file, or name it as package.module:factory"
                )
