"""Files of safetensors: the header is checked by the library, the values stay in the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from deployer.checkpoint.tensors import FileStorage, FileTensor, StoredTensor, corrupt, stamp_of
from deployer.checkpoint.torch_file import describe

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


def read_safetensors(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Tensors by name, and the names that are stored under another name: a tied weight is stored once, and the
    header's metadata says `{other name: stored name}`, as `safetensors.torch.save_model` writes it.

    Raises CheckpointError in one line with the path and its size.
    """
    try:
        with safe_open(path, framework="pt"):
            pass  # the library holds header, dtypes, shapes and offsets to each other and to the size of the file
        header, first = _header(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise corrupt(path, describe(error)) from error
    stamp = stamp_of(path)
    metadata = header.pop("__metadata__", {})
    tensors: dict[str, StoredTensor] = {}
    for name, entry in header.items():
        if entry["dtype"] not in _DTYPES:
            raise corrupt(path, f"'{name}' has the dtype {entry['dtype']}, which is not read here")
        begin, end = entry["data_offsets"]
        storage = FileStorage(path, stamp, first + begin, end - begin)
        tensors[name] = FileTensor(storage, _DTYPES[entry["dtype"]], tuple(entry["shape"]))
    aliases = {name: kept for name, kept in metadata.items() if kept in tensors and name not in tensors}
    return tensors, aliases


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The header and where the values begin."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(length)), 8 + length
