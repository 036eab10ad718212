"""Reading pickles without running anything that they ask for.

A pickle is a program that names functions and calls them. Here every name is looked up in a table: those that rebuild
a tensor describe it (`FileTensor`), a dictionary is a dictionary, and any other class or function becomes a `StandIn`,
an object that keeps what the file says about it and does nothing. No module is imported and no code of a file, of an
installed package or of Python itself is called on a file's behalf.

Stand-ins for classes that are known to be plain data (options, paths, dates, numpy scalars) pass without a word. Any
other is reported in `Pickled.foreign`, and the caller refuses it unless the user allowed that name.
"""

from __future__ import annotations

import io
import pickle
import re
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import IO, Any

import torch

from deployer.checkpoint.tensors import FileTensor


class StandIn:
    """Where a pickle asks for an object of the class or a call of the function `kind`."""

    kind = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> StandIn:
        made = super().__new__(cls)
        made.args = args
        made.state = {}
        made.items = []
        made.pairs = {}
        return made

    args: tuple[Any, ...]
    state: dict[str, Any]
    items: list[Any]
    pairs: dict[Any, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                self.state |= {str(key): value for key, value in part.items()}
            else:
                self.items.append(part)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.pairs[key] = value

    def append(self, item: Any) -> None:
        self.items.append(item)

    def extend(self, items: Any) -> None:
        self.items.extend(items)

    add = append

    def __call__(self, *args: Any, **kwargs: Any) -> StandIn:
        return self

    def fields(self) -> dict[Any, Any]:
        """Attributes and, of a mapping, entries."""
        return {**self.state, **self.pairs}


#: full names that are plain data wherever they are seen; nothing of them runs, so whole packages may be listed
_HARMLESS = re.compile(
    r"argparse\.Namespace|types\.SimpleNamespace|builtins\.(object|set|frozenset|slice|range|complex"
    r"|bytearray|bytes|int|float|bool|str|tuple|type)"
    r"|(collections|datetime|decimal|fractions|uuid|zoneinfo|typing|enum|pathlib(\._local)?)\.\w+"
    r"|copyreg\._reconstructor|_codecs\.encode|re\._compile|sre_compile\.\w+"
    r"|numpy\.(dtype|ndarray|generic|bool_?|u?int\d*|float\d*|complex\d*|str_|bytes_|datetime64|timedelta64)"
    r"|numpy\.dtypes\.\w+|numpy\.(_?core|random)\.(multiarray|numeric|_pickle|mtrand|_\w+)\.\w+"
    r"|omegaconf\.[\w.]+|yacs\.config\.CfgNode|easydict\.EasyDict|addict\.(addict\.)?Dict|munch\.[\w.]+"
    r"|ml_collections\.[\w.]+|box\.[\w.]+"
    r"|mm(engine|cv)\.[\w.]+|(pytorch_lightning|lightning|lightning_fabric|lightning_utilities)\.[\w.]+"
    r"|torch\.(torch_version\.TorchVersion|device|Size|layout|memory_format|Generator|Tensor|nn\.[\w.]+)"
    r"|torch\.(optim|amp)\.[\w.]+|torch\.serialization\._get_layout|torch\.utils\.hooks\.\w+"
)
#: functions that rebuild tensors of kinds which have no plain values
_REBUILDS = re.compile(r"torch\._utils\._rebuild_\w+|torch\._tensor\._rebuild\w+")


def is_harmless(name: str) -> bool:
    return _HARMLESS.fullmatch(name) is not None


def is_rebuild(name: str) -> bool:
    return _REBUILDS.fullmatch(name) is not None


def is_distributed(name: str) -> bool:
    return name.startswith(("torch.distributed.tensor.", "torch.distributed._tensor.", "torch.distributed._shard."))


_STORAGES = {
    "FloatStorage": torch.float32, "DoubleStorage": torch.float64, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64, "ComplexDoubleStorage": torch.complex128, "UntypedStorage": torch.uint8,
}  # fmt: skip
_DTYPES = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


class _Raw:
    """A storage as the pickle sees it: opaque, its place known to the reader alone."""

    __slots__ = ("dtype", "key")

    def __init__(self, key: Any, dtype: torch.dtype) -> None:
        self.key, self.dtype = key, dtype

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("a storage has no state")


#: (key, dtype of the storage, dtype of the tensor, first element, shape, strides) → the tensor
Locate = Callable[[Any, torch.dtype, torch.dtype, int, tuple[int, ...], tuple[int, ...]], FileTensor]


class Unpickler(pickle.Unpickler):
    """`locate` says where a tensor lies; `foreign` collects the names of everything that is not known plain data."""

    def __init__(self, file: IO[bytes], locate: Locate) -> None:
        super().__init__(file, encoding="utf-8", errors="surrogateescape")
        self.locate = locate
        self.foreign: set[str] = set()
        self.seen: set[str] = set()
        self._classes: dict[str, type[StandIn]] = {}
        self._table: dict[str, Any] = {
            "collections.OrderedDict": OrderedDict,
            "collections.defaultdict": lambda *_: {},
            "collections.Counter": lambda *_: {},
            "builtins.dict": lambda *_: {},
            "builtins.list": lambda *_: [],
            "torch.Size": lambda sizes=(): tuple(sizes),
            "torch._utils._rebuild_tensor": self._tensor,
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_tensor_v3": self._tensor_v3,
            "torch._utils._rebuild_parameter": lambda data, *_: data,
            "torch._utils._rebuild_parameter_with_state": lambda data, *_: data,
            "torch._tensor._rebuild_from_type_v2": self._of_type,
        }

    def find_class(self, module: str, name: str) -> Any:
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        full = f"{module}.{name}"
        self.seen.add(full)
        if module in ("torch", "torch.cuda", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        if full in _DTYPES:
            return _DTYPES[full]
        if full in self._table:
            return self._table[full]
        if not is_harmless(full):
            self.foreign.add(full)
        return self._classes.setdefault(full, type("StandIn", (StandIn,), {"kind": full}))

    def persistent_load(self, pid: Any) -> Any:
        if not isinstance(pid, tuple) or len(pid) < 5 or _text(pid[0]) != "storage":
            if isinstance(pid, tuple) and pid and _text(pid[0]) == "module":  # containers of old files, with source
                return pid[1]
            raise pickle.UnpicklingError(f"persistent id {str(pid)[:60]} is no storage")
        _, dtype, key, _, numel, *view = pid
        if not isinstance(dtype, torch.dtype) or type(numel) is not int or numel < 0:
            raise pickle.UnpicklingError("a storage without type or size")
        return self.storage(_text(key), dtype, numel, view[0] if view else None)

    def storage(self, key: Any, dtype: torch.dtype, numel: int, view: Any) -> Any:
        return _Raw(key, dtype)

    def _tensor(self, raw: Any, start: int, shape: Any, strides: Any, *_: Any) -> FileTensor:
        return self._tensor_v3(raw, start, shape, strides, False, None, getattr(raw, "dtype", None))

    def _tensor_v3(
        self, raw: Any, start: int, shape: Any, strides: Any, grad: Any, hooks: Any, dtype: Any, *_: Any
    ) -> FileTensor:
        if not isinstance(raw, _Raw) or not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError("a tensor without a storage")
        return self.locate(raw.key, raw.dtype, dtype, start, tuple(shape), tuple(strides))

    def _of_type(self, rebuild: Any, kind: Any, args: Any, state: Any) -> Any:
        """A subclass of Tensor, or a Tensor with attributes: its values."""
        if not isinstance(kind, type) or not issubclass(kind, StandIn) or not kind.kind.startswith("torch."):
            self.foreign.add(getattr(kind, "kind", "torch._tensor._rebuild_from_type_v2"))
        return rebuild(*args)


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


def module_tensors(value: StandIn, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """State-dict names and tensors of a pickled nn.Module that was read as a stand-in; nothing of it is run."""
    if depth > 100:
        raise pickle.UnpicklingError("modules nested more than 100 deep")
    state = value.state
    skipped = _names(state.get("_non_persistent_buffers_set"))
    for group in ("_parameters", "_buffers"):
        for name, tensor in (state.get(group) or {}).items():
            if tensor is not None and not (group == "_buffers" and name in skipped):
                yield f"{prefix}{name}", tensor
    for name, child in (state.get("_modules") or {}).items():
        if isinstance(child, StandIn):
            yield from module_tensors(child, f"{prefix}{name}.", depth + 1)


def _names(value: Any) -> set[Any]:
    if isinstance(value, StandIn):  # `set([…])`, or an empty set filled by ADDITEMS
        value = [*value.items, *(value.args[0] if value.args else ())]
    return set(value) if isinstance(value, set | frozenset | list | tuple) else set()


def is_module(value: Any) -> bool:
    return isinstance(value, StandIn) and "_parameters" in value.state and "_modules" in value.state


def unpickle(data: bytes, locate: Locate) -> tuple[Any, Unpickler]:
    reader = Unpickler(io.BytesIO(data), locate)
    return reader.load(), reader
