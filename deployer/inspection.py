"""What a checkpoint, a bundle or a .mar holds. Nothing is executed: headers, JSON and weights-only data alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open

from deployer.bundle import MANIFEST, Manifest, read_bundle
from deployer.checkpoint.folder import RECORD, WEIGHTS, read_record
from deployer.checkpoint.sources import read_weights
from deployer.errors import BundleError, CheckpointError, first_line
from deployer.files import sha256_of
from deployer.package.mar import BUNDLE_FOLDER, read_mar
from deployer.spec import ModelSpec

SCHEMA_VERSION = 1


class TensorRow(msgspec.Struct, frozen=True):
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class Inspection(msgspec.Struct, frozen=True):
    """`kind` is checkpoint folder, weights, bundle or mar; `facts` are ordered key-value lines; `sha256` by file."""

    kind: str
    path: str
    size_bytes: int
    facts: dict[str, Any]
    sha256: dict[str, str]
    spec: ModelSpec | None = None
    tensors: tuple[TensorRow, ...] = ()
    tool_versions: dict[str, str] = {}
    schema_version: int = SCHEMA_VERSION

    @property
    def parameters(self) -> int:
        """Elements over all tensors, buffers included."""
        return sum(tensor.elements for tensor in self.tensors)


def inspect(path: str | Path) -> Inspection:
    """Look into `path`. Raises CheckpointError, BundleError or IntegrityError in one line."""
    place = Path(path)
    if not place.exists():
        raise BundleError(f"nothing at '{place}'; give a checkpoint, a bundle folder or a .mar")
    if place.is_dir():
        if (place / MANIFEST).is_file():
            return _inspect_bundle(place)
        if (place / RECORD).is_file():
            return _inspect_checkpoint(place)
        raise BundleError(f"'{place}' holds neither {MANIFEST} nor {RECORD}; it is no bundle and no checkpoint folder")
    if place.suffix == ".mar":
        return _inspect_mar(place)
    return Inspection(
        "weights", str(place), place.stat().st_size, {}, {place.name: sha256_of(place)}, tensors=_tensors(place)
    )


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
    return {
        "target": manifest.target.slug,
        "gate": "passed" if manifest.passed else "failed",
        "batch independent": manifest.batch_independent,
        "source": source.path,
        "source sha256": source.sha256,
        "model": source.model,
        "weight set": source.weight_set,
        "step": source.step,
        "architecture": manifest.machine.architecture,
        "needs CPU features": ", ".join(manifest.machine.cpu_features) or "none",
        "details": json.dumps(manifest.details),
        "created": manifest.created,
    }


def _inspect_checkpoint(place: Path) -> Inspection:
    record = read_record(place)
    facts = {
        "model": record.model,
        "args": json.dumps(record.args),
        "step": record.step,
        "weight set": record.weight_set,
    }
    return Inspection(
        "checkpoint folder",
        str(place),
        sum(file.stat().st_size for file in place.iterdir()),
        facts,
        record.sha256,
        record.spec,
        _tensors(place / WEIGHTS),
        record.tool_versions,
    )


def _inspect_mar(place: Path) -> Inspection:
    archive = read_mar(place)
    try:
        manifest = msgspec.json.decode(archive.read(f"{BUNDLE_FOLDER}/{MANIFEST}"), type=Manifest)
    except (KeyError, msgspec.DecodeError) as error:
        raise BundleError(f"'{place}' was not made by deployer: {first_line(error)}") from error
    config = {key: value for key, value in archive.model_config.items() if not isinstance(value, dict)}
    facts = {"handler": archive.handler, "model config": json.dumps(config), **_bundle_facts(manifest)}
    inside = {f"{BUNDLE_FOLDER}/{name}": text for name, text in manifest.sha256.items()}
    hashes = {place.name: sha256_of(place), **inside}
    return Inspection(
        "mar", str(place), place.stat().st_size, facts, hashes, manifest.spec, tool_versions=manifest.tool_versions
    )


def _tensors(path: Path) -> tuple[TensorRow, ...]:
    if path.suffix != ".safetensors":
        state = read_weights(path)
        return tuple(
            TensorRow(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in state.items()
        )
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            return tuple(
                TensorRow(name, _dtype_name(part.get_dtype()), tuple(part.get_shape())) for name, part in slices.items()
            )
    except (SafetensorError, OSError) as error:
        size_bytes = path.stat().st_size
        raise CheckpointError(f"'{path}' ({size_bytes} bytes) is truncated or corrupt: {first_line(error)}") from error


def _dtype_name(code: str) -> str:
    """safetensors' `F32`, `I64`, `BF16`, `U8` in torch's words."""
    kind, bits = code.rstrip("0123456789"), code.lstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    words = {"F": "float", "I": "int", "U": "uint", "BF": "bfloat"}
    return f"{words[kind]}{bits}" if kind in words else code.lower()
