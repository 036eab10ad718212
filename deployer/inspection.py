"""What a checkpoint, a bundle or a .mar holds. Nothing is executed: headers, JSON and weights-only data alone."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import msgspec

from deployer.bundle import MANIFEST, Manifest, read_bundle
from deployer.checkpoint import build_model, describe_model
from deployer.checkpoint.coverage import Coverage
from deployer.checkpoint.folder import RECORD, read_record
from deployer.checkpoint.keys import flat_parameters
from deployer.checkpoint.sources import Opened, choose, open_source
from deployer.checkpoint.weights import plan_set
from deployer.errors import BundleError, CheckpointError, ModelError, first_line
from deployer.files import sha256_of
from deployer.int8 import summary
from deployer.package.mar import BUNDLE_FOLDER, read_mar
from deployer.signature import signature_of, signer_of
from deployer.spec import ModelSpec

SCHEMA_VERSION = 1


class TensorRow(msgspec.Struct, frozen=True):
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class SetRow(msgspec.Struct, frozen=True):
    """One set of weights in a file: its place, whether it is an average, how many tensors it has."""

    place: str
    averaged: bool
    tensors: int


class Inspection(msgspec.Struct, frozen=True):
    """`kind` is bundle, mar, checkpoint folder, torch file, …; `facts` are ordered key-value lines; `sha256` by file.

    `tensors` are those of the set `weight_set`; `coverage` says how its keys meet those of the model that was named.
    """

    kind: str
    path: str
    size_bytes: int
    facts: dict[str, Any]
    sha256: dict[str, str]
    spec: ModelSpec | None = None
    tensors: tuple[TensorRow, ...] = ()
    tool_versions: dict[str, str] = {}
    weight_set: str = ""
    weight_sets: tuple[SetRow, ...] = ()
    model: str = ""
    coverage: Coverage | None = None
    schema_version: int = SCHEMA_VERSION

    @property
    def parameters(self) -> int:
        """Elements over all tensors, buffers included."""
        return sum(tensor.elements for tensor in self.tensors)


def inspect(
    path: str | Path,
    *,
    model: str | None = None,
    args: Mapping[str, Any] | None = None,
    weights: str | None = None,
    allow_globals: Collection[str] = (),
    trust_pickle: bool = False,
) -> Inspection:
    """Look into `path`; with `model`, build that and see how the keys of the weights meet its own.

    Nothing in `path` is executed, unless `trust_pickle` asks for it. Raises CheckpointError, BundleError,
    IntegrityError, ModelError in one line; keys that do not meet are in `coverage`, and raise nothing.
    """
    place = Path(path)
    if not place.exists():
        raise BundleError(f"nothing at '{place}'; give a checkpoint, a bundle folder or a .mar")
    bundle = place.is_dir() and (place / MANIFEST).is_file()
    if bundle or place.suffix == ".mar":
        if model is not None:
            raise ModelError(f"'{place}' is no checkpoint; --model is for weights alone")
        return _inspect_bundle(place) if bundle else _inspect_mar(place)
    opened = open_source(place, allow_globals=allow_globals, trust_pickle=trust_pickle)
    found = _inspect_source(opened, weights)
    if model is None and (described := describe_model(place)) is not None and args is None:
        found.facts["model"] = described[1]["architecture"]
    return found if model is None else _with_coverage(found, opened, weights, model, args or {})


def _inspect_source(opened: Opened, weights: str | None) -> Inspection:
    """Headers and tables alone: no value is read. Where several sets stand, the first is listed unless one is named."""
    path = opened.path
    shown, name = opened.sets[0], ""
    if opened.program is None or not opened.program.refusal:
        with nullcontext() if weights is not None else suppress(CheckpointError):  # without a default: the first
            shown, name = choose(opened, weights)
    facts: dict[str, Any] = {}
    if opened.program is not None:
        facts |= opened.program.facts
        facts["as weights"] = opened.program.refusal or "yes, under these names"
    if fault := flat_parameters(shown.weights):
        facts["as weights"] = f"no: {fault}"
    if opened.step is not None:
        facts["step"] = opened.step
    if opened.aliases:
        facts["stored once"] = ", ".join(f"{other} = {kept}" for other, kept in opened.aliases.items())
    if opened.classes:
        facts["skipped"] = ", ".join(opened.classes)
    folder = path.is_dir()
    found = Inspection(
        opened.kind,
        str(path),
        sum(file.stat().st_size for file in path.iterdir()) if folder else path.stat().st_size,
        facts,
        {path.name: opened.sha256},
        tensors=tuple(
            TensorRow(key, str(tensor.dtype).removeprefix("torch."), tensor.shape)
            for key, tensor in shown.weights.items()
        ),
        weight_set=name,
        weight_sets=tuple(SetRow(item.place or ".", item.averaged, len(item.weights)) for item in opened.sets),
    )
    return _with_record(found, path) if folder and (path / RECORD).is_file() else found


def _with_record(found: Inspection, place: Path) -> Inspection:
    """What a self-describing folder adds: its model, spec, hashes and tools."""
    record = read_record(place)
    facts = {"model": record.model, "args": json.dumps(record.args), "step": record.step}
    facts["weight set"] = record.weight_set
    if record.origin is not None:
        facts["imported from"] = f"{record.origin.path} ({record.origin.kind})"
    return msgspec.structs.replace(
        found, facts=facts, sha256=record.sha256, spec=record.spec, tool_versions=record.tool_versions
    )


def _with_coverage(
    found: Inspection, opened: Opened, weights: str | None, model: str, args: Mapping[str, Any]
) -> Inspection:
    chosen, name = choose(opened, weights)
    coverage = plan_set(build_model(model, args), chosen, f"'{opened.path}'", opened.aliases).coverage
    return msgspec.structs.replace(found, model=model, weight_set=name, coverage=coverage)


def _inspect_bundle(place: Path) -> Inspection:
    manifest = read_bundle(place).manifest
    size_bytes = sum(file.stat().st_size for file in place.iterdir())
    return Inspection(
        "bundle",
        str(place),
        size_bytes,
        _bundle_facts(manifest),
        manifest.sha256,
        manifest.spec,
        tool_versions=manifest.tool_versions,
    )


def _bundle_facts(manifest: Manifest) -> dict[str, Any]:
    source = manifest.source
    int8 = manifest.details.get("int8")
    details = {name: value for name, value in manifest.details.items() if name != "int8"}
    return {
        "target": manifest.target.slug,
        "gate": ("passed" if manifest.passed else "failed") + ("" if manifest.executed else "; built, not executed"),
        "padded": "; ".join(f"{dim}: {reason or 'yes'}" for dim, reason in manifest.padding.items())
        or "no mask declared",
        "batch independent": manifest.batch_independent or f"no: {manifest.batch_reason or 'not proven'}",
        "source": source.path,
        "source sha256": source.sha256,
        "model": source.model,
        "weight set": source.weight_set,
        "source kind": source.intake.kind if source.intake else None,
        "step": source.step,
        "architecture": manifest.machine.architecture,
        "needs CPU features": ", ".join(manifest.machine.cpu_features) or "none",
        **({"int8": summary(int8)} if int8 else {}),
        "details": json.dumps(details),
        "created": manifest.created,
    }


def _inspect_mar(place: Path) -> Inspection:
    archive = read_mar(place)
    try:
        manifest = msgspec.json.decode(archive.read(f"{BUNDLE_FOLDER}/{MANIFEST}"), type=Manifest)
    except (KeyError, msgspec.DecodeError) as error:
        raise BundleError(f"'{place}' was not made by deployer: {first_line(error)}") from error
    config = {key: value for key, value in archive.model_config.items() if not isinstance(value, dict)}
    facts = {
        "signed": _signed(place),
        "handler": archive.handler,
        "model config": json.dumps(config),
        **_bundle_facts(manifest),
    }
    inside = {f"{BUNDLE_FOLDER}/{name}": text for name, text in manifest.sha256.items()}
    hashes = {place.name: sha256_of(place), **inside}
    return Inspection(
        "mar", str(place), place.stat().st_size, facts, hashes, manifest.spec, tool_versions=manifest.tool_versions
    )


def _signed(place: Path) -> str:
    """What the signature beside an archive claims; `deployer serve --verify-key` holds the archive to it."""
    if not signature_of(place).is_file():
        return "no"
    return f"by the key {signer_of(place) or 'that it does not name'} (sha256 of its PEM; --verify-key proves it)"
