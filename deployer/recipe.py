"""deployer.yaml: the recipe of a model that does not describe itself. Read strictly: an unknown key is an error.

Paths in a recipe start at the recipe's own folder.
"""

from __future__ import annotations

import inspect as python_inspect
import json
import logging
import math
import os.path
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml
from torch import nn

from deployer.checkpoint import Checkpoint, build_filled, describe_model, hugging_face, load_checkpoint, probe_spec
from deployer.checkpoint.folder import RECORD
from deployer.errors import CheckpointError, SampleError, SpecError, UsageError, nearest
from deployer.files import write_atomic
from deployer.references import is_file_reference, split_reference
from deployer.samples import check_samples, read_samples
from deployer.spec import Array, Dim, ModelSpec, TensorSpec

log = logging.getLogger(__name__)

FILE_NAME = "deployer.yaml"
SCHEMA_VERSION = 1


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int | str, ...]
    low: int | float | None = None
    high: int | float | None = None

    def tensor(self, name: str) -> TensorSpec:
        return TensorSpec(name, self.dtype, self.shape, self.low, self.high)


class ExportEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Defaults of `deployer export`; its flags win."""

    formats: tuple[str, ...] = ()
    precision: str = "fp32"
    compile: str | None = None
    device: str | None = None
    builder: str | None = None
    gpu_archs: tuple[str, ...] = ()
    calibration: str | None = None
    metric: str | None = None
    max_drop: float | None = None
    keep_slow: bool = False
    output: str = "build"


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole of deployer.yaml. A self-describing checkpoint folder needs `checkpoint` and `export` alone.

    `weights` and `allow_globals` are the flags of the same names; `--trust-pickle` is a flag alone.
    """

    name: str | None = None
    model: str | None = None
    args: dict[str, Any] = {}
    checkpoint: str | None = None
    weights: str | None = None
    allow_globals: tuple[str, ...] = ()
    samples: str | None = None
    dims: dict[str, Dim] = {}
    batch: str | None = None
    inputs: dict[str, TensorEntry] = {}
    outputs: dict[str, TensorEntry] = {}
    labels: tuple[str, ...] = ()
    masks: dict[str, str] = {}
    version: str = "1.0"
    export: ExportEntry = ExportEntry()
    schema_version: int = SCHEMA_VERSION

    def spec(self) -> ModelSpec | None:
        """The ModelSpec that the recipe declares, or None when it declares no inputs. Raises SpecError."""
        if not self.inputs:
            return None
        if self.name is None:
            raise SpecError(f"{FILE_NAME} declares inputs and no name; add `name:`")
        return ModelSpec(
            name=self.name,
            inputs=tuple(entry.tensor(name) for name, entry in self.inputs.items()),
            outputs=tuple(entry.tensor(name) for name, entry in self.outputs.items()),
            dims=self.dims,
            batch=self.batch,
            version=self.version,
            labels=self.labels,
            masks=self.masks,
        )


