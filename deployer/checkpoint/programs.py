"""Exported programs as sources: TorchScript archives, torch.export archives and ONNX files, looked at without running.

TorchScript and torch.export archives keep the model's own names, so their weights can fill a model again. A frozen
TorchScript archive and a compiled AOTInductor package have turned the weights into constants without names; an ONNX
file may have folded, fused or transposed them under their old names, so weights taken from it would prove nothing.
These can be looked at, and are refused as weights with the way out.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deployer.checkpoint.pickles import StandIn
from deployer.checkpoint.tensors import FileTensor, MemoryTensor, StoredTensor, corrupt, is_tensor
from deployer.checkpoint.torch_file import Archive, describe
from deployer.errors import CheckpointError, MachineError

_SCALAR_TYPES = {
    1: torch.uint8, 2: torch.int8, 3: torch.int16, 4: torch.int32, 5: torch.int64, 6: torch.float16, 7: torch.float32,
    8: torch.float64, 10: torch.complex64, 11: torch.complex128, 12: torch.bool, 13: torch.bfloat16, 28: torch.uint16,
    29: torch.float8_e4m3fn, 30: torch.float8_e5m2, 34: torch.uint32, 35: torch.uint64,
}  # fmt: skip


@dataclass(frozen=True)
class Program:
    """`refusal` says why the tensors are no weights, and what to give instead; "" where they are."""

    kind: str
    weights: dict[str, StoredTensor]
    facts: dict[str, Any]
    refusal: str = ""


def read_program_archive(path: Path) -> Program | None:
    """What a zip archive holds if it is a TorchScript or torch.export one; None for one of torch.save.

    Raises CheckpointError for one that is cut off.
    """
    try:
        with Archive(path) as archive:
            if "constants.pkl" in archive and any("/code/" in name for name in archive.names):
                return _torchscript(archive)
            if "archive_format" in archive:
                return _exported(archive)
    except CheckpointError:
        raise
    except Exception as error:
        raise corrupt(path, describe(error)) from error
    return None


def _torchscript(archive: Archive) -> Program:
    held = archive.unpickle()
    weights = dict(_attributes(held.tree, "", 0))
    classes = sorted(name.rsplit(".", 1)[-1] for name in held.seen if name.startswith("__torch__."))
    facts = {"classes": ", ".join(dict.fromkeys(classes)), "names": "parameters, buffers and tensor attributes"}
    if not weights:
        constants = archive.unpickle("constants.pkl", "constants").tree
        unnamed = {f"constant_{place}": item for place, item in enumerate(constants) if is_tensor(item)}
        facts["names"] = "none: the archive is frozen"
        return Program(
            "TorchScript archive, frozen", unnamed, facts,
            "freezing turned its weights into constants without names; give the checkpoint that it was made from, or "
            "the archive from before torch.jit.freeze",
        )  # fmt: skip
    return Program("TorchScript archive", weights, facts)


def _attributes(value: Any, prefix: str, depth: int) -> Iterator[tuple[str, StoredTensor]]:
    """Tensors of a scripted module by the dotted names of its attributes."""
    if depth > 100 or not isinstance(value, StandIn):
        return
    for name, item in value.state.items():
        if is_tensor(item):
            yield f"{prefix}{name}", item
        else:
            yield from _attributes(item, f"{prefix}{name}.", depth + 1)


def _exported(archive: Archive) -> Program:
    models = [name.split("/", 1)[1] for name in archive.names if "/models/" in name and name.endswith(".json")]
    if not models:
        compiled = any("/data/aotinductor/" in name for name in archive.names)
        return Program(
            "AOTInductor package" if compiled else "pt2 archive without a program", {}, {},
            "compiled code holds no weights by name; give the checkpoint that it was made from",
        )  # fmt: skip
    archive.check_byte_order()
    stem = Path(models[0]).stem
    weights = _raw_tensors(archive, f"data/weights/{stem}_weights_config.json", "data/weights")
    signature = json.loads(archive.read(models[0]))["graph_module"]["signature"]
    inputs: list[Any] = [next(iter(entry["user_input"]["arg"].values()), {}) for entry in signature["input_specs"]
              if "user_input" in entry]  # fmt: skip
    outputs: list[Any] = [next(iter(entry["user_output"]["arg"].values()), {}) for entry in signature["output_specs"]
               if "user_output" in entry]  # fmt: skip
    facts = {"inputs": _joined_names(inputs), "outputs": _joined_names(outputs)}
    return Program("torch.export archive", weights, facts)


def _joined_names(arguments: list[Any]) -> str:
    return ", ".join(str(item.get("name", "?")) if isinstance(item, dict) else str(item) for item in arguments)


def _raw_tensors(archive: Archive, config: str, folder: str) -> dict[str, StoredTensor]:
    if config not in archive:
        return {}
    found: dict[str, StoredTensor] = {}
    for name, entry in json.loads(archive.read(config))["config"].items():
        meta = entry["tensor_meta"]
        if entry["use_pickle"] or meta["dtype"] not in _SCALAR_TYPES:
            raise CheckpointError(
                f"'{archive.path}' stores '{name}' as a pickle or in a dtype that is not read here; give the "
                "checkpoint that it was made from"
            )
        found[name] = FileTensor(
            archive.storage(f"{folder}/{entry['path_name']}"),
            _SCALAR_TYPES[meta["dtype"]],
            tuple(size["as_int"] for size in meta["sizes"]),
            meta["storage_offset"]["as_int"],
            tuple(stride["as_int"] for stride in meta["strides"]),
        )
    return found


def read_onnx(path: Path) -> Program:
    """Inputs, outputs and initializers of an ONNX file, without their values. Raises CheckpointError, MachineError."""
    try:
        onnx = importlib.import_module("onnx")
    except ModuleNotFoundError as error:
        raise MachineError("looking into an .onnx file needs onnx", install="pip install 'deployer[cpu]'") from error
    try:
        model = onnx.load(str(path), load_external_data=False)
        if not model.graph.output:
            raise ValueError("it holds no graph")
        weights = {entry.name: _initializer(onnx, entry) for entry in model.graph.initializer}
    except Exception as error:
        raise corrupt(path, describe(error)) from error
    facts = {
        "inputs": ", ".join(_value_info(onnx, value) for value in model.graph.input),
        "outputs": ", ".join(_value_info(onnx, value) for value in model.graph.output),
        "opset": ", ".join(f"{entry.domain or 'ai.onnx'} {entry.version}" for entry in model.opset_import),
        "made by": f"{model.producer_name} {model.producer_version}".strip(),
        "nodes": len(model.graph.node),
    }
    return Program(
        "ONNX file", weights, facts,
        "its exporter may have folded, fused or transposed the weights; give the checkpoint that it was made from",
    )  # fmt: skip


def _initializer(onnx: Any, entry: Any) -> StoredTensor:
    """Dtype and shape; the values stay away (they may lie in another file, and are never used)."""
    dtype = torch.from_numpy(onnx.numpy_helper.to_array(onnx.TensorProto(data_type=entry.data_type, dims=[0]))).dtype
    return MemoryTensor(torch.empty(tuple(entry.dims), dtype=dtype, device="meta"))


def _value_info(onnx: Any, value: Any) -> str:
    kind = value.type.tensor_type
    shape = ", ".join(str(axis.dim_param or axis.dim_value) for axis in kind.shape.dim)
    return f"{value.name}: {onnx.TensorProto.DataType.Name(kind.elem_type).lower()}[{shape}]"


def require_weights(program: Program, path: Path) -> dict[str, StoredTensor]:
    """The weights, or CheckpointError in one line: what it is, why it has none, what to give."""
    if program.refusal:
        raise CheckpointError(f"'{path}' is a {program.kind}, not weights: {program.refusal}")
    return program.weights
