"""Reading weights from files without executing anything in them, and fitting them to a model strictly."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from deployer.errors import CheckpointError, first_line, nearest

StateDict = dict[str, Tensor]

#: names under which training scripts nest the weights beside optimizer and epoch
_NESTS = ("state_dict", "model_state_dict", "model", "module", "net", "network", "weights")

#: path segments that torch's own wrappers (DDP, torch.compile) add to keys
_WRAPPERS = frozenset({"module", "_orig_mod"})


def read_weights(path: Path) -> StateDict:
    """Named tensors on the CPU from `.safetensors` or a weights-only `.pt`/`.pth`/`.bin`.

    Raises CheckpointError, one line with the path and its size, for anything that is not a readable state dict.
    """
    if not path.is_file():
        raise CheckpointError(f"no checkpoint file '{path}'")
    size_bytes = path.stat().st_size
    if path.suffix == ".safetensors":
        try:
            return load_file(path, device="cpu")
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(
                f"'{path}' ({size_bytes} bytes) is truncated or corrupt: {first_line(error)}"
            ) from error
    if path.suffix not in (".pt", ".pth", ".bin", ".ckpt"):
        raise CheckpointError(f"'{path}' has no known checkpoint suffix; expected .safetensors, .pt, .pth or .bin")
    return _find_state_dict(_torch_load(path, size_bytes), path)


def _torch_load(path: Path, size_bytes: int) -> Any:
    with path.open("rb") as file:
        magic = file.read(4)
    if not magic.startswith((b"PK\x03\x04", b"\x80")):
        raise CheckpointError(f"'{path}' ({size_bytes} bytes) is truncated or corrupt: it is no torch.save file")
    try:
        # mmap needs the zip container; the legacy pickle stream starts with \x80
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:
        text = str(error)
        if named := re.search(r"GLOBAL (\S+)|Unsupported (?:global|class)\W+(\S+)", text):
            name = (named[1] or named[2]).strip("`'\".,")
            raise CheckpointError(
                f"'{path}' holds a pickled {name}, which weights-only loading does not run; "
                "save model.state_dict() alone"
            ) from error
        raise CheckpointError(f"'{path}' ({size_bytes} bytes) is truncated or corrupt: {first_line(error)}") from error


def _is_state_dict(value: Any) -> bool:
    return isinstance(value, Mapping) and len(value) > 0 and all(isinstance(item, Tensor) for item in value.values())


def _find_state_dict(value: Any, path: Path) -> StateDict:
    if _is_state_dict(value):
        return dict(value)
    if isinstance(value, Mapping):
        found = [name for name in _NESTS if _is_state_dict(value.get(name))]
        if len(found) == 1:
            return dict(value[found[0]])
        keys = ", ".join(map(str, list(value)[:12]))
        if found:
            raise CheckpointError(
                f"'{path}' holds several sets of weights ({', '.join(found)}); save one of them alone"
            )
        raise CheckpointError(f"'{path}' holds no state dict; its keys are: {keys}")
    raise CheckpointError(f"'{path}' holds a {type(value).__name__}; save model.state_dict()")


def _plain(key: str) -> str:
    return ".".join(part for part in key.split(".") if part not in _WRAPPERS)


def fit_keys(state: StateDict, expected: set[str]) -> tuple[StateDict, dict[str, str]]:
    """`state` under the model's own keys, and the renames done (old → new).

    A key that the model has stays. Any other is matched to the one model key that is equal once wrapper segments are
    taken out of both, so a submodule that is really called `module` keeps its name.
    """
    by_plain: dict[str, list[str]] = {}
    for key in expected:
        by_plain.setdefault(_plain(key), []).append(key)
    fitted: StateDict = {}
    renamed: dict[str, str] = {}
    for key, tensor in state.items():
        target = key
        if key not in expected:
            candidates = by_plain.get(_plain(key), [])
            if len(candidates) == 1:
                target = candidates[0]
                renamed[key] = target
        if target in fitted:
            raise CheckpointError(f"two keys of the checkpoint mean '{target}'; one of them is '{key}'")
        fitted[target] = tensor
    return fitted, renamed


def load_weights(model: nn.Module, state: StateDict, source: str) -> dict[str, str]:
    """Load `state` into `model` strictly; returns the renames. Values are cast to the model's own dtypes.

    Raises CheckpointError listing missing and unexpected keys, shapes that differ, or tensors that hold NaN/infinity.
    """
    own = model.state_dict()
    fitted, renamed = fit_keys(state, set(own))
    missing = sorted(set(own) - set(fitted))
    unexpected = sorted(set(fitted) - set(own))
    if missing or unexpected:
        parts = [f"missing: {_listed(missing)}"] if missing else []
        if unexpected:
            hint = nearest(unexpected[0], missing) if missing else ""
            parts.append(f"unexpected: {_listed(unexpected)}{hint if hint.startswith('; did') else ''}")
        raise CheckpointError(f"{source} does not fit {type(model).__name__}: {'; '.join(parts)}")
    shapes = [
        f"{key} is {list(fitted[key].shape)}, the model has {list(own[key].shape)}"
        for key in own
        if fitted[key].shape != own[key].shape
    ]
    if shapes:
        raise CheckpointError(f"{source} does not fit {type(model).__name__}: {'; '.join(shapes[:5])}")
    broken = [key for key, tensor in fitted.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if broken:
        raise CheckpointError(f"{source} holds NaN or infinity in: {_listed(broken)}")
    model.load_state_dict(fitted, strict=True)
    return renamed


def _listed(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
