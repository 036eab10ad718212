"""Folders of Hugging Face: `config.json` beside `model.safetensors`, one file or shards under an index.

The weights are read here; the model is built by `transformers` from the configuration alone. Code that a folder
brings (`auto_map`, `trust_remote_code`) is never run.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from deployer.checkpoint.tensors import corrupt
from deployer.errors import CheckpointError, MachineError, ModelError, first_line

#: the reference under which checkpoints name `build`; it is deployer's own, so a folder may name it
BUILDER = "deployer.checkpoint.hugging_face:build"
CONFIG = "config.json"
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLE = ("model.safetensors", "pytorch_model.bin")
_INSTALL = "pip install 'deployer[hf]'"


def is_folder(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (*INDEXES, *SINGLE))


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights. Raises CheckpointError for an index that names files which are not there."""
    for name in INDEXES:
        if (folder / name).is_file():
            return _shards(folder, folder / name)
    return [next(folder / name for name in SINGLE if (folder / name).is_file())]


def _shards(folder: Path, index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise corrupt(index, f"it is no index of shards ({first_line(error)})") from error
    for name in names:
        if Path(str(name)).name != name:
            raise CheckpointError(f"'{index}' names the file '{name}' outside its folder")
        if not (folder / name).is_file():
            raise CheckpointError(f"'{folder / name}' is missing, '{index.name}' names it; copy the whole folder")
    return [folder / name for name in names]


def describe_model(folder: Path) -> tuple[str, dict[str, Any]]:
    """Reference and arguments that build the model of `folder`. Raises CheckpointError, ModelError."""
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        architectures = config.get("architectures") or []
    except FileNotFoundError as error:
        raise CheckpointError(f"'{folder}' holds no {CONFIG}; add --model path.py:factory") from error
    except (OSError, ValueError, AttributeError) as error:
        raise corrupt(path, first_line(error)) from error
    if len(architectures) != 1:
        raise ModelError(
            f"'{path}' names {len(architectures)} architectures; one is expected: add it, or --model path.py:factory"
        )
    return BUILDER, {"architecture": architectures[0], "config": config}


def build(architecture: str, config: Mapping[str, Any]) -> nn.Module:
    """A model of `transformers` with random weights, outputs by name, no cache. Raises MachineError, ModelError."""
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise MachineError("a Hugging Face folder needs transformers to build its model", install=_INSTALL) from error
    kind: Any = getattr(transformers, architecture, None)
    known = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    if not known:
        remote = " (it asks for code of its own, which deployer never runs)" if "auto_map" in config else ""
        raise ModelError(
            f"transformers {transformers.__version__} has no model '{architecture}'{remote}; "
            "add --model path.py:factory"
        )
    settings = {key: value for key, value in config.items() if key not in ("auto_map", "torch_dtype", "dtype")}
    made = kind.config_class.from_dict(settings)
    made.return_dict = True
    if hasattr(made, "use_cache"):
        made.use_cache = False  # a cache is no tensor, and the first request has none
    model: Any = kind._from_config(made)
    model.loss_function = None  # tracing reads every property; unset, this one logs a warning
    filled: nn.Module = model
    return filled
