"""Telling what a file or folder is by its content, and opening its weights. Nothing in it is executed."""

from __future__ import annotations

import hashlib
import json
import logging
import zipfile
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from deployer.checkpoint import hugging_face
from deployer.checkpoint.coverage import Intake
from deployer.checkpoint.dcp import METADATA, read_dcp
from deployer.checkpoint.folder import RECORD, WEIGHTS, read_record
from deployer.checkpoint.pickles import is_distributed, is_rebuild
from deployer.checkpoint.programs import Program, read_onnx, read_program_archive, require_weights
from deployer.checkpoint.safetensors_file import read_safetensors
from deployer.checkpoint.sets import Found, Weights, WeightSet, choose_set, find_sets
from deployer.checkpoint.tensors import read_tensor
from deployer.checkpoint.torch_file import is_archive, read_torch_file, require_torch_file
from deployer.errors import CheckpointError, first_line
from deployer.files import sha256_of

log = logging.getLogger(__name__)

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".pt2", ".onnx")
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_LIGHTNING = ("pytorch-lightning_version", "hyper_parameters", "callbacks")


@dataclass(frozen=True)
class Opened:
    """`sets` are the weight sets; `program` is there for exported programs; `aliases` are names stored under others;
    `classes` were pickled beside the weights and skipped; `weight_set` is what a folder calls its only one."""

    path: Path
    kind: str
    sets: tuple[WeightSet, ...]
    sha256: str
    step: int | None = None
    aliases: dict[str, str] = field(default_factory=dict)
    program: Program | None = None
    classes: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()
    trusted: bool = False
    weight_set: str = ""


@dataclass(frozen=True)
class Chosen:
    """One set of weights: `whole` is it together with averaged copies that stood among its names, if there were any."""

    opened: Opened
    weights: Weights
    whole: Weights | None
    name: str

    @property
    def source(self) -> str:
        return f"'{self.opened.path}'"

    def intake(self) -> Intake:
        opened = self.opened
        return Intake(
            kind=opened.kind, path=str(opened.path), sha256=opened.sha256, weight_set=self.name,
            weight_sets=tuple(item.place or "." for item in opened.sets), allowed_globals=opened.allowed,
            trusted_pickle=opened.trusted,
        )  # fmt: skip


def open_weights(
    path: Path, *, weights: str | None = None, allow_globals: Collection[str] = (), trust_pickle: bool = False
) -> Chosen:
    """The weights of a file or folder. Raises CheckpointError, MachineError: one line that says what to do.

    `weights`        "raw", "ema" or the place of a set in the file; by default the trained ones
    `allow_globals`  full names of pickled classes beside the weights to skip, though they are not known plain data
    `trust_pickle`   unpickle whatever the file says: this runs code that the file chooses
    """
    opened = open_source(path, allow_globals=allow_globals, trust_pickle=trust_pickle)
    chosen, name = choose(opened, weights)
    if len(opened.sets) > 1 and weights is None:
        listed = ", ".join(item.describe() for item in opened.sets)
        log.warning("'%s' holds %d sets of weights: %s; taking %s ('%s'), --weights takes another",
                    path, len(opened.sets), listed, name, chosen.place)  # fmt: skip
    elif weights is None and chosen.averaged:
        log.warning("'%s' holds averaged weights alone ('%s'); taking them as ema", path, chosen.place or ".")
    return Chosen(opened, chosen.weights, chosen.whole, name)


def choose(opened: Opened, weights: str | None) -> tuple[WeightSet, str]:
    """The set that `weights` names, and the name to record. Raises CheckpointError, also for a program without any."""
    if opened.program is not None:
        require_weights(opened.program, opened.path)
    chosen, name = choose_set(opened.sets, weights, f"'{opened.path}'")
    return chosen, opened.weight_set or name


def open_source(path: Path, *, allow_globals: Collection[str] = (), trust_pickle: bool = False) -> Opened:
    """Every weight set of a file or folder. Raises CheckpointError."""
    if path.is_dir():
        return _open_folder(path, allow_globals, trust_pickle)
    if not path.is_file():
        raise CheckpointError(f"no checkpoint file '{path}'")
    if path.suffix == ".distcp":
        raise CheckpointError(f"'{path}' is one rank's part of a torch.distributed checkpoint; give its folder")
    if path.suffix not in SUFFIXES and not _numbered(path):
        raise CheckpointError(f"'{path}' has no known checkpoint suffix; expected {', '.join(SUFFIXES)} or a folder")
    digest = sha256_of(path)
    if path.suffix == ".safetensors":
        weights, aliases = read_safetensors(path)
        found = find_sets(weights)
        return Opened(path, "safetensors file", found.sets, digest, aliases=aliases)
    if path.suffix == ".onnx":
        return _from_program(path, read_onnx(path), digest)
    if is_archive(path) and (program := read_program_archive(path)):
        return _from_program(path, program, digest)
    return _open_pickle(path, digest, allow_globals, trust_pickle)


def _numbered(path: Path) -> bool:
    """Whether a torch file's name goes on behind its suffix, as in `last.pt.rank1`, and it begins as such a file."""
    if not any(suffix in _TORCH_SUFFIXES for suffix in path.suffixes[:-1]):
        return False
    try:
        require_torch_file(path)
    except CheckpointError:
        return False
    return True


def _from_program(path: Path, program: Program, digest: str) -> Opened:
    return Opened(path, program.kind, (WeightSet("", False, program.weights),), digest, program=program)


