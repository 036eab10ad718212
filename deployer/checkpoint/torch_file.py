"""Files of `torch.save`: the zip archive of today and the pickle stream of before torch 1.6, read without running them.

A zip archive holds `NAME/data.pkl` and one uncompressed record a storage; the old stream holds the pickle and then the
storages one after the other. Neither is copied into memory: tensors are read from their place in the file.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from deployer.checkpoint.pickles import Unpickler
from deployer.checkpoint.tensors import FileStorage, FileTensor, Stamp, corrupt, stamp_of

_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, lengths of name and extra field
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001


@dataclass(frozen=True)
class Pickled:
    """What a pickle held: `tree` of dictionaries, lists, FileTensors and StandIns; `foreign` names that are not known
    plain data, `seen` all names."""

    tree: Any
    foreign: frozenset[str]
    seen: frozenset[str]


class Window(io.RawIOBase):
    """Part of an open file as a file of its own."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        length = max(0, min(len(buffer), self._length - self._at))
        self._file.seek(self._start + self._at)
        data = self._file.read(length)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


class Archive:
    """A zip archive of torch, open: small records as bytes, storages as places in the file. Use as a context manager.

    `start` and `length` name the part of the file that is the archive. Raises zipfile.BadZipFile, ValueError.
    """

    def __init__(self, path: Path, start: int = 0, length: int | None = None) -> None:
        self.path = path
        self._file = path.open("rb")
        self.stamp: Stamp = stamp_of(self._file.fileno())
        self._start = start
        self._size = self.stamp[0] - start if length is None else length
        try:
            self._zip = zipfile.ZipFile(io.BufferedReader(Window(self._file, start, self._size)))
        except BaseException:
            self._file.close()
            raise
        self.names = self._zip.namelist()
        self.root = self.names[0].split("/")[0] if self.names else ""

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()
        self._file.close()

    def __contains__(self, name: str) -> bool:
        return f"{self.root}/{name}" in self.names

    def read(self, name: str) -> bytes:
        return self._zip.read(f"{self.root}/{name}")

    def storage(self, name: str) -> FileStorage:
        """Where the record lies. Raises KeyError, ValueError for a record that was compressed by another tool."""
        info = self._zip.getinfo(f"{self.root}/{name}")
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise ValueError(f"record {name} is compressed, which torch never does")
        self._file.seek(self._start + info.header_offset)
        signature, name_length, extra_length = _LOCAL_HEADER.unpack(self._file.read(_LOCAL_HEADER.size))
        offset = info.header_offset + _LOCAL_HEADER.size + name_length + extra_length
        if signature != b"PK\x03\x04" or offset + info.file_size > self._size:
            raise ValueError(f"record {name} does not lie where the archive says")
        return FileStorage(self.path, self.stamp, self._start + offset, info.file_size, info.CRC)

    def check_byte_order(self) -> None:
        if "byteorder" in self and self.read("byteorder") != b"little":
            raise ValueError("it was written on a big-endian machine; save it there as .safetensors")

    def unpickle(self, name: str = "data.pkl", storages: str = "data") -> Pickled:
        self.check_byte_order()
        found: dict[str, FileStorage] = {}

        def locate(
            key: Any, _: torch.dtype, dtype: torch.dtype, start: int, shape: tuple[int, ...], strides: tuple[int, ...]
        ) -> FileTensor:
            if key not in found:
                found[key] = self.storage(f"{storages}/{key}")
            return FileTensor(found[key], dtype, shape, start, strides)

        reader = Unpickler(io.BytesIO(self.read(name)), locate)
        tree = reader.load()
        return Pickled(tree, frozenset(reader.foreign), frozenset(reader.seen))


def read_archive(path: Path, start: int = 0, length: int | None = None) -> Pickled:
    """The pickle of a zip archive of torch.save. Raises whatever a broken one leads to."""
    with Archive(path, start, length) as archive:
        return archive.unpickle()


