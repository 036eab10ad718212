"""Folders of torch.distributed.checkpoint (FSDP, FSDP2, tensor parallel): shards joined without the training job.

`.metadata` is a pickle that torch itself reads with `pickle.load`, which runs what it says. Here it is read like any
other pickle: its classes become stand-ins that hold their fields, so nothing of it runs and torch.distributed is not
imported. Each shard is a small torch.save archive inside a `.distcp` file and is read in its place, when needed.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deployer.checkpoint.pickles import StandIn, Unpickler
from deployer.checkpoint.tensors import FileTensor, JoinedTensor, Shape, Stamp, StoredTensor, corrupt, stamp_of
from deployer.checkpoint.torch_file import describe, read_archive
from deployer.errors import CheckpointError

METADATA = ".metadata"
_CLASSES = "torch.distributed.checkpoint."


@dataclass(frozen=True)
class Shard:
    """One torch.save archive of one tensor, `length` bytes from `offset` of a `.distcp` file."""

    path: Path
    stamp: Stamp
    offset: int
    length: int
    dtype: torch.dtype
    shape: Shape

    def pieces(self) -> Iterator[Tensor]:
        if stamp_of(self.path) != self.stamp:
            raise CheckpointError(f"'{self.path}' changed since it was opened; load it again")
        try:
            held = read_archive(self.path, self.offset, self.length).tree
        except CheckpointError:
            raise
        except Exception as error:
            raise corrupt(self.path, describe(error)) from error
        if not isinstance(held, FileTensor) or (held.dtype, held.shape) != (self.dtype, self.shape):
            raise corrupt(self.path, f"the shard at byte {self.offset} is not what {METADATA} says")
        yield from held.pieces()


def read_dcp(folder: Path) -> dict[str, Any]:
    """The tree that was saved, with tensors joined from their shards and everything else left out.

    Raises CheckpointError for metadata that cannot be read or names classes other than its own, and for shards that are
    missing, too short or compressed.
    """
    path = folder / METADATA
    try:
        reader = Unpickler(io.BytesIO(path.read_bytes()), _no_tensors)
        metadata = reader.load()
        foreign = {name for name in reader.foreign if not name.startswith(_CLASSES)}
        if foreign:
            raise ValueError(f"it names {', '.join(sorted(foreign))}, which no such file needs")
        fields, planner = metadata.state["state_dict_metadata"], metadata.state.get("planner_data") or {}
        places = _places(metadata.state["storage_data"])
        tree: dict[str, Any] = {}
        for name, entry in fields.items():
            if entry.kind.endswith("TensorStorageMetadata"):
                _put(tree, planner.get(name) or (name,), _joined(folder, name, entry, places))
    except CheckpointError:
        raise
    except Exception as error:
        raise corrupt(path, describe(error)) from error
    return tree


def _no_tensors(*_: Any) -> FileTensor:
    raise ValueError("it holds a tensor, where places of tensors are expected")


def _places(storage_data: Any) -> dict[tuple[str, Shape | None], StandIn]:
    """(name, where the box begins) → its place in a file."""
    return {
        (index.state["fqn"], None if index.state.get("offset") is None else tuple(index.state["offset"])): place
        for index, place in storage_data.items()
    }


def _joined(folder: Path, name: str, entry: StandIn, places: dict[tuple[str, Shape | None], StandIn]) -> StoredTensor:
    dtype = _dtype(entry.state["properties"])
    parts: list[tuple[Shape, StoredTensor]] = []
    for chunk in entry.state["chunks"]:
        starts, sizes = tuple(chunk.state["offsets"]), tuple(chunk.state["sizes"])
        place = places.get((name, starts)) or places[(name, None)]
        if place.state.get("transform_descriptors"):
            raise CheckpointError(
                f"'{folder}' was written with {place.state['transform_descriptors']}; save it without extensions"
            )
        parts.append((starts, _shard(folder, place, dtype, sizes)))
    return JoinedTensor(dtype, tuple(entry.state["size"]), tuple(parts))


def _dtype(properties: StandIn) -> torch.dtype:
    """TensorProperties pickles itself as a tuple that begins with the dtype."""
    for value in (*properties.items, *properties.state.values()):
        if isinstance(value, torch.dtype):
            return value
    raise ValueError("a tensor without a dtype")


def _shard(folder: Path, place: StandIn, dtype: torch.dtype, sizes: Shape) -> Shard:
    name, offset, length = place.state["relative_path"], place.state["offset"], place.state["length"]
    path = folder / name
    if Path(name).name != name:
        raise ValueError(f"it names the file '{name}' outside its folder")
    if not path.is_file():
        raise CheckpointError(
            f"'{path}' is missing: a rank's file was not written or not copied; copy the whole folder"
        )
    if offset < 0 or offset + length > path.stat().st_size:
        raise corrupt(path, f"a shard of {length} bytes at {offset} does not fit")
    return Shard(path, stamp_of(path), offset, length, dtype, sizes)


def _put(tree: dict[str, Any], place: tuple[Any, ...], tensor: StoredTensor) -> None:
    for part in place[:-1]:
        tree = tree.setdefault(str(part), {})
    tree[str(place[-1])] = tensor