def _open_pickle(path: Path, digest: str, allow_globals: Collection[str], trust_pickle: bool) -> Opened:
    if trust_pickle:
        tree = _unpickle_trusted(path)
        log.warning("'%s' was unpickled as it asked (--trust-pickle): code that it names was run", path)
    else:
        held = read_torch_file(path)
        refused = held.foreign - set(allow_globals)
        if refused:
            raise _refusal(path, find_sets(held.tree), sorted(refused))
        tree = held.tree
    found = find_sets(tree)
    if not found.sets:
        raise CheckpointError(f"'{path}' holds no state dict; {_holds(tree)}")
    lightning = isinstance(tree, dict) and any(name in tree for name in _LIGHTNING) and "state_dict" in tree
    return Opened(
        path, "Lightning checkpoint" if lightning else "torch file", found.sets, digest, step=found.step,
        classes=found.stand_ins, allowed=tuple(sorted(allow_globals)), trusted=trust_pickle,
    )  # fmt: skip


def _holds(tree: Any) -> str:
    if isinstance(tree, dict):
        return f"its keys are: {', '.join(map(str, list(tree)[:12]))}"
    return f"it holds a {getattr(tree, 'kind', '') or type(tree).__name__}; save model.state_dict()"


def _refusal(path: Path, found: Found, names: list[str]) -> CheckpointError:
    """One line for a file that pickles more than weights and known plain data, by what it is."""
    flags = " ".join(f"--allow-global {name}" for name in names[:6])
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    listed = f"{', '.join(names[:6])}{more}"
    if any(is_distributed(name) for name in names):
        return CheckpointError(
            f"'{path}' holds one rank's shards of distributed tensors ({listed}), which are no whole weights; save "
            "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)), or use "
            "torch.distributed.checkpoint and give its folder"
        )
    if any(is_rebuild(name) for name in names):
        return CheckpointError(
            f"'{path}' holds tensors of a kind that only torch's unpickler rebuilds ({listed}); save plain tensors, or "
            "add --trust-pickle, which runs what the file says"
        )
    if found.modules:
        return CheckpointError(
            f"'{path}' holds a whole pickled module, {found.modules[0]}, which needs its classes ({listed}) and may "
            f"run code; save model.state_dict() instead, or add {flags} to take its weights without running it"
        )
    return CheckpointError(
        f"'{path}' pickles {listed} beside its weights, which is not run or built; save model.state_dict() alone, or "
        f"add {flags} to skip it, or --trust-pickle, which runs what the file says"
    )


def _unpickle_trusted(path: Path) -> Any:
    require_torch_file(path)
    try:
        # What --trust-pickle asks for; its use is recorded in the manifest.
        return torch.load(path, map_location="cpu", weights_only=False, mmap=zipfile.is_zipfile(path))
    except Exception as error:
        raise CheckpointError(
            f"'{path}' ({path.stat().st_size} bytes) cannot be unpickled: {type(error).__name__}: {first_line(error)}"
        ) from error


def _open_folder(folder: Path, allow_globals: Collection[str], trust_pickle: bool) -> Opened:
    if (folder / RECORD).is_file():
        record = read_record(folder)
        weights, aliases = read_safetensors(folder / WEIGHTS)
        return Opened(folder, "checkpoint folder", (WeightSet(record.weight_set, False, weights),),
                      record.sha256[WEIGHTS], record.step, aliases,
            weight_set=record.weight_set)  # fmt: skip
    if (folder / METADATA).is_file():
        found = find_sets(read_dcp(folder))
        if not found.sets:
            raise CheckpointError(f"'{folder}' is a torch.distributed checkpoint that holds no model weights")
        return Opened(folder, "torch.distributed checkpoint", found.sets, _digest_of(sorted(folder.iterdir())))
    if any(folder.glob("*.distcp")):
        raise CheckpointError(f"'{folder}' holds shards and no {METADATA}: its save did not finish; give another one")
    if any(folder.glob("*zero_pp_rank_*")) or any(folder.glob("*/zero_pp_rank_*")):
        raise CheckpointError(f"'{folder}' is a DeepSpeed ZeRO checkpoint; run its zero_to_fp32.py and give the result")
    if hugging_face.is_folder(folder):
        return _open_hugging_face(folder, allow_globals, trust_pickle)
    raise CheckpointError(
        f"'{folder}' holds no {RECORD}; give a checkpoint folder ({RECORD}), a Hugging Face folder (config.json and "
        f"model.safetensors), a torch.distributed one ({METADATA}) or a weights file"
    )


def _open_hugging_face(folder: Path, allow_globals: Collection[str], trust_pickle: bool) -> Opened:
    files = hugging_face.weight_files(folder)
    parts = [open_source(path, allow_globals=allow_globals, trust_pickle=trust_pickle) for path in files]
    weights: Weights = {}
    aliases: dict[str, str] = {}
    for part in parts:
        for item in part.sets:
            weights |= item.whole or item.weights
        aliases |= part.aliases
    _require_indexed(folder, weights)
    digest = parts[0].sha256 if len(parts) == 1 else _digest_of(files)
    return Opened(folder, "Hugging Face folder", (WeightSet("", False, weights),), digest, aliases=aliases)


def _require_indexed(folder: Path, weights: Weights) -> None:
    for name in hugging_face.INDEXES:
        if (folder / name).is_file():
            listed = json.loads((folder / name).read_text(encoding="utf-8"))["weight_map"]
            absent = sorted(set(listed) - set(weights))
            if absent:
                raise CheckpointError(f"'{folder / name}' lists '{absent[0]}', which its shards lack; copy them again")
            return


def _digest_of(files: list[Path]) -> str:
    """One hash of several files: of their names and hashes, as `sha256sum` lists them."""
    lines = "".join(f"{sha256_of(path)}  {path.name}\n" for path in files if path.is_file())
    return hashlib.sha256(lines.encode()).hexdigest()


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """The weights of a file by their names there, in memory: for looking and comparing. Raises CheckpointError."""
    return {name: read_tensor(tensor) for name, tensor in open_weights(path).weights.items()}