class _LegacyUnpickler(Unpickler):
    """In the old stream the storages follow the pickle: their places are known only after it."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, self._locate)
        self.storages: dict[str, _Pending] = {}

    def storage(self, key: Any, dtype: torch.dtype, numel: int, view: Any) -> Any:
        self.storages.setdefault(str(key), _Pending(numel * dtype.itemsize))
        first = view[1] if isinstance(view, tuple) and len(view) == 3 else 0
        return super().storage((str(key), first), dtype, numel, None)

    def _locate(
        self, key: Any, _: torch.dtype, dtype: torch.dtype, start: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> Any:
        name, first = key
        return _Later(self.storages[name], dtype, shape, first + start, strides)


class _Pending:
    def __init__(self, length_bytes: int) -> None:
        self.length_bytes = length_bytes
        self.place: FileStorage | None = None


class _Later:
    """A tensor of the old stream until the place of its storage is known."""

    def __init__(
        self, storage: _Pending, dtype: torch.dtype, shape: tuple[int, ...], start: int, strides: tuple[int, ...]
    ) -> None:
        self.storage, self.dtype, self.shape, self.start, self.strides = storage, dtype, shape, start, strides

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("a tensor has no state")

    def settle(self) -> FileTensor:
        if self.storage.place is None:
            raise ValueError("a storage is missing")
        return FileTensor(self.storage.place, self.dtype, self.shape, self.start, self.strides)


def read_legacy(path: Path) -> Pickled:
    """The old stream: magic number, protocol, system, pickle, keys, then length and bytes of each storage."""
    with path.open("rb") as file:
        if _plain(file) != _LEGACY_MAGIC or _plain(file) != _LEGACY_PROTOCOL:
            raise ValueError("it is a pickle, and no torch.save file")
        system = _plain(file)
        if not (isinstance(system, dict) and system.get("little_endian", True)):
            raise ValueError("it was written on a big-endian machine; save it there as .safetensors")
        reader = _LegacyUnpickler(file)
        tree = reader.load()
        stamp = stamp_of(file.fileno())
        for key in _plain(file):
            pending = reader.storages[str(key)]
            file.seek(8, io.SEEK_CUR)  # the number of elements, which the pickle told already
            place = FileStorage(path, stamp, file.tell(), pending.length_bytes)
            if place.offset_bytes + place.length_bytes > stamp[0]:
                raise ValueError("it ends within a tensor")
            pending.place = place
            file.seek(pending.length_bytes, io.SEEK_CUR)
    return Pickled(_settled(tree, {}), frozenset(reader.foreign), frozenset(reader.seen))


def _plain(file: IO[bytes]) -> Any:
    """A pickle of numbers, strings, lists and dictionaries."""

    class Plain(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            raise pickle.UnpicklingError(f"{module}.{name} where plain data is expected")

    return Plain(file, encoding="utf-8").load()


def _settled(value: Any, done: dict[int, Any]) -> Any:
    """`value` with every `_Later` in its dictionaries, lists, tuples and stand-ins replaced, in place."""
    if isinstance(value, _Later):
        return value.settle()
    if id(value) in done:
        return value
    done[id(value)] = value
    if isinstance(value, dict):
        for key in value:
            value[key] = _settled(value[key], done)
    elif isinstance(value, list):
        value[:] = [_settled(item, done) for item in value]
    elif isinstance(value, tuple):
        return tuple(_settled(item, done) for item in value)
    elif hasattr(value, "pairs"):
        for mapping in (value.state, value.pairs):
            _settled(mapping, done)
    return value


def is_archive(path: Path) -> bool:
    """Whether the first bytes are those of a zip file."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def require_torch_file(path: Path) -> None:
    """Raises CheckpointError for a file that begins like nothing that torch.save writes."""
    with path.open("rb") as file:
        magic = file.read(2)
    if magic[:1] != b"\x80" and magic != b"PK":
        raise corrupt(path, "it is no torch.save file")


def read_torch_file(path: Path) -> Pickled:
    """Raises CheckpointError, one line with path and size, for anything that is not a whole torch.save file."""
    require_torch_file(path)
    try:
        return read_archive(path) if is_archive(path) else read_legacy(path)
    except Exception as error:
        raise corrupt(path, describe(error)) from error


def describe(error: BaseException) -> str:
    """A library's complaint about a broken file in a few words."""
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:199] + "…"
