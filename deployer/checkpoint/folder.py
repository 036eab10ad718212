"""The self-describing checkpoint folder.

    checkpoint.json       schema_version, model reference and arguments, spec, hashes, step, weight set, tool versions
    model.safetensors     the weights; a tied one is stored once, the header's metadata names the others
    samples.safetensors   real inputs
    model.py              a copy of the model's source, where the reference is a file

Training writes it; `deployer export FOLDER --format onnx` needs no other word. Reading it runs the model's code only
when the model is built, and only code that lies in the folder or that the user named.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file as save_tensors
from torch import Tensor, nn

from deployer.checkpoint.coverage import Intake
from deployer.checkpoint.eager import check_signature
from deployer.checkpoint.probe import probe_outputs
from deployer.errors import CheckpointError, IntegrityError
from deployer.files import publish_folder, sha256_of, staged_folder
from deployer.references import is_file_reference, split_reference
from deployer.samples import check_samples
from deployer.spec import Arrays, ModelSpec, in_c_order
from deployer.versions import tool_versions

RECORD = "checkpoint.json"
WEIGHTS = "model.safetensors"
SAMPLES = "samples.safetensors"
SCHEMA_VERSION = 1


class CheckpointRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `checkpoint.json` holds; `origin` says where imported weights came from."""

    model: str
    spec: ModelSpec
    sha256: dict[str, str]
    args: dict[str, Any] = {}
    step: int | None = None
    weight_set: str = "raw"
    origin: Intake | None = None
    tool_versions: dict[str, str] = {}
    schema_version: int = SCHEMA_VERSION


def save_checkpoint(
    folder: str | Path,
    model: nn.Module,
    *,
    factory: str,
    spec: ModelSpec,
    samples: Arrays,
    args: Mapping[str, Any] | None = None,
    step: int | None = None,
    weight_set: str = "raw",
    origin: Intake | None = None,
) -> Path:
    """Write `model` as a self-describing folder, in one step.

    `factory` is the reference that builds the model (`path.py:function`, copied into the folder, or
    `package.module:function`) when called with `args`. Outputs missing from `spec` are probed. Raises InputError.
    """
    final = Path(folder)
    model = model.eval()
    named = check_samples(spec, samples)
    check_signature(model, spec)
    if not spec.outputs:
        spec = probe_outputs(model, spec, named)
    with staged_folder(final) as staging:
        source, name = split_reference(factory)
        if is_file_reference(factory):
            shutil.copyfile(source, staging / Path(source).name)
            factory = f"{Path(source).name}:{name}"
        _save_weights(model, staging / WEIGHTS)
        save_arrays({key: in_c_order(array) for key, array in named.items()}, staging / SAMPLES)
        hashes = {path.name: sha256_of(path) for path in sorted(staging.iterdir())}
        record = CheckpointRecord(
            model=factory, spec=spec, sha256=hashes, args=dict(args or {}), step=step, weight_set=weight_set,
            origin=origin, tool_versions=tool_versions("torch", "numpy", "safetensors"),
        )  # fmt: skip
        (staging / RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
        for path in staging.iterdir():
            path.chmod(0o644)  # safetensors writes 0600
        publish_folder(staging, final)
    return final


def _save_weights(model: nn.Module, path: Path) -> None:
    """Each weight once; what is tied is named in the header, as `safetensors.torch.save_model` does it."""
    tensors: dict[str, Tensor] = {}
    metadata = {"format": "pt"}
    first_by_place: dict[Any, str] = {}
    storages: set[int] = set()
    for key, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"'{key}' of the model's state is a {type(value).__name__}; only tensors can be saved"
            )
        place = (value.untyped_storage().data_ptr(), value.storage_offset(), value.shape, value.stride(), value.dtype)
        first = first_by_place.setdefault(place, key) if value.numel() else key
        if first != key:
            metadata[key] = first
            continue
        tensor = value.detach().cpu().contiguous()
        shared = tensor.untyped_storage().data_ptr() in storages  # another part of the same memory
        tensors[key] = tensor.clone() if shared else tensor
        storages.add(tensor.untyped_storage().data_ptr())
    save_tensors(tensors, path, metadata=metadata)


def read_record(folder: Path) -> CheckpointRecord:
    """Parse `checkpoint.json` and hold every file to its recorded hash. Raises CheckpointError or IntegrityError."""
    path = folder / RECORD
    try:
        record = msgspec.json.decode(path.read_bytes(), type=CheckpointRecord)
    except FileNotFoundError as error:
        raise CheckpointError(f"'{folder}' holds no {RECORD}; it is no checkpoint folder") from error
    except msgspec.DecodeError as error:
        raise CheckpointError(f"'{path}' cannot be read: {error}") from error
    if record.schema_version != SCHEMA_VERSION:
        raise CheckpointError(
            f"'{path}' has schema_version {record.schema_version}; this deployer reads {SCHEMA_VERSION}"
        )
    for name, expected in record.sha256.items():
        if Path(name).name != name:
            raise CheckpointError(f"'{path}' names the file '{name}' outside the folder")
        if not (folder / name).is_file():
            raise IntegrityError(f"'{folder / name}' is missing")
        if sha256_of(folder / name) != expected:
            raise IntegrityError(f"'{folder / name}' differs from its recorded sha256; restore it or train again")
    return record