class _UniqueKeys(yaml.SafeLoader):
    """YAML says that keys are unique, PyYAML takes the last of them: here a key that stands twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.YAMLError(f"the key '{key.value}' stands twice, again in line {key.start_mark.line + 1}")
            seen.add(key.value)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def read_recipe(path: Path) -> Recipe:
    """Parse and check a recipe. Raises UsageError or SpecError naming the file, the place and the nearest right key."""
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)  # noqa: S506 - a SafeLoader
        json.dumps(data, default=str)  # an alias that holds itself has no end
    except FileNotFoundError as error:
        raise UsageError(f"no recipe '{path}'; `deployer init` writes one") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"'{path}' is not YAML: {error}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"'{path}' holds an alias that contains itself; write its values out") from error
    if not isinstance(data, Mapping):
        raise UsageError(f"'{path}' holds a {type(data).__name__}; a mapping of keys is expected")
    _check_keys(data, Recipe, str(path))
    if isinstance(data.get("export"), Mapping):
        _check_keys(data["export"], ExportEntry, f"{path}: export")
    try:
        recipe = msgspec.convert(dict(data), Recipe)
    except msgspec.ValidationError as error:
        raise UsageError(f"'{path}': {error}") from error
    if recipe.schema_version != SCHEMA_VERSION:
        raise UsageError(f"'{path}' has schema_version {recipe.schema_version}; this deployer reads {SCHEMA_VERSION}")
    return recipe


def _check_keys(data: Mapping[str, Any], kind: type[msgspec.Struct], where: str) -> None:
    for key in data:
        if key not in kind.__struct_fields__:
            raise UsageError(f"{where}: unknown key '{key}'{nearest(str(key), kind.__struct_fields__)}")


def resolve_in(folder: Path, reference: str | None) -> str | None:
    """A recipe's path or `path.py:name`, made to start at the recipe's folder; module references stay."""
    if reference is None:
        return None
    if ":" in reference:
        if not is_file_reference(reference):
            return reference
        source, name = split_reference(reference)
        return f"{folder / source}:{name}"
    return str(folder / reference)


def write_recipe(
    path: Path,
    *,
    model: str,
    samples: str,
    args: Mapping[str, Any],
    checkpoint: str | None,
    name: str | None,
    overwrite: bool = False,
    weights: str | None = None,
    allow_globals: Collection[str] = (),
    trust_pickle: bool = False,
) -> tuple[ModelSpec, list[str]]:
    """Probe `model` with `samples` and write a commented recipe that reads back; returns its spec and notes.

    References start at the working folder, as typed; in the file they are written as they must be read from there.
    Raises UsageError when the file exists, ModelError, CheckpointError or SampleError.
    """
    if path.exists() and not overwrite:
        raise UsageError(f"'{path}' exists; remove it, give another name with -o, or add --force")
    module = build_filled(
        model, args, None if checkpoint is None else Path(checkpoint),
        weights=weights, allow_globals=allow_globals, trust_pickle=trust_pickle,
    )  # fmt: skip
    arrays = _named(read_samples(samples), module)
    spec, notes = probe_spec(module, name or _default_name(model, args), arrays)
    check_samples(spec, arrays)
    folder = path.parent
    text = _render(
        spec,
        model=_relative(model, folder),
        samples=_relative(samples, folder),
        args=args,
        checkpoint=None if checkpoint is None else _relative(checkpoint, folder),
        weights=weights,
        allow_globals=allow_globals,
        notes=notes,
    )
    write_atomic(path, text.encode())
    read_recipe(path)  # what was written must read back
    return spec, notes


def _named(arrays: Mapping[str, Array], module: Any) -> dict[str, Array]:
    """A bare `.npy` is the first parameter of forward."""
    if list(arrays) != [""]:
        return dict(arrays)
    parameters = list(python_inspect.signature(module.forward).parameters)
    if not parameters:
        raise SampleError("the model's forward takes no input")
    return {parameters[0]: arrays[""]}


def _default_name(model: str, args: Mapping[str, Any]) -> str:
    """The file's or the function's name; of a Hugging Face model its architecture's."""
    if model == hugging_face.BUILDER:
        return str(args["architecture"])
    source, function = split_reference(model)
    stem = Path(source).stem if source.endswith(".py") else source.rsplit(".", 1)[-1]
    return function if stem in ("model", "models") and function not in ("build", "make_model", "create") else stem


def _relative(reference: str, folder: Path) -> str:
    source, separator, name = reference.rpartition(":") if ":" in reference else (reference, "", "")
    if separator and not source.endswith(".py"):
        return reference
    return os.path.relpath(Path(source).resolve(), folder.resolve()) + separator + name


def _render(
    spec: ModelSpec,
    *,
    model: str,
    samples: str,
    args: Mapping[str, Any],
    checkpoint: str | None,
    weights: str | None,
    allow_globals: Collection[str],
    notes: list[str],
) -> str:
    lines = [
        "# Recipe for `deployer export`. Paths start at this file's folder; flags of the command win over it.",
        f"schema_version: {SCHEMA_VERSION}",
        f"name: {_scalar(spec.name)}",
        "",
        "# What builds the model: path.py:function or package.module:function, called with args.",
        f"model: {_scalar(model)}",
        f"args: {json.dumps(dict(args))}",
        "# Weights: a file or folder of any kind that docs/checkpoints.md lists. null: the function brings its own.",
        f"checkpoint: {_scalar(checkpoint)}",
        "# Which weights of a file that holds several: raw, ema or their place. null: raw where there is a choice.",
        f"weights: {_scalar(weights)}",
        *([f"allow_globals: [{', '.join(map(_scalar, allow_globals))}]"] if allow_globals else []),
        "# Real inputs: .npz, .safetensors or module:function. The gate compares on them; nothing is made up.",
        f"samples: {_scalar(samples)}",
        "",
        "# Dynamic axes. Every size from min to max is proved; `typical` is what is tuned for.",
        "dims:" if spec.dims else "dims: {}",
        *(f"  {name}: {{min: {d.min}, typical: {d.typical}, max: {d.max}}}" for name, d in spec.dims.items()),
        "# The axis along which requests are stacked; null: every request runs alone.",
        f"batch: {_scalar(spec.batch)}",
        "",
        *(f"# note: {note}" for note in notes),
        "inputs:",
        *_tensor_lines(spec.inputs),
        "# As the model answered when it was probed; '?' is an axis whose size is not checked.",
        "outputs:",
        *_tensor_lines(spec.outputs),
        "",
        "export:",
        "  formats: [onnx]        # torchscript, exported, aoti, onnx, trt",
        "  precision: fp32        # or int8, with real inputs as calibration: FILE or path.py:function",
        "  compile: null          # default, reduce-overhead or max-autotune, for exported and aoti",
        "  output: build",
    ]
    return "\n".join(lines) + "\n"


