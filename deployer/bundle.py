"""The exported folder.

    manifest.json            schema_version, spec, target, hashes of files, source, tool versions, CPU needs
    manifest.json.sha256     the manifest's own hash
    model.*                  the artifact, under the names that its format gives
    samples.safetensors      real inputs (`inputs.NAME`) and the eager reference outputs (`outputs.NAME`)
    references.safetensors   eager outputs of every case of the gate (`CASE/NAME`)
    validation.json          the gate's report

A bundle is written to a temporary folder beside its place, fsynced and renamed: it is there whole or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from safetensors.numpy import load_file, save_file

from deployer.checkpoint.coverage import Intake
from deployer.errors import BundleError, IntegrityError
from deployer.files import files_below, sha256_of
from deployer.formats import Target
from deployer.spec import Arrays, ModelSpec, in_c_order

MANIFEST = "manifest.json"
MANIFEST_HASH = "manifest.json.sha256"
SAMPLES = "samples.safetensors"
REFERENCES = "references.safetensors"
VALIDATION = "validation.json"
REJECTED_SUFFIX = ".rejected"
SCHEMA_VERSION = 1


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The checkpoint that a bundle was made from; `sha256` is that of its weights, `model_sha256` of the Python file
    that builds its model ("" for code without a file); `intake` tells what the file was, which of its weights were
    taken, and what became of each of its keys."""

    path: str
    sha256: str
    model: str
    model_sha256: str = ""
    weight_set: str = "raw"
    step: int | None = None
    intake: Intake | None = None


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What running the artifact needs; `cpu_features` is empty where the artifact holds no machine code."""

    architecture: str
    cpu_features: tuple[str, ...] = ()


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `manifest.json` holds.

    `passed` is the gate's verdict. `executed` says that the gate ran the artifact itself: where not, the machine had no
    GPU for it and the gate ran what it was made from. `batch_independent` says that a row of a batch is answered as the
    row alone would be, so that requests of several users may share one run; `batch_reason` says why it is not.
    `padding` has, by Dim that the spec gives a mask, why requests must not be padded along it, "" where they may.
    """

    spec: ModelSpec
    target: Target
    passed: bool
    batch_independent: bool
    sha256: dict[str, str]
    source: Source
    machine: Machine
    tool_versions: dict[str, str]
    details: dict[str, Any] = {}
    created: str = ""
    batch_reason: str = ""
    padding: dict[str, str] = {}
    executed: bool = True
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True)
class Bundle:
    """A verified bundle on disk."""

    path: Path
    manifest: Manifest

    @property
    def spec(self) -> ModelSpec:
        return self.manifest.spec

    def samples(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Real inputs and the eager model's outputs for them, as named arrays."""
        arrays = load_file(self.path / SAMPLES)
        return (
            {tensor.name: arrays[f"inputs.{tensor.name}"] for tensor in self.spec.inputs},
            {tensor.name: arrays[f"outputs.{tensor.name}"] for tensor in self.spec.outputs},
        )


def write_samples(folder: Path, inputs: Arrays, outputs: Arrays) -> None:
    arrays = {f"inputs.{name}": array for name, array in inputs.items()}
    arrays |= {f"outputs.{name}": array for name, array in outputs.items()}
    save_file({name: in_c_order(array) for name, array in arrays.items()}, folder / SAMPLES)


def file_hashes(folder: Path) -> dict[str, str]:
    """sha256 of every file of a bundle but the manifest and its hash."""
    return {name: sha256_of(folder / name) for name in files_below(folder) if name not in (MANIFEST, MANIFEST_HASH)}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """The last file written: a folder without it is no bundle."""
    data = msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)  # safetensors writes 0600, unreadable for a server's user
    (folder / MANIFEST).write_bytes(data)
    (folder / MANIFEST_HASH).write_bytes(_hash_line(folder))


def _hash_line(folder: Path) -> bytes:
    """As `sha256sum manifest.json` prints it."""
    return f"{sha256_of(folder / MANIFEST)}  {MANIFEST}\n".encode()


def read_bundle(path: str | Path, *, verify: bool = True) -> Bundle:
    """Read a bundle and hold every file to its recorded hash; nothing is deserialized but JSON.

    Raises BundleError for what is no bundle, IntegrityError naming the first file that differs, lacks or is too many.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise BundleError(f"no bundle folder '{folder}'; `deployer export` makes one")
    if not (folder / MANIFEST).is_file():
        raise BundleError(f"'{folder}' holds no {MANIFEST}; it is no bundle")
    data = (folder / MANIFEST).read_bytes()
    try:
        recorded = (folder / MANIFEST_HASH).read_bytes()
    except FileNotFoundError as error:
        raise IntegrityError(f"'{folder / MANIFEST_HASH}' is missing; export the bundle again") from error
    if recorded != _hash_line(folder):
        raise IntegrityError(f"'{folder / MANIFEST}' differs from '{MANIFEST_HASH}'; export the bundle again")
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.DecodeError as error:
        raise BundleError(f"'{folder / MANIFEST}' cannot be read by this deployer: {error}") from error
    if manifest.schema_version != SCHEMA_VERSION:
        raise BundleError(
            f"'{folder}' has schema_version {manifest.schema_version}; this deployer reads {SCHEMA_VERSION}"
        )
    if verify:
        _verify_files(folder, manifest)
    return Bundle(folder, manifest)


def _verify_files(folder: Path, manifest: Manifest) -> None:
    try:
        present = set(files_below(folder)) - {MANIFEST, MANIFEST_HASH}
    except OSError as error:
        raise IntegrityError(f"'{error.filename}' is a symbolic link; a bundle holds plain files only") from error
    recorded = set(manifest.sha256)
    for name in sorted(recorded - present):
        raise IntegrityError(f"'{folder / name}' is missing; export the bundle again")
    for name in sorted(present - recorded):
        raise IntegrityError(f"'{folder / name}' is not listed in {MANIFEST}; remove it")
    for name, expected in manifest.sha256.items():
        if sha256_of(folder / name) != expected:
            raise IntegrityError(f"'{folder / name}' differs from its recorded sha256; export the bundle again")