def _tensor_lines(tensors: tuple[TensorSpec, ...]) -> list[str]:
    return [f"  {tensor.name}: {{{_tensor_fields(tensor)}}}" for tensor in tensors]


def _tensor_fields(tensor: TensorSpec) -> str:
    fields = [f"dtype: {tensor.dtype}", f"shape: [{', '.join(_scalar(size) for size in tensor.shape)}]"]
    fields += [f"{word}: {value}" for word, value in (("low", tensor.low), ("high", tensor.high)) if value is not None]
    return ", ".join(fields)


def _scalar(value: Any) -> str:
    """One YAML scalar on one line."""
    return yaml.safe_dump(value, default_flow_style=True, width=math.inf).removesuffix("...\n").strip()


def find_recipe(path: Path | None) -> tuple[Recipe, Path | None]:
    """The recipe at `path`, or deployer.yaml of the working folder, and its folder; an empty recipe and None where
    none stands. Raises UsageError when `path` was given and is not there."""
    if path is None and not Path(FILE_NAME).is_file():
        return Recipe(), None
    path = path or Path(FILE_NAME)
    return read_recipe(path), path.parent


def load_described(
    recipe: Recipe,
    folder: Path | None,
    checkpoint: Path | None = None,
    *,
    model: str | None = None,
    args: Mapping[str, Any] | None = None,
    samples: str | None = None,
    name: str | None = None,
    weights: str | None = None,
    allow_globals: Collection[str] = (),
    trust_pickle: bool = False,
) -> Checkpoint:
    """A Checkpoint from what was given on the command line, then the recipe, then a spec probed from the samples.

    A self-describing folder given as `checkpoint` speaks for itself: the model of a recipe that happens to stand in
    the working folder is not applied to it, and that is said. A Hugging Face folder describes its model alone.
    """
    base = folder or Path()
    described = checkpoint is not None and (checkpoint / RECORD).is_file()
    if described and recipe.model is not None:
        log.warning("%s describes itself; model, inputs and samples of %s are not used", checkpoint, FILE_NAME)
    source = checkpoint or (None if recipe.checkpoint is None else base / recipe.checkpoint)
    if source is not None and not source.exists():
        raise CheckpointError(f"no checkpoint at '{source}'; give a checkpoint folder or a weights file")
    if described:
        return load_checkpoint(source, model=model, args=args, samples=samples, weights=weights)
    weights = weights or recipe.weights
    if recipe.model is None and source is not None and (source / RECORD).is_file():
        return load_checkpoint(source, model=model, args=args, samples=samples, weights=weights)
    opened: dict[str, Any] = {
        "weights": weights,
        "allow_globals": (*recipe.allow_globals, *allow_globals),
        "trust_pickle": trust_pickle,
    }
    args = recipe.args if args is None else args
    model = model or resolve_in(base, recipe.model)
    if model is None and source is not None and (own := describe_model(source)) is not None:
        model, args = own[0], {**own[1], **args}
    samples = samples or resolve_in(base, recipe.samples)
    spec = recipe.spec()
    if spec is None and model is not None and samples is not None:
        module = build_filled(model, args, source, **opened)
        spec = _probe(module, samples, name or recipe.name or _default_name(model, args))
    if spec is not None and name is not None:
        spec = msgspec.structs.replace(spec, name=name)
    return load_checkpoint(source, model=model, args=args, spec=spec, samples=samples, **opened)


def _probe(module: nn.Module, samples: str, name: str) -> ModelSpec:
    spec, notes = probe_spec(module, name, _named(read_samples(samples), module))
    log.warning("no recipe: the spec was probed from the samples: %s", ", ".join(map(str, spec.inputs)))
    for note in notes:
        log.warning("%s", note)
    return spec
